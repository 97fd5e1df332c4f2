"""The published recipes for DeepSeek-R1 and V3: `dsjax plan` and `deploy/dynamo` write each option, or there is a reason why not.

The recipes are `configs/recipes/*.toml`: their options, names that the engine has since changed, the arguments of the `dsjax plan` that
writes them, and the reason wherever ours differ. docs/recipes.csv shows them:

    python -m tests.dsjax.plan.test_published_recipes > docs/recipes.csv
"""

import csv
import dataclasses
import functools
import json
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.engine.experts.eplb import EplbConfig
from dsjax.plan.recipe import read_recipe
from dsjax.plan.rules import documented
from sharding import MeshSpec
from tools.make_deploy import published, sides_of

ROOT = Path(__file__).parents[3]
RECIPES = {
    path.stem: tomllib.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "configs" / "recipes").glob("*.toml"))
}
COLUMNS = ["recipe", "side", "option", "where", "there", "dsjax plan", "passed on from", "why dsjax plan differs"]
COLUMNS += ["dsjax dynamo", "why dsjax dynamo differs"]
_SAYS = ("elsewhere", "passed", "why", "why_dsjax")  # tables of a recipe's file: option to what is said of it


class Row(NamedTuple):
    """One option of one side: its value in the recipe, ours for the same engine, dsjax's own, and the reasons where they differ.

    Values are as commands have them; None where an option is not written. An option without a value is "". passed: the argument of
    the planner's command that ours is passed on from. where: the section that names it, where that is not the recipe's own.
    """

    side: str
    option: str
    where: str
    there: str
    ours: str | None
    passed: str
    why: str
    own: str | None
    why_own: str

    @property
    def problems(self) -> Iterator[str]:
        """Values that differ without a reason, and reasons for values that do not differ."""
        for who, value, why in (("dsjax plan", self.ours, self.why), ("deploy/dynamo", self.own, self.why_own)):
            same = value is not None and meaning(self.there) == meaning(value)
            if same == bool(why):
                said = "a reason and the same value" if same else f"{value!r} and no reason"
                yield f"{self.side} {self.option} is {self.there!r}, and {who} has {said}"


def command(recipe: dict) -> str:
    """The `dsjax plan` whose winner a recipe is."""
    return f"dsjax plan --engine {recipe['engine']} {recipe['plan']}"


@functools.cache
def planned(engine: str, line: str) -> dict[str, dict[str, str]]:
    """Role to option to value, as a `dsjax plan` writes them for an engine.

    Options that only some hosts have are among them; where a value differs between hosts, the first that has it stands.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.json")
        words = ["plan", "recipe", str(path), *shlex.split(line)[2:], "--json", str(Path(folder, "plan.json"))]
        app(words, standalone_mode=False)
        services = read_recipe(path)["services"]
    found = {}
    for service in services:
        launch = service["launches"][engine]
        values = flat(next(iter(launch["config"].values()), {}))
        for text in launch["commands"]:
            values = read_command(engine, text) | values
        found[service["role"]] = values
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


def meaning(text: str) -> Any:
    """What a value says: numbers, truth and JSON are compared as such, a flag's mere presence as true."""
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
        text = value if isinstance(value, str) else json.dumps(value)
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: text}
    return found


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
            says = [recipe[table].get(f"{role} {option}", recipe[table].get(option, "")) for table in _SAYS]
            where, passed, why, why_own = says
            name, own_name = recipe["renamed"].get(option, option), recipe["dsjax"].get(option)
            value = written(own, own_name) if own_name else None
            if own_name in ("--mesh", "--disaggregation-mode") and value is not None and not why_own:
                value = there if _means_mesh(option, there, own) else value
            made.append(Row(role, option, where, there, written(ours, name), passed, why, value, why_own))
    return made


def _means_mesh(option: str, there: str, own: dict[str, str]) -> bool:
    """Whether our mesh, or our role, says what an option of another engine says."""
    if option in ("--is-prefill-worker", "--disaggregation-mode"):
        return own["--disaggregation-mode"] == (there or "prefill")
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


def problems() -> Iterator[str]:
    """What the data leaves unsaid, or says in vain, of all recipes."""
    for name, recipe in RECIPES.items():
        every, words = rows(recipe), shlex.split(recipe["plan"])[::2]
        used = {key for row in every for key in (row.option, f"{row.side} {row.option}")}
        yield from (f"{name}: {text}" for row in every for text in row.problems)
        for table in ("renamed", "dsjax", *_SAYS):
            yield from (f"{name}: [{table}] has {key}, and no side" for key in recipe[table].keys() - used)
        for row in every:
            if row.passed and row.passed not in words:
                yield f"{name}: {row.side} {row.option} is passed on from {row.passed}, which the command has not"


def table() -> list[list[str]]:
    """docs/recipes.csv: every option of every recipe, with its value in the recipe, in `dsjax plan` and in deploy/dynamo."""

    def shown(value: str | None) -> str:
        return {None: "", "": "given", "?": "named, without a value"}.get(value, value or "")

    every = [(name, row) for name, recipe in RECIPES.items() for row in rows(recipe)]
    return [
        COLUMNS,
        *(
            [name, *row._replace(**{key: shown(getattr(row, key)) for key in ("there", "ours", "own")})]
            for name, row in every
        ),
    ]


def test_the_table_has_every_option_with_its_reasons():
    with (ROOT / "docs" / "recipes.csv").open(encoding="utf-8", newline="") as file:
        written_rows = list(csv.reader(file))
    # The planner's own values change with its tables; whether they need a reason is tested below.
    for row in (expected := table())[1:] + written_rows[1:]:
        row[5] = ""
    assert written_rows == expected


def test_every_option_that_differs_has_a_reason_and_no_reason_is_left_over():
    assert list(problems()) == []


def test_the_command_of_a_recipe_writes_the_script_whose_values_are_compared(tmp_path):
    for name in ("tensorrt-llm-gb200-36", "vllm-h20-32"):
        recipe, path = RECIPES[name], tmp_path / f"{name}.sh"
        line = command(recipe)
        result = CliRunner().invoke(app, ["plan", "recipe", str(path), *shlex.split(line)[2:]])
        assert result.exit_code == 0, result.output
        script = path.read_text(encoding="utf-8")
        started = [one.removeprefix("exec ") for one in script.splitlines() if one.startswith("exec ")]
        for values in planned(recipe["engine"], line).values():
            found = [read_command(recipe["engine"], one) for one in started]
            shown = {key: value for key, value in values.items() if key.startswith("--")}
            assert any(shown.items() >= {k: v for k, v in one.items() if k.startswith("--")}.items() for one in found)


def test_no_reason_denies_an_option_that_the_engine_has():
    fields = {field.name for field in dataclasses.fields(EplbConfig)}
    reasons = [reason for recipe in RECIPES.values() for reason in recipe["why_dsjax"].values()]
    denied = [reason.partition(" is no option")[0].split() for reason in reasons if " is no option" in reason]
    assert not fields & {word for words in denied for word in words}


if __name__ == "__main__":
    csv.writer(sys.stdout, lineterminator="\n").writerows(table())
