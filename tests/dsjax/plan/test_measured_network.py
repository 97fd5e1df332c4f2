"""`dsjax plan --network`: measured times of collectives in place of assumptions about links."""

import dataclasses
import json

import pytest
from plan_words import plan_json, refusal_of

from dsjax.errors import UserError
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Kind, spread
from dsjax.plan.measured import read_network
from dsjax.plan.network import all_reduce, own_exchange, xla_collective


def row(collective, between, ranks, sent, seconds, **more):
    times = {"median_s": seconds, "low_s": seconds / 2, "high_s": seconds * 2}
    return {"collective": collective, "between_hosts": between, "ranks": ranks, "sent_bytes": sent} | times | more


ROWS = [
    row("all_to_all", False, 8, 1000, 1e-3),
    row("all_to_all", False, 8, 2000, 2e-3),
    row("all_to_all", True, 32, 1000, 10e-3),
    row("all_to_all", True, 32, 2000, 30e-3),
    row("all_gather", True, 32, 1000, 50e-3),
    row("all_reduce", False, 8, 1000, 4e-3),
]


@pytest.fixture
def written(tmp_path):
    def write(rows=ROWS, **more):
        path = tmp_path / "network.json"
        device = {"name": "NVIDIA H100", "hardware": "h100"}
        body = {"format": "dsjax network 1", "date": "2026-11-22", "device": device, "rows": rows, **more}
        path.write_text(json.dumps(body))
        return path

    return write


@pytest.fixture
def timed(written):
    return lambda rows=ROWS: dataclasses.replace(load_cluster("h100-32"), measured=read_network(written(rows)))


@pytest.fixture
def cluster(timed):
    return timed()


def test_times_of_the_same_ranks_are_taken_as_they_are_and_interpolated_in_bytes(cluster):
    found = xla_collective(cluster, 8, 1500 / 7)
    assert (found, found.low, found.high) == pytest.approx((1.5e-3, 0.75e-3, 3e-3))
    assert found.kinds & Kind.MEASURED
    assert not found.kinds & Kind.ASSUMPTION
    assert xla_collective(cluster, 32, 1500 / 31) == pytest.approx(20e-3)
    assert all_reduce(cluster, 8, 1000 * 8 / 14) == pytest.approx(4e-3)


def test_each_dispatch_takes_its_own_collective(cluster):
    tokens, bytes_of_a_row, one = 4.0, 250.0 / 31, 1.0
    gathered = own_exchange(cluster, "gather", 32, tokens, 8, bytes_of_a_row, one)
    assert gathered == pytest.approx(50e-3)  # 4 rows to 31 ranks: 1,000 bytes
    ragged = own_exchange(cluster, "ragged", 32, 1e-9, 8, bytes_of_a_row, one)
    assert ragged == pytest.approx(20e-3)  # the sizes go first: two collectives of next to nothing, by all_to_all


def test_in_two_stages_rows_take_the_time_of_one_rank_of_each_host_and_that_of_the_ranks_of_a_host(timed):
    cluster = timed([row("all_to_all", False, 8, 1000, 1e-3), row("all_to_all", True, 4, 1000, 7e-3)])
    # Four rows to each of three hosts; sixteen, those of a rank of each host, to each of seven neighbours.
    [found] = spread(lambda: [own_exchange(cluster, "hierarchical", 32, 4.0, 8, 1000 / 12, 1.0)])
    assert found == pytest.approx(7e-3 + 1e-3 * 16 * 7 / 12)
    assert found.kinds & Kind.MEASURED


def test_what_was_not_timed_is_told_by_the_nearest_and_called_an_assumption(cluster):
    wider = xla_collective(cluster, 16, 1000 / 15)  # two hosts; 32 ranks of four were timed
    assert wider == pytest.approx(10e-3)
    assert wider.low == pytest.approx(5e-3 / 2)
    assert wider.kinds & Kind.ASSUMPTION
    beyond = xla_collective(cluster, 8, 4000 / 7)
    assert beyond == pytest.approx(4e-3)
    assert beyond.kinds & Kind.ASSUMPTION
    plain = dataclasses.replace(cluster, measured=None)
    assert all_reduce(cluster, 32, 1e6) == all_reduce(plain, 32, 1e6)  # nothing of the kind in the file


def test_a_message_takes_no_longer_than_a_larger_one_that_was_timed(timed):
    points = ((1000, 5e-3), (2000, 1e-3), (4000, 2e-3))
    cluster = timed([row("all_to_all", False, 8, sent, seconds) for sent, seconds in points])
    assert [xla_collective(cluster, 8, sent / 7) for sent in (1000, 1500, 3000)] == pytest.approx([1e-3, 1e-3, 1.5e-3])


def test_a_sweep_scales_what_was_measured(cluster):
    each = 2000 / 31
    assert xla_collective(cluster.scaled("network", 2), 32, each) == pytest.approx(10e-3 + 20e-3 / 2)
    assert xla_collective(cluster.scaled("latency", 10), 32, each) == pytest.approx(1e-3 + 20e-3)
    assert xla_collective(cluster.scaled("network", 2), 8, 2000 / 7) == pytest.approx(2e-3)


def test_a_plan_with_a_slow_network_is_slower_and_says_what_it_was_made_of(written):
    slow = [row(c, b, r, s, t) for c in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce") for b, r in ((False, 8), (True, 32))
            for s, t in ((1 << 10, 5e-3), (1 << 26, 1.0))]  # fmt: skip
    words = ["--cluster", "h100-32", "--max-concurrency", "64", "--mesh", "dp=32"]
    plain, timed = (plan_json(*words, *more)["ranked"][0]["tpot_s"] for more in ((), ("--network", written(slow))))
    assert timed["value"] > plain["value"] + 58 * 2 * 4e-3  # an exchange there and back in each of 58 layers
    assert "measured" in timed["kind"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "dsjax modules 1"}, "Invalid enum value 'dsjax modules 1' - at `\\$.format`"),
        ({"rows": []}, r"length >= 1 - at `\$.rows`"),
        ({"rows": [{"collective": "all_gather"}]}, r"missing required field `median_s` - at `\$.rows\[0\]`"),
        ({"rows": [row("all_gather", False, 8, 1, 1e-3, median_s="1")]}, r"got `str` - at `\$.rows\[0\].median_s`"),
        ({"rows": [row("all_gather", False, 8, 1, 1e-3, correct=False)]}, "data arrived wrong"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(written, change, message):
    with pytest.raises(UserError, match=message):
        read_network(written(**change))


def test_a_file_of_other_devices_is_refused(written):
    found = refusal_of("--cluster", "h20-32", "--network", written())
    assert "was taken on NVIDIA H100, and h20-32 has H20 SXM" in found


def test_what_all_ranks_of_a_host_get_alike_crosses_to_it_once():
    cluster = load_cluster("h100-32")
    slow = dataclasses.replace(cluster, network_gbps=0.01)
    kinds = ("all_to_all", "ragged_all_to_all", "all_gather", "reduce_scatter")
    seconds = {kind: xla_collective(slow, 32, 1e6, kind=kind) for kind in kinds}
    # 24 ranks on other hosts, or three hosts.
    assert seconds["all_to_all"] == seconds["ragged_all_to_all"] == pytest.approx(8 * seconds["all_gather"], rel=1e-3)
    assert seconds["reduce_scatter"] == seconds["all_gather"]
    inside = {kind: xla_collective(cluster, 8, 1e6, kind=kind) for kind in seconds}
    assert len(set(inside.values())) == 1
