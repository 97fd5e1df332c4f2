"""Writes docs/recipes.md: every option of the published recipes for DeepSeek-R1 and V3, beside what `dsjax plan` and `deploy/dynamo` write.

    python tools/recipes_table.py

The recipes are `configs/recipes/*.toml`: their options, names that the engine has since changed, the arguments of the `dsjax plan`
that writes them, and the reason wherever ours differ. That command is run, and what it writes is what is compared.
An option that differs without a reason, or has a reason and does not differ, is an error.
"""

import argparse
import functools
import json
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dsjax.cli.main import app
from dsjax.plan.launch import documented
from dsjax.plan.recipe import read_recipe
from tools.make_deploy import published, sides_of

PAGE, RECIPES = ROOT / "docs" / "recipes.md", ROOT / "configs" / "recipes"
ABSENT = "—"
UNVALUED = "?"
"""In a recipe's file: an option that its source names without saying its value."""
_HEAD = """# The published recipes, option by option

Each table has every option of a published recipe, its value there, what the `dsjax plan --engine …` above it writes, and what our own
deployment (`deploy/dynamo`) gives `dsjax dynamo`. Where a value differs, the reason stands behind it. `python tools/recipes_table.py`
runs the commands and writes this page from [configs/recipes](../configs/recipes), and a test holds both to what is written today. Names
and values are also held against the argument parsers of the engines' newest releases
([configs/engines/options](../configs/engines/options)). Nobody has run the engines' commands here.

{ABSENT} means that the option is not written. **← `--mesh`** names the argument of the command that a value is passed on from: the recipe
was asked for there, so that the two agree by construction. All other values are the planner's own: which kernels and buffers a layout
takes, how much of the memory, and, where the command has no `--max-concurrency`, how many requests. A few of its constants were taken from
these recipes in the first place: SGLang's bootstrap port, TensorRT-LLM's stream interval and variables, the window of vLLM's balancer.
`dsjax plan recipe FILE.sh …` writes each host's command whole.
`sharedMemorySize` (/dev/shm), `cpu`, `memory` and `rdma/ib` (network cards) are of the pods, `storage` and `accessModes` of the volume
that they read the model from, `numNodes` of the ComputeDomain, and `benchmark` of 001's one call of `perf.sh`, which is of every recipe.
What a recipe's own file does not have is followed by the place that names it.
""".replace("{ABSENT}", ABSENT)


@dataclass(frozen=True)
class Row:
    """One option of one side: its value in the recipe, ours for the same engine, dsjax's own, and the reasons where they differ.

    Values are as commands have them; None where an option is not written. An option without a value is "". passed: the argument of
    the planner's command that ours is passed on from. where: the section that names it, where that is not the recipe's own.
    """

    side: str
    option: str
    there: str
    ours: str | None
    why: str
    own: str | None
    why_own: str
    passed: str = ""
    where: str = ""

    @property
    def problems(self) -> Iterator[str]:
        """Values that differ without a reason, and reasons for values that do not differ."""
        for who, value, why in (("dsjax plan", self.ours, self.why), ("deploy/dynamo", self.own, self.why_own)):
            same = value is not None and alike(self.there, value)
            if same == bool(why):
                said = "a reason and the same value" if same else f"{value!r} and no reason"
                yield f"{self.side} {self.option} is {self.there!r}, and {who} has {said}"


def recipes() -> dict[str, dict[str, Any]]:
    """Name to what the file says."""
    return {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(RECIPES.glob("*.toml"))}


def arguments(recipe: dict) -> dict[str, str]:
    """The last value of each argument of a recipe's `dsjax plan`."""
    words = shlex.split(recipe["plan"])
    return dict(zip(words[::2], words[1::2], strict=True))


def command(recipe: dict) -> str:
    """The `dsjax plan` whose winner a recipe is."""
    return f"dsjax plan --engine {recipe['engine']} {recipe['plan']}"


