"""The house: which room may import which. The table here is what CONTRIBUTING.md's "The house" shows."""

import ast
import functools
import graphlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dsjax.engine.program_cache import identity

ROOT = Path(__file__).parents[1]

HOUSE = (
    ("dsjax.serve", "dsjax.dynamo", "dsjax.bench", "dsjax.top", "dsjax.cli", "dsjax.llm"),
    ("dsjax.plan", "dsjax.dryrun"),
    ("dsjax.engine",),
    ("dsjax.hosts",),
    ("dsjax.messaging",),
    ("dsjax.checkpoint",),
    ("dsjax.model",),
    ("dsjax.kernels",),
    ("dsjax.config", "dsjax.hardware"),
    ("dsjax.fp4",),
    ("sharding",),
)
"""Each line may import those below it, never those above."""

ENGINE = (
    "", "elastic", "setup", "stream", "transfer", "tiers", "pipeline", "experts", "afd", "device", "program_cache", "text", "schedule",
    "contract",
)  # fmt: skip
"""The engine's rooms, the front first: each may import those behind it, never those before it."""

MOST_LINES = 4000
"""A room that has more is two."""

JAX_FREE = ("schedule", "contract", "text")
"""The engine's rooms that neither import JAX nor NumPy at their top."""


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of a package's modules."""
    for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


@functools.cache
def imported(path: Path) -> set[str]:
    """Everything that a file imports, wherever in it: lazily, and for types only too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def floor_of(name: str, floors: dict[str, int]) -> int | None:
    """The floor of the innermost of these packages that a module is in; None where it is in none."""
    around = [package for package in floors if f"{name}.".startswith(f"{package}.")]
    return floors[max(around, key=len)] if around else None


def upward(house: Sequence[Sequence[str]]) -> list[str]:
    """Imports that point upward in a house, the packages of the highest floor first, as `importer -> imported`."""
    floors = {package: floor for floor, packages in enumerate(house) for package in packages}
    found = []
    for name, path in (*modules("dsjax"), *modules("sharding")):
        floor = floor_of(name, floors)
        if floor is not None and path.name != "__main__.py":  # `python -m dsjax.plan` is the command line
            others = {other: floor_of(other, floors) for other in imported(path)}
            found += [f"{name} -> {other}" for other, its in others.items() if its is not None and its < floor]
    return found


def test_the_engines_rooms_import_only_what_is_below_them():
    assert upward([[f"dsjax.engine.{room}".removesuffix(".")] for room in ENGINE]) == []


def test_the_programs_rooms_import_only_what_is_below_them():
    assert upward(HOUSE) == []


def test_names_of_compiled_programs_leave_out_what_is_above_the_engine_and_no_more():
    above = [package for packages in HOUSE[: HOUSE.index(("dsjax.engine",))] for package in packages]
    assert {f"dsjax.{room.removesuffix('.py')}" for room in identity._ABOVE} == set(above)


def test_no_modules_import_each_other_in_a_circle():
    files = dict((*modules("dsjax"), *modules("sharding")))

    def module(name: str) -> str:
        return name if name in files else name.rpartition(".")[0]

    edges = {name: set(map(module, imported(path))) & files.keys() - {name} for name, path in files.items()}
    graphlib.TopologicalSorter(edges).prepare()  # the error names the circle


@pytest.mark.parametrize("room", ENGINE)
def test_a_room_is_no_larger_than_one_can_know(room: str):
    folder = ROOT / "dsjax" / "engine" / room
    files = folder.glob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) <= MOST_LINES


@pytest.mark.parametrize("room", JAX_FREE)
def test_rooms_without_jax_import_none(room: str):
    for name, path in modules(f"dsjax.engine.{room}"):
        assert not {other for other in imported(path) if other.split(".")[0] in ("jax", "jaxlib", "flax")}, name


def test_only_the_model_and_what_measures_its_modules_import_flax():
    files = dict(modules("dsjax"))
    importers = {name for name, path in files.items() if any(other.startswith("flax") for other in imported(path))}
    assert {name for name in importers if not name.startswith(("dsjax.model.", "dsjax.bench.modules."))} == set()


def test_the_contributors_page_shows_this_house():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The house")[2].partition("\n## ")[0]
    shown = re.findall(r"^dsjax/engine/(\w*)/? ", text, re.MULTILINE)
    assert shown == list(ENGINE)


NAMED = {
    "fp4": {
        "dsjax/checkpoint": "fp4_tensors.py source.py",
        "dsjax/config": "fp4_quantization.py quantization.py weights.py",
        "dsjax/hardware": "description.py",
        "dsjax/kernels/native": "bindings.cc experts.h fp4.h harness.cc products_fp4.cc",
        "dsjax/kernels": "native_calls.py table.py",
        "dsjax/kernels/pallas": "fp4_products.py",
        "dsjax/model": "expert_weights.py experts.py fp4_matrix.py transformer.py",
        "dsjax/plan": "chip.py engine.py precision.py",
    },
    r"sparse.attention|sparse_attention|(model|plan).sparse|indexer(?!ror)|index_(topk|scores|n_heads|head_dim)\b|v3\.2|deepseek_v32": {
        "dsjax/checkpoint": "names.py",
        "dsjax/config": "attention.py families.py hugging_face.py",
        "dsjax/engine/setup": "args.py assembly.py",
        "dsjax/kernels/native": "index.h",
        "dsjax/kernels/pallas": "index.py tpu_index.py",
        "dsjax/kernels": "table.py",
        "dsjax/model": "attention.py cache_groups.py mla_costs.py native_products.py parameter_counts.py step_description.py "
        "transformer.py",
        "dsjax/plan": "fit.py sparse.py step.py",
        "sharding": "fp8.py",
    },
    r"(?-i:(?<![-\w])v4\b|DeepseekV4|v4_tensors|V4Tensors|Compressed[A-Z]\w*|compressed_(?!project|output)\w+|\.compressed\b)": {
        "dsjax/checkpoint": "names.py source.py",
        "dsjax/config": "families.py hugging_face.py model_config.py",
        "dsjax/kernels/native": "attention.cc bindings.cc",
        "dsjax/kernels": "native_calls.py",
        "dsjax/model": "layer_costs.py step_description.py transformer.py",
        "dsjax/plan": "step.py",
    },
}
"""For each capability, given as the words that name it: the files outside its own folder that use them, by folder.

