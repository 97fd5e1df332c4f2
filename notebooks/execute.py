"""Run the notebooks anew, each in a kernel of its own, and keep what they show.

python notebooks/execute.py               # all of them
python notebooks/execute.py 3_dispatch    # one

Needs `pip install 'dsjax[notebooks]'`. Prints seconds and the size of each file.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))
MOST_SECONDS = 600
_PALETTE = 128


def read(name: str, sizes: str = ""):
    """Read a notebook. sizes: Python assignments that replace those of the cell tagged ``parameters``."""
    import nbformat

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    if sizes:
        places = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
        if len(places) != 1:
            raise ValueError(
                f"notebook {name} has {len(places)} cells tagged 'parameters', expected one to put sizes after"
            )
        notebook.cells.insert(places[0] + 1, nbformat.v4.new_code_cell(sizes))
    return notebook


def execute(notebook, xla_flags: str = "") -> None:
    """Run a notebook from the source tree, on the CPU, in a fresh kernel, and keep its outputs in it.

    xla_flags: what XLA is told beside what the notebook itself tells it.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; the message has its traceback.
    """
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook,
        timeout=MOST_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
    )
    client.execute(env=_environment() | {"XLA_FLAGS": xla_flags})


def _environment() -> dict[str, str]:
    """This process's, with the tree to import from, and without the threads of its own JAX: a notebook says itself how many
    devices it emulates."""
    found = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    paths = [str(FOLDER.parent), *filter(None, [found.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


def shrink_pictures(notebook) -> None:
    """Give every picture a palette: plots have few colours, and a repository keeps every version of them."""
    from PIL import Image

    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            png = output.get("data", {}).get("image/png")
            if png:
                small = io.BytesIO()
                picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
                picture.quantize(_PALETTE, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
                output["data"]["image/png"] = base64.b64encode(small.getvalue()).decode()


def main() -> None:
    """The command."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NOTEBOOKS)}; default: all")
    names = parser.parse_args().names or NOTEBOOKS
    if unknown := sorted(set(names) - set(NOTEBOOKS)):
        parser.error(f"no notebook {', '.join(unknown)}; there are {', '.join(NOTEBOOKS)}")
    for name in names:
        started = time.perf_counter()
        notebook = read(name)
        execute(notebook)
        shrink_pictures(notebook)
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(notebook, path)
        print(f"{name}: {time.perf_counter() - started:.0f} s, {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
