"""Steps that are described and not compiled, and a part of the tests that compile for accelerators."""

import json
import zlib
from types import SimpleNamespace

import pytest
from layouts import TINY

SLICE = "--accelerator-slice"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/dsjax/dryrun/test_topology.py --accelerator-slice 2/4`."""
    parser.addoption(SLICE, metavar="K/N", help="run the Kth of N parts of test_topology.py, by hashes of tests' names")


def in_slice(name: str, part: str) -> bool:
    """Whether a test belongs to the part `K/N`.

    Raises:
        UsageError: it is no such part.
    """
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise pytest.UsageError(f"{SLICE} is {part!r}, expected K/N with K from 1 to N, such as 2/4")
    return zlib.crc32(name.encode()) % int(parts) == int(number) - 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of test_topology.py that are outside the slice."""
    part = config.getoption(SLICE, default=None)
    if part is None:
        return
    out = [item for item in items if item.path.name == "test_topology.py" and not in_slice(item.name, part)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)  # those that share programs take long


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """The folder of a configuration of V3's structure with an MTP module."""
    folder = tmp_path_factory.mktemp("tiny")
    changed = {"torch_dtype": "bfloat16", "num_nextn_predict_layers": 1, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(TINY | changed))
    return str(folder)


@pytest.fixture(scope="session")
def described():
    """Return the `CompiledStep` of a dry run whose programs were not compiled: they take no memory."""
    from dsjax.config import load_config
    from dsjax.dryrun import compilation
    from sharding import MeshSpec

    sizes = ("argument", "host_argument", "output", "alias", "temp")
    nothing = SimpleNamespace(**{f"{size}_size_in_bytes": 0 for size in sizes})
    program = compilation.CompiledProgram(SimpleNamespace(memory_analysis=lambda: nothing), None, 0.0, 0.0)

    def describe(args, stage=None):
        mesh = MeshSpec.parse(args.engine.mesh).stage.build()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compilation, "_compile", lambda *_: program)
            return compilation.compile_step(args, load_config(args.engine.model), mesh, stage=stage)

    return describe