The lists may only shrink. Whoever has to know how weights are kept asks ``dsjax.config.weights``. DeepSeek-V4's are the identifiers in its
own files; the names that its parts have in a profile are no identifiers.
"""


V4 = (
    "dsjax/model/compressed/", "dsjax/config/deepseek_v4.py", "dsjax/checkpoint/v4_tensors.py", "dsjax/plan/compressed.py",
    "dsjax/kernels/native/compressed.h", "dsjax/kernels/pallas/compressed.py",
)  # fmt: skip
"""What DeepSeek-V4 has to itself: compressed entries have an indexer, too, and a cache in FP8 keeps index keys in FP4."""
OWN_FOLDER = ("dsjax/fp4/", "dsjax/model/sparse/", *V4)
PROMPTS = (
    "dsjax/dynamo/arguments.py", "dsjax/engine/text/prompt_encoder.py", "dsjax/serve/dsml.py", "dsjax/serve/options.py",
)  # fmt: skip
"""Files that name V3.2 for its prompts, which have nothing to do with its attention."""


@pytest.mark.parametrize("words", NAMED)
def test_a_capability_is_named_in_its_folder_and_in_ever_fewer_files(words: str):
    files = [path for folder in ("dsjax", "sharding") for path in (ROOT / folder).rglob("*.*")]
    files = [path for path in files if path.suffix in (".py", ".h", ".cc")]
    named = re.compile(words, re.IGNORECASE)
    found = {str(path.relative_to(ROOT)) for path in files if named.search(path.read_text(encoding="utf-8"))}
    found = {name for name in found if not name.startswith(OWN_FOLDER + PROMPTS)}
    listed = {f"{folder}/{name}" for folder, names in NAMED[words].items() for name in names.split()}
    assert sorted(found - listed) == [], "ask the tables that there are instead (weight formats, kernels, forms)"
    assert sorted(listed - found) == [], "take these from the list"
