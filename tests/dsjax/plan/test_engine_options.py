"""What a recipe writes for another engine is accepted by that engine as it is today: names, values, parts of JSON, and who may come in."""

import dataclasses
import itertools
import json
import os
import shlex
import subprocess
from functools import cache
from importlib import resources

import pytest

from dsjax.plan.engine import find_engine
from dsjax.plan.launch import LAUNCHED, launch, script
from dsjax.plan.operations import FLASHINFER_FP8_RATE
from dsjax.plan.precision import named_precision
from dsjax.plan.rules import documented
from dsjax.plan.workload import PlanOptions

# Deprecated, and written all the same: 1.2.1, the last release, knows MTP's drafts by no other name.
STILL_WRITTEN = {"speculative_config.num_nextn_predict_layers"}


@cache
def accepted(engine):
    path = resources.files("configs") / "engines" / "options" / f"{engine}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def every_launch(instance, engine):
    """Commands of layouts, roles and options that differ in every flag."""
    options = [{}, {"drafts": 1}, {"precision": named_precision("nvfp4", "fp8")}]
    options.append({"precision": named_precision("fp8", "fp8"), "overlap": "on"})
    if engine == "sglang":  # without DeepGEMM
        options.append({"engine": dataclasses.replace(find_engine(engine), fp8_rate=FLASHINFER_FP8_RATE)})
    layouts = (
        ("h200-16", "dp=16", 32),
        ("h200-8", "tp=8,ep=1", 0),
        ("gb200-nvl72-36", "dp=32", 32),
        ("h200-16", "dp=8", 0),
        ("h200-16", "tp=16,ep=1", 0),
    )
    for (cluster, mesh, redundant), given in itertools.product(layouts, options):
        if (engine == "tensorrt-llm" and "overlap" in given) or ("nvfp4" in str(given) and cluster.startswith("h")):
            continue
        made = instance(mesh, cluster, redundant, options=PlanOptions(**{"engine": find_engine(engine)} | given))
        for role in ("prefill and decode", "prefill", "decode"):
            yield launch(engine, "deepseek-ai/DeepSeek-R1", made, 64, 512, role, 1)


def leaves(config, above=""):
    for key, value in config.items():
        yield from leaves(value, f"{above}{key}.") if isinstance(value, dict) else [f"{above}{key}"]


@pytest.mark.parametrize("engine", LAUNCHED)
def test_today_s_engine_accepts_what_is_written_and_listens_to_nobody_and_has_its_key_from_outside(instance, engine):
    known, used = accepted(engine), set()
    for one in every_launch(instance, engine):
        assert "0.0.0.0" not in " ".join(one.commands())
        for flags in one.flags:
            assert flags["--host"] == "$ADDRESS"
            assert {value for flag, value in flags.items() if "key" in flag} <= {"$API_KEY"}, "a key stands in no file"
            for flag, value in flags.items():
                used.add(flag)
                assert flag in known["options"], f"{engine} {known['version']} has no {flag}"
                assert flag not in known["deprecated"], f"{flag} is on its way out: {known['deprecated'][flag]}"
                choices = known["options"][flag]
                assert not choices or not value or value in choices, f"{flag} {value}: not among {choices}"
                if value.startswith("{") and flag in known["objects"]:
                    assert set(json.loads(value)) <= set(known["objects"][flag])
        assert set(one.environment) <= set(known["environment"])
        for path in leaves(one.config):
            above, _, name = path.rpartition(".")
            assert name in known["objects"][above], f"{engine} {known['version']} has no {path}"
            assert path not in known["deprecated"] or path in STILL_WRITTEN
    about = documented(engine)
    unused = set(about["flags"]) - used
    assert not unused, f"these layouts write every flag that there is a source for, and not {unused}"
    written = [one for table in ("flags", "keys", "environment") for one in about.get(table, {}).values()]
    assert {one["source"] for one in written} <= about["sources"].keys(), "each has a source"


@pytest.mark.parametrize(("engine", "asks"), [("vllm", True), ("sglang", True), ("tensorrt-llm", False)])
def test_a_script_wants_a_key_where_the_engine_can_ask_for_one(instance, engine, asks, tmp_path):
    made, path = instance("dp=8", options=PlanOptions(engine=find_engine(engine))), tmp_path / "run.sh"
    made = launch(engine, "m", made, 4, 512, "prefill and decode", 1)
    path.write_text(script({"notes": []}, engine, [made], "dsjax plan --model 'two\nexit 7'"))
    # What the script would start is a program of the test's own, which prints what it was given.
    program = tmp_path / shlex.split(documented(engine)["program"])[0]
    program.write_text('#!/bin/sh\necho "$@"; env\n')
    program.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if name != "API_KEY"}
    plain["PATH"] = f"{tmp_path}:{plain['PATH']}"

    def started(**more):
        return subprocess.run(["sh", path, "serve"], env=plain | more, capture_output=True, text=True, cwd=tmp_path)

    without = started()
    assert (without.returncode != 0, "API_KEY" in without.stderr) == (asks, asks)
    given = started(API_KEY="s3cret")
    assert given.returncode == 0
    assert "--host 127.0.0.1" in given.stdout
    assert ("s3cret" in given.stdout.replace("API_KEY=s3cret", "", 1)) == asks or not asks
    assert "--host 10.0.0.7" in started(API_KEY="s3cret", ADDRESS="10.0.0.7").stdout