def mesh(recipe: dict, role: str) -> str:
    """The mesh that the command asks for a side."""
    return arguments(recipe)["--mesh" if role == "prefill and decode" else f"--{role}-mesh"]


@functools.cache
def planned(engine: str, line: str) -> dict[str, dict[str, str]]:
    """Role to option to value, as a `dsjax plan` writes them for an engine.

    Options that only some hosts have are among them; where a value differs between hosts, the first that has it stands.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.json")
        answer = str(Path(folder, "plan.json"))
        app(["plan", "recipe", str(path), *shlex.split(line)[2:], "--json", answer], standalone_mode=False)
        services = read_recipe(path)["services"]
    found = {}
    for service in services:
        launch = service["launches"][engine]
        values: dict[str, str] = {}
        for text in reversed(launch["commands"]):
            values = values | read_command(engine, text)
        found[service["role"]] = values | flat(next(iter(launch["config"].values()), {}))
    return found


def read_command(engine: str, line: str) -> dict[str, str]:
    """Options and environment variables of one line for a shell; the model, where it is no option, as MODEL."""
    words, found = shlex.split(line), {}
    program = shlex.split(documented(engine)["program"])
    start = next(at for at in range(len(words)) if words[at : at + len(program)] == program)
    found |= dict(word.split("=", 1) for word in words[:start] if re.match("[A-Z_]+=", word))
    words = words[start + len(program) :]
    if not words[0].startswith("--"):
        found["MODEL"] = words.pop(0)
    name = ""
    for word in words:
        if word.startswith("--"):
            name, found[word] = word, ""
        else:
            found[name] = word
    return found


def alike(there: str, value: str) -> bool:
    """Whether two values say the same: numbers, truth and JSON are compared as such, a flag's mere presence as true."""
    return _meaning(there) == _meaning(value)


def _meaning(text: str) -> Any:
    try:
        return json.loads(text.lower()) if text else True
    except json.JSONDecodeError:
        return text


def written(values: dict[str, str], name: str) -> str | None:
    """The value of an option, or of a part of an option's JSON (`--eplb-config window_size`)."""
    option, _, part = name.partition(" ")
    value = values.get(option)
    if not part or value is None:
        return value
    found = json.loads(value).get(part)
    return None if found is None else json.dumps(found)


def flat(config: dict[str, Any], above: str = "") -> dict[str, str]:
    """A configuration file's values by their paths."""
    found: dict[str, str] = {}
    for key, value in config.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: _text(value)}
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def deployed(name: str, role: str) -> dict[str, str]:
    """What a file of `deploy/dynamo` gives its workers of a role, their pods and its benchmark.

    Options of `dsjax dynamo`; the pods' resources; what the template says of all pods; the volume, nodes of a ComputeDomain, and lengths.
    """
    every, template = published(), (ROOT / "deploy" / "templates" / "dynamo.yaml").read_text(encoding="utf-8")
    both = role == "prefill and decode"
    sides = sides_of(name)
    (side,) = [one for one in sides if both or one["kind"] == role]
    nodes = sum(one["workers"] * one["hosts"] for one in sides if one["domain"])
    (memory,) = set(re.findall(r"sharedMemorySize: (\S+)", template))
    (concurrency,) = re.findall(r"--sweep-concurrency (\S+)", template)
    return (
        {"--model": every["model"], **side["options"], **side["resources"]["requests"]}
        | ({} if both else {"--disaggregation-mode": role})
        | ({"numNodes": str(nodes)} if nodes else {})
        | {"sharedMemorySize": memory, "storage": every["volume"], "accessModes": "ReadWriteMany"}
        | {"benchmark.input": str(every["input_tokens"]), "benchmark.output": str(every["output_tokens"])}
        | {"benchmark.concurrency": concurrency}
    )


