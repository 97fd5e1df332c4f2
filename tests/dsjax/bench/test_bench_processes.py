"""Two processes of two devices each measure together: one prints and writes, and both end alike."""

import json
from types import SimpleNamespace

import pytest
from processes import Group
from test_bench_network import CLUSTER, SOURCES

from dsjax.bench.processes import _explained
from dsjax.config import load_config
from dsjax.hosts.group import GroupError
from dsjax.hosts.wire import Announcement
from dsjax.plan.measured import read_measured

# Nothing is as fast as this says: the verdict is `failing`, code 4.
FAST = "\n[acceptance.inside_host.all_to_all]\nlatency_us = 1e-9\ngb_per_s = 1000\n"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    (folder / "cluster.toml").write_text(CLUSTER + FAST + SOURCES)
    files = folder / "n.json", folder / "m.json"
    group = Group(["tests/dsjax/bench/bench_process.py", *map(str, (folder / "cluster.toml", *files))], 2)
    try:
        assert group.codes(480) == [4, 4], group.last_words()
    finally:
        group.end()
    return group.output, *files


@pytest.mark.slow
def test_two_processes_measure_between_hosts_and_end_with_one_verdict(both):
    output, file, _ = both
    body = json.loads(file.read_text())
    assert len(body["processes"]) == 2
    found = {(row["group"][0], row["between_hosts"], row["hosts"], row["ranks"]) for row in body["rows"]}
    pairs = {("pair", False, 1, 2), ("pair", True, 2, 2)}
    assert found == {("host", False, 1, 2), ("hosts", True, 2, 2), ("experts", True, 2, 4)} | pairs
    assert all(row["correct"] for row in body["rows"])
    assert "experts: 1 × 4 ranks, between 2 hosts" in output[0]
    assert "ranks, between" not in output[1]  # one process reports


@pytest.mark.slow
def test_two_processes_time_the_dispatch_between_them_and_one_of_them_all_else(both):
    output, _, file = both
    body = json.loads(file.read_text())
    assert [one["process_id"] for one in body["processes"]] == [0, 1]
    assert not body["partial"]
    assert {row["module"]: row["sizes"].get("mesh") for row in body["rows"]} == {"norms": None, "dispatch": "dp=4"}
    assert "norms" in output[0]
    assert "norms" not in output[1]
    found = read_measured(file, load_config("demo")).seconds("dispatch", 2, mesh="dp=4", variant="padded even")
    assert found.value == next(row["median_s"] for row in body["rows"] if row["module"] == "dispatch")


def follower(*announced):
    """The group as process 1 has it, which hears from process 0 what was announced."""
    heard, leader = iter(announced), SimpleNamespace(name="process 0 (a, pid 7)")
    options = SimpleNamespace(heartbeat_timeout=5)
    hear = lambda seconds: next(heard, None)  # noqa: E731
    return SimpleNamespace(is_leader=False, options=options, members=[leader], next_announcement=hear)


def test_the_others_say_why_process_0_has_ended_and_process_0_who_is_gone():
    failed = RuntimeError("a collective failed")
    found = _explained(follower(Announcement(1, reason="it was interrupted", ended=True)), failed)
    assert isinstance(found, GroupError)
    assert str(found) == "process 0 (a, pid 7) has ended: it was interrupted"
    assert _explained(follower(), failed) is failed, "nobody has ended: it is an error of the program"
    gone = GroupError("process 1 (b, pid 8) has gone away")
    for lost, said in ((gone, gone), (None, failed)):
        assert _explained(SimpleNamespace(is_leader=True, find_loss=lambda lost=lost: lost), failed) is said
