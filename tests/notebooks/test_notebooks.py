"""Every notebook runs from its first cell to its last; what is committed is small and was run."""

import json
import os
from pathlib import Path

import pytest

from notebooks.execute import execute, read

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
SMALL = {
    "1_mesh_layouts": 'LAYOUTS = {"dp=4,tp=8": "4 replicas", "dp=4,tp=8,ep=4": "each expert cut in 8 slices"}\nCHANGED_ON = "tp=2"',
    "2_mla_forms": 'TOKENS = 2\nCOMPARED = ("CC",)\nCONTEXT = 64',
    "3_dispatch": 'MESH, HOST = "dp=4", 2\nTOKENS = 8\nSKEWS = (0.0, 1.0)',
    "4_dry_run_671b": 'MODEL, LAYOUTS, CONTEXT = "demo", ("dp=8",), 512',
    "5_planner": 'CLUSTER = "h200-8"\nMODES = ("aggregated",)',
    "6_routing": 'MESH = "dp=1"\nMODULES = ("heapq",)\nTOKENS = 1024\nCHUNK = 256',
    "7_same_answer": 'RUNS = {name: RUNS[name] for name in ("one device", "4 replicas, wide EP")}',
}
"""Sizes at which a test can wait for a notebook; the files themselves were run at their own."""
MOST_BYTES = 300_000


def cells(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


@pytest.mark.slow
def test_every_notebook_runs_and_draws_its_pictures():
    """One kernel runs all of them and forgets all names in between: starting kernels takes longer than the small notebooks."""
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package, reason="needs nbclient, ipykernel and matplotlib: pip install -e '.[test]'")
    import nbformat

    assert list(SMALL) == NOTEBOOKS
    notebooks = [read(name, sizes) for name, sizes in SMALL.items()]
    joined = nbformat.v4.new_notebook(metadata=notebooks[0].metadata)
    for notebook in notebooks:
        joined.cells += [nbformat.v4.new_code_cell("%reset -f"), *notebook.cells]
    # This process's flags, quick compilation among them; how many devices there are, the first notebook says, before JAX starts.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    execute(joined, " ".join(flags))
    for name, notebook in zip(SMALL, notebooks, strict=True):
        ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in ran), name
        pictures = [output for cell in ran for output in cell.outputs if "image/png" in output.get("data", {})]
        assert len(pictures) >= 2, name


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_readers_see_was_run_in_order_is_small_and_begins_with_words_and_one_import_line(name):
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES
    first, second, *_ = cells(name)
    assert first["cell_type"] == "markdown"
    assert "".join(first["source"]).startswith("# ")
    line = "".join(second["source"])
    assert line.startswith(("import ", "from "))
    assert "\n" not in line.strip()