def rows(recipe: dict) -> list[Row]:
    """Every option of every side."""
    made, written_by = [], planned(recipe["engine"], command(recipe))
    for side in recipe["sides"]:
        role, ours = side["role"], written_by[side["role"]]
        own = deployed(recipe["graph"], role)
        for option, there in side["options"].items():
            why, why_own, passed, where = (
                recipe[table].get(f"{role} {option}", recipe[table].get(option, "")) for table in _SAYS
            )
            name, own_name = recipe["renamed"].get(option, option), recipe["dsjax"].get(option)
            value = written(own, own_name) if own_name else None
            if own_name in ("--mesh", "--disaggregation-mode") and value is not None and not why_own:
                value = there if _means_mesh(option, there, own) else value
            made.append(Row(role, option, there, written(ours, name), why, value, why_own, passed, where))
    return made


_SAYS = ("why", "why_dsjax", "passed", "elsewhere")
"""Tables of a recipe's file: option to what is said of it."""


def _means_mesh(option: str, there: str, own: dict[str, str]) -> bool:
    """Whether our mesh, or our role, says what an option of another engine says."""
    if option in ("--is-prefill-worker", "--disaggregation-mode"):
        return own["--disaggregation-mode"] == (there or "prefill")
    from sharding import MeshSpec

    mesh = MeshSpec.parse(own["--mesh"])
    if option in ("--tp", "tensor_parallel_size"):  # SGLang's and TensorRT-LLM's count all devices of an instance
        return int(there) == mesh.num_devices
    if option in ("--ep-size", "moe_expert_parallel_size"):
        return int(there) == mesh.ep_size
    if option in ("--enable-dp-attention", "enable_attention_dp"):
        return mesh.dp_size > 1
    if option == "--enable-expert-parallel":
        return mesh.ep_size > 1
    return int(there) == (mesh.tp_size if option == "--tensor-parallel-size" else mesh.dp_size)


def problems() -> list[str]:
    """What the data leaves unsaid, or says in vain, of all recipes."""
    found = []
    for name, recipe in recipes().items():
        every = rows(recipe)
        found += [f"{name}: {text}" for row in every for text in row.problems]
        used = {key for row in every for key in (row.option, f"{row.side} {row.option}")}
        for table in ("renamed", "dsjax", *_SAYS):
            found += [
                f"{name}: [{table}] has {key}, which the recipe has not" for key in recipe[table] if key not in used
            ]
        found += [
            f"{name}: {row.side} {row.option} is passed on from {row.passed}, which the command has not"
            for row in every
            if row.passed and row.passed not in arguments(recipe)
        ]
    return found


def _cell(value: str | None) -> str:
    if value is None:
        return ABSENT
    if value == UNVALUED:
        return "named, without a value"
    return f"`{value}`".replace("|", "\\|") if value else "given"


def page() -> str:
    """The page's text."""
    parts = [_HEAD]
    for recipe in recipes().values():
        parts.append(f"## {recipe['title']}\n\n{recipe['source']}. Ours: `deploy/dynamo/{recipe['graph']}.yaml`.\n")
        parts.append(f"```\n{command(recipe)}\n```\n")
        every = rows(recipe)
        for side in recipe["sides"]:
            parts.append(f"**{side['role'].capitalize()}**, `{mesh(recipe, side['role'])}`\n")
            lines = [
                "| option | there | planned | why it differs | dsjax | why it differs |",
                "|---|---|---|---|---|---|",
            ]
            for row in every:
                if row.side == side["role"]:
                    named = f"`{row.option}`" + (f" ({row.where})" if row.where else "")
                    ours = _cell(row.ours) + (f" ← `{row.passed}`" if row.passed else "")
                    cells = (named, _cell(row.there), ours, row.why, _cell(row.own), row.why_own)
                    lines.append(f"| {' | '.join(cells)} |")
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if wrong := problems():
        sys.exit("\n".join(wrong))
    PAGE.write_text(page(), encoding="utf-8")
