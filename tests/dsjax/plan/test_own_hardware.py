"""A hardware file of the user's own is priced like a bundled one, whatever is asked for and whoever asks."""

import re
from importlib import resources
from types import SimpleNamespace

import pytest
from plan_words import plan, plan_json

from dsjax.errors import UserError
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import ENGINES
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.manifests import needs_compute_domain
from dsjax.plan.network import deepep_exchange
from dsjax.plan.operator_tables import BUNDLED
from dsjax.plan.own_cluster import find_cluster, with_tables
from dsjax.plan.workload import Lengths, PlanOptions, Workload

ROW = 7168 * 1.03125  # bytes of a token on the wire


def write(tmp_path, of="h200", **changes):
    """A cluster of a device that is a bundled one with other figures, in files of the user's own; None leaves a field out."""
    configs = resources.files("configs")
    text = (configs / "hardware" / f"{of}.toml").read_text(encoding="utf-8")
    fields, *tables = re.split(r"(?m)^(?=\[)", text)
    changes = {"name": '"Our GPU"', "memory_bandwidth": 5e12, "operators": None} | changes
    kept = [line for line in fields.splitlines() if line.split(" = ")[0] not in changes]
    given = [f"{name} = {value}" for name, value in changes.items() if value is not None]
    (tmp_path / "ours.toml").write_text("\n".join([*kept, *given, *tables]), encoding="utf-8")
    path = tmp_path / "mine.toml"
    bundled = (configs / "clusters" / "h200-16.toml").read_text(encoding="utf-8")
    path.write_text(bundled.replace('hardware = "h200"', f'hardware = "{tmp_path / "ours.toml"}"'), encoding="utf-8")
    return path


def test_a_prefill_over_devices_of_a_host_is_priced_by_whoever_asks(tmp_path, v3):
    cluster = load_cluster(write(tmp_path))
    alone = deepep_exchange(cluster, v3, 8, 4096, ROW, 1.0)
    assert alone > 0, "no table speaks of it yet: its links do"
    known = with_tables(cluster, BUNDLED)[0]
    timed = deepep_exchange(load_cluster("h200-16"), v3, 8, 4096, ROW, 1.0)
    assert deepep_exchange(known, v3, 8, 4096, ROW, 1.0) == timed, "the same die on the same links"
    workload = Workload(Lengths(2000), Lengths(500))
    assert Instance(v3, cluster, parse_layout("dp=8", 0, v3), PlanOptions(), workload, {}).prefill_step(4096) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "mode"),
    [
        ("h200", "separated"),
        ("gb200", "static"),
        ("gb200", "aggregated"),
        ("rtx-4090", "static_gen"),
        ("rtx-4090", "separated"),
        ("tpu-v6e", "static_ctx"),
        ("tpu-v6e", "aggregated"),
    ],
)
def test_every_mode_plans_with_an_own_file(tmp_path, of, mode):
    path = write(tmp_path, of, memory_bytes=200_000_000_000, scale_up_devices=8, devices_per_host=8)
    words = ["step"] if mode.startswith("static") else []
    assert plan_json(*words, "--cluster", path, "--mode", mode, "--engine", "published")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_plans_and_simulates_with_an_own_file(tmp_path, engine):
    words = ["--cluster", write(tmp_path), "--engine", engine, "--mesh", "tp=8,ep=1"]
    words += ["--max-concurrency", "16", "--output", "20"]
    for command in (["--explain", "plan"], ["simulate", "--num-prompts", "20"]):
        assert "winner, never measured:" in plan(*command, *words)


@pytest.mark.parametrize("key", ["h200", None])
def test_modules_measured_on_an_own_device_stand_for_its_cluster(tmp_path, key):
    device = {"name": "Our GPU", "platform": "cuda", "memory_bytes": 1, "hardware": key, "count": 8}
    measured = SimpleNamespace(device=SimpleNamespace(**device), path="m.json")
    assert find_cluster(str(write(tmp_path)), measured).hardware.name == "Our GPU"


def test_an_own_device_in_a_rack_is_joined_over_nvlink(tmp_path):
    for of, joined in (("gb200", True), ("b200", False)):
        (tmp_path / of).mkdir()
        assert needs_compute_domain(load_cluster(write(tmp_path / of, of)).hardware, 2) is joined


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"name": '"H200"', "memory_bandwidth": 4.8e12, "operators": '"h200"'}, "h200"),
        ({"memory_bandwidth": 4.8e12, "memory_bytes": 96_000_000_000}, "h200"),
        ({}, "ours"),
    ],
)
def test_a_copy_of_a_bundled_device_is_that_device_and_a_changed_one_has_its_operations(tmp_path, changes, key):
    found = with_tables(load_cluster(write(tmp_path, **changes)), BUNDLED)[0].hardware
    assert (found.key, found.operators, found.same_die) == (key, "h200", True)


def test_operators_of_a_device_without_tables_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"operators is 'h900', but tables of operations are of b200, h200"):
        with_tables(load_cluster(write(tmp_path, operators='"h900"')), BUNDLED)
