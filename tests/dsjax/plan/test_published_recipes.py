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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.engine.experts.eplb import EplbConfig
from dsjax.plan.recipe import read_recipe
from dsjax.plan.rules import documented
from sharding import MeshSpec
from tools.make_deploy import published, sides_of

ROOT = Path(__file__).parents[3]
RECIPES, TABLE = ROOT / "configs" / "recipes", ROOT / "docs" / "recipes.csv"


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


def table() -> list[dict[str, str]]:
    """The rows of docs/recipes.csv: every option of every recipe, with its value in the recipe, in `dsjax plan` and in deploy/dynamo."""
    return [
        {
            "recipe": name,
            "side": row.side,
            "option": row.option,
            "where": row.where,
            "there": _shown(row.there),
            "dsjax plan": _shown(row.ours),
            "passed on from": row.passed,
            "why dsjax plan differs": row.why,
            "dsjax dynamo": _shown(row.own),
            "why dsjax dynamo differs": row.why_own,
        }
        for name, recipe in recipes().items()
        for row in rows(recipe)
    ]


def _shown(value: str | None) -> str:
    """A value for a reader: "given" for an option without one, nothing for an option that is not written."""
    return {None: "", "": "given", "?": "named, without a value"}.get(value, value or "")


def test_the_table_has_every_option_with_its_reasons():
    with TABLE.open(encoding="utf-8", newline="") as file:
        written_rows = list(csv.DictReader(file))
    # The planner's own values change with its tables; whether they need a reason is tested below.
    for row in (expected := table()) + written_rows:
        del row["dsjax plan"]
    assert written_rows == expected


def test_every_option_that_differs_has_a_reason_and_no_reason_is_left_over():
    assert problems() == []


def test_the_command_of_a_recipe_writes_the_script_whose_values_are_compared(tmp_path):
    for name in ("tensorrt-llm-gb200-36", "vllm-h20-32"):
        recipe, path = recipes()[name], tmp_path / f"{name}.sh"
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
    reasons = [reason for recipe in recipes().values() for reason in recipe["why_dsjax"].values()]
    denied = [reason.partition(" is no option")[0].split() for reason in reasons if " is no option" in reason]
    assert not fields & {word for words in denied for word in words}


if __name__ == "__main__":
    every = table()
    writer = csv.DictWriter(sys.stdout, list(every[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(every)
