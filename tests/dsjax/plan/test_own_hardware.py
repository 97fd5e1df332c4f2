"""A hardware file of the user's own is priced like a bundled one, whatever is asked for and whoever asks."""

import json
import re
from importlib import resources

import pytest
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import ENGINES
from dsjax.plan.figure import exact
from dsjax.plan.instance import Instance
from dsjax.plan.kubernetes import needs_compute_domain
from dsjax.plan.layout import parse_layout
from dsjax.plan.measured import Measured
from dsjax.plan.network import normal_exchange
from dsjax.plan.operator_tables import BUNDLED
from dsjax.plan.own_cluster import find_cluster, with_tables
from dsjax.plan.workload import Lengths, PlanOptions, Workload

CLUSTER = """
name = "mine"
description = "2 hosts of our own GPU"
hardware = "{hardware}"
hosts = 2
network = "RoCE"
network_gbps = 100
nics_per_host = 8
latency_us = 4
latency_us_range = [2, 8]
[sources]
network_gbps = "ours"
"""
ROW = 7168 * 1.03125
"""Bytes of a token on the wire."""


def write(tmp_path, of="h200", **changes):
    """A cluster of a device that is a bundled one with other figures, in files of the user's own; None leaves a field out."""
    text = (resources.files("configs") / "hardware" / f"{of}.toml").read_text(encoding="utf-8")
    fields, *tables = re.split(r"(?m)^(?=\[)", text)
    changes = {"name": '"Our GPU"', "memory_bandwidth": 5e12, "operators": None} | changes
    kept = [line for line in fields.splitlines() if line.split(" = ")[0] not in changes]
    given = [f"{name} = {value}" for name, value in changes.items() if value is not None]
    (tmp_path / "ours.toml").write_text("\n".join([*kept, *given, *tables]), encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(CLUSTER.format(hardware=tmp_path / "ours.toml"), encoding="utf-8")
    return path


def test_a_prefill_over_devices_of_a_host_is_priced_by_whoever_asks(tmp_path, v3):
    cluster = load_cluster(write(tmp_path))
    alone = normal_exchange(cluster, v3, 8, 4096, ROW, exact(1.0))
    assert alone.value > 0, "no table speaks of it yet: its links do"
    known = with_tables(cluster, BUNDLED)[0]
    timed = normal_exchange(load_cluster("h200-16"), v3, 8, 4096, ROW, exact(1.0))
    assert normal_exchange(known, v3, 8, 4096, ROW, exact(1.0)).value == timed.value, "the same die on the same links"
    instance = Instance(
        v3, cluster, parse_layout("dp=8", 0, v3), PlanOptions(), Workload(Lengths(2000), Lengths(500)), {}
    )
    assert instance.prefill_step(4096).value > 0


def test_times_of_an_exchange_go_with_the_link_of_the_device_that_was_timed(tmp_path, v3):
    def seconds(link):
        known = with_tables(load_cluster(write(tmp_path, scale_up_bandwidth=link)), BUNDLED)[0]
        return normal_exchange(known, v3, 8, 16384, ROW, exact(1.0)).value

    slow, same, fast = (seconds(link) for link in (225e9, 450e9, 900e9))
    assert 1.9 < slow / same < 2, "all but the fixed part goes with the link"
    assert 1.9 < same / fast < 2
    blackwell = normal_exchange(load_cluster("b200-8"), v3, 8, 16384, ROW, exact(1.0)).value
    assert blackwell == pytest.approx(fast), "the table is of an H200, whose link is half as fast"


@pytest.mark.parametrize("of", ["h200", "gb200", "rtx-4090", "tpu-v6e"])
@pytest.mark.parametrize("mode", ["aggregated", "separated", "static", "static_ctx", "static_gen"])
def test_every_mode_plans_with_an_own_file(tmp_path, of, mode):
    path = write(tmp_path, of, memory_bytes=200_000_000_000, scale_up_devices=8, devices_per_host=8)
    answer = tmp_path / "answer.json"
    command = ["plan", "--cluster", str(path), "--mode", mode, "--engine", "published", "--json", str(answer)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert json.loads(answer.read_text())


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_plans_and_simulates_with_an_own_file(tmp_path, engine):
    command = ["plan", "--cluster", str(write(tmp_path)), "--engine", engine, "--concurrency", "16", "--output", "20"]
    command += ["--simulate", "--num-prompts", "20", "--sweep", "bandwidth=50,100", "--max-devices", "8"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "winner:" in done.output


@pytest.mark.parametrize("key", ["h200", None])
def test_modules_measured_on_an_own_device_stand_for_its_cluster(tmp_path, key):
    body = {"device": {"name": "Our GPU", "platform": "cuda", "memory_bytes": 1, "hardware": key, "count": 8}}
    assert find_cluster(str(write(tmp_path)), Measured("m.json", body)).hardware.name == "Our GPU"


def test_an_own_device_in_a_rack_is_joined_over_nvlink(tmp_path):
    for of, joined in (("gb200", True), ("b200", False)):
        (tmp_path / of).mkdir()
        assert needs_compute_domain(load_cluster(write(tmp_path / of, of)).hardware, 2) is joined
