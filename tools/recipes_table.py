"""Writes docs/recipes.md: every option of the published recipes for DeepSeek-R1 and V3, beside what `dsjax plan` and `deploy/dynamo` write.

    python tools/recipes_table.py

The recipes are `configs/recipes/*.toml`: their options, names that the engine has since changed, and the reason wherever ours differ.
An option that differs without a reason, or has a reason and does not differ, is an error.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dsjax.config import load_config
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import find_engine
from dsjax.plan.launch import LaunchCommand
from dsjax.plan.launch_flags import launch
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import precision
from dsjax.plan.question import Question
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload
from tools.make_deploy import MODEL, options_of, pods_of

PAGE, RECIPES = ROOT / "docs" / "recipes.md", ROOT / "configs" / "recipes"
ABSENT = "—"
_HEAD = """# The published recipes, option by option

Each table has every option of a published recipe, its value there, what `dsjax plan --engine …` writes for the same layout, batch and
lengths, and what our own deployment (`deploy/dynamo`) gives `dsjax dynamo`. Where a value differs, the reason stands behind it. `python
tools/recipes_table.py` writes this page from [configs/recipes](../configs/recipes), and a test holds both to what is written today. Names
and values are also held against the argument parsers of the engines' newest releases
([configs/engines/options](../configs/engines/options)). Nobody has run these commands here.

{ABSENT} means that the option is not written. The engines' commands are those that `dsjax plan --engine … --recipe FILE.sh` writes.
`sharedMemorySize` and `storage` are of the pods: the size of /dev/shm, and of the volume that they read the model from.
""".replace("{ABSENT}", ABSENT)


@dataclass(frozen=True)
class Row:
    """One option of one side: its value in the recipe, ours for the same engine, dsjax's own, and the reasons where they differ.

    Values are as commands have them; None where an option is not written. An option without a value is "".
    """

    side: str
    option: str
    there: str
    ours: str | None
    why: str
    own: str | None
    why_own: str

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


def planned(recipe: dict, side: dict) -> LaunchCommand:
    """What `dsjax plan --engine` writes for a side's layout, batch and lengths."""
    engine = find_engine(recipe["engine"])
    options = PlanOptions(
        engine=engine, precision=precision(recipe.get("precision", "fp8"), recipe.get("cache", "auto"))
    )
    if engine.overlaps and "--enable-dbo" in side["options"]:
        options = PlanOptions(engine=engine, precision=options.precision, overlap="on")
    config, load = load_config("deepseek-v3"), Workload(Lengths(recipe["input"]), Lengths(recipe["output"]))
    question = Question(config, load_cluster(recipe["cluster"]), load, Objective(), options)
    instance = question.instance(parse_layout(side["mesh"], side["redundant"], config), {})
    model = side["options"].get("--model") or side["options"].get("--model-path") or MODEL
    return launch(recipe["engine"], model, instance, side["batch"], side["tokens"], side["role"], 1)


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


def rows(recipe: dict) -> list[Row]:
    """Every option of every side."""
    made = []
    for side in recipe["sides"]:
        command = planned(recipe, side)
        ours = {"MODEL": command.model} | command.flags | command.environment | flat(command.config)
        for host in reversed(command.each_host):  # the first host's stand, and those that only others have
            ours = ours | host
        own = options_of(recipe["graph"], side["role"]) | pods_of(recipe["graph"])
        for option, there in side["options"].items():
            say = [
                recipe[table].get(f"{side['role']} {option}", recipe[table].get(option, ""))
                for table in ("why", "why_dsjax")
            ]
            name, own_name = recipe["renamed"].get(option, option), recipe["dsjax"].get(option)
            value = written(own, own_name) if own_name else None
            if own_name in ("--mesh", "--disaggregation-mode") and value is not None and not say[1]:
                value = there if _means_mesh(option, there, own) else value
            made.append(Row(side["role"], option, there, written(ours, name), say[0], value, say[1]))
    return made


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
        for table in ("renamed", "why", "dsjax", "why_dsjax"):
            found += [
                f"{name}: [{table}] has {key}, which the recipe has not" for key in recipe[table] if key not in used
            ]
    return found


def _cell(value: str | None) -> str:
    if value is None:
        return ABSENT
    return f"`{value}`".replace("|", "\\|") if value else "given"


def page() -> str:
    """The page's text."""
    parts = [_HEAD]
    for recipe in recipes().values():
        parts.append(f"## {recipe['title']}\n\n{recipe['source']}. Ours: `deploy/dynamo/{recipe['graph']}.yaml`.\n")
        every = rows(recipe)
        for side in recipe["sides"]:
            parts.append(
                f"**{side['role'].capitalize()}**, `{side['mesh']}`, {side['batch']} requests and {side['tokens']:,} tokens a step\n"
            )
            lines = [
                "| option | there | planned | why it differs | dsjax | why it differs |",
                "|---|---|---|---|---|---|",
            ]
            for row in every:
                if row.side == side["role"]:
                    cells = (f"`{row.option}`", _cell(row.there), _cell(row.ours), row.why, _cell(row.own), row.why_own)
                    lines.append(f"| {' | '.join(cells)} |")
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if wrong := problems():
        sys.exit("\n".join(wrong))
    PAGE.write_text(page(), encoding="utf-8")
