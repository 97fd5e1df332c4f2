"""Racks, spines and direct links between hosts, and clusters of two kinds of devices."""

import dataclasses

import pytest

from dsjax.errors import UserError
from dsjax.plan.cluster import Tier, Wiring, load_cluster
from dsjax.plan.network import all_reduce, cache_transfer, deepep_exchange
from dsjax.plan.search import search
from dsjax.plan.workload import Objective, Pins, PlanOptions
from sharding.mesh import MeshSpec

RACKS = Wiring(
    (
        Tier(name="rack", hosts=4, latency_us=2),
        Tier(name="spine", hosts=16, oversubscription=4, latency_us=6, latency_us_range=(6, 8)),
    )
)
CLUSTER = """
name = "c"
description = "x"
hardware = "h100"
hosts = {hosts}
network = "RoCE"
network_gbps = 100
nics_per_host = 8
latency_us = 3
latency_us_range = [2, 4]
sources = {{}}
"""


def test_what_leaves_a_rack_passes_thinner_links():
    assert RACKS.share(4, 16) == 1.0
    # Of 15 parts that leave a host 12 leave its rack of 4, over a quarter of the links.
    assert RACKS.share(16, 16) == pytest.approx(1 / (4 * 12 / 15))
    assert RACKS.share(16, 16, ring=True) == 1.0, "one host of a rack of 4 at a time fills a quarter of the links"
    assert [RACKS.highest(hosts).name for hosts in (2, 4, 5, 16)] == ["rack", "rack", "spine", "spine"]
    direct = Wiring(direct=True)
    assert [direct.share(hosts, 4) for hosts in (1, 2, 3, 4)] == pytest.approx([1, 1 / 3, 2 / 3, 1])


def test_an_exchange_takes_as_long_as_the_tiers_that_it_crosses(v3):
    flat = load_cluster("h100-32").resized(16)
    tiered = dataclasses.replace(flat, wiring=RACKS)

    def seconds(cluster, ranks):
        return deepep_exchange(cluster, v3, ranks, 4096, 7168, 1.0)

    assert seconds(tiered, 32) == pytest.approx(seconds(dataclasses.replace(flat, latency=2e-6), 32))
    thinner = dataclasses.replace(flat, network_gbps=400 / 3.2, latency=6e-6)
    assert seconds(tiered, 128) == pytest.approx(seconds(thinner, 128))
    assert all_reduce(tiered, 128, 1e6) > all_reduce(tiered, 8, 1e6)
    assert cache_transfer(tiered, 1e9) == pytest.approx(3.2 * cache_transfer(flat, 1e9))
    assert tiered.scaled("latency", 2).between(128).latency == pytest.approx(3e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("direct = true\n[[tiers]]\nhosts = 4\nlatency_us = 2", "give one of them"),
        ("direct = true", "a multiple of 3"),
        ("[[tiers]]\nhosts = 2\nlatency_us = 2", "joins 2 of 4 hosts"),
        ("[[tiers]]\nhosts = 3\nlatency_us = 2\n[[tiers]]\nhosts = 4\nlatency_us = 2", "expected a multiple of it"),
        ("[[tiers]]\nhosts = 4\nlatency_us = 2\nspeed = 1", r"tiers\[0\] is .*unknown field `speed`"),
        ("[[tiers]]\nhosts = 4\nlatency_us = 2\nlatency_us_range = 5", r"latency_us_range is 5, expected `array"),
        ("[[tiers]]\nhosts = 4\nlatency_us = 2\nlatency_us_range = [3, 4]", "expected two numbers around latency_us"),
        (
            "[[tiers]]\nhosts = 4\nlatency_us = 2\noversubscription = 0.5",
            r"oversubscription is 0.5, expected `float` >= 1",
        ),
        ("[[tiers]]\nhosts = 4\nlatency_us = 0", r"tiers\[0\].latency_us is 0, expected `float` > 0"),
    ],
)
def test_wiring_that_cannot_be_is_refused(tmp_path, fields, message):
    path = tmp_path / "c.toml"
    path.write_text(CLUSTER.format(hosts=4) + fields)
    with pytest.raises(UserError, match=message):
        load_cluster(path)


def test_tiers_of_a_cluster_file_are_read(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        CLUSTER.format(hosts=8)
        + "[[tiers]]\nhosts = 4\nlatency_us = 2\n[[tiers]]\nhosts = 8\noversubscription = 2\nlatency_us = 5\n"
        '[prefill]\nhardware = "h200"\nhosts = 3\n'
    )
    found = load_cluster(path)
    assert found.between(64).network_gbps == pytest.approx(100 / (2 * (4 / 8) / (7 / 8)))
    assert (found.prefill.hardware.key, found.prefill.num_devices, found.prefill.network_gbps) == ("h200", 24, 100)
    path.write_text(path.read_text() + "latency_us = 3\n")
    with pytest.raises(UserError, match=r"prefill is .* unknown field `latency_us`"):
        load_cluster(path)


def test_prompts_are_computed_on_the_hosts_that_are_for_them(ask):
    pins = Pins(MeshSpec.parse("dp=8"), MeshSpec.parse("dp=16"))
    options = PlanOptions(modes=("separated",), redundant=0, pins=pins)
    bounds = Objective(ttft=3, tpot=0.05)
    with pytest.raises(UserError, match=r"--prefill-mesh dp=8 is no layout that fits here"):
        search(ask("h800-16-h20-16", prompt=4096, output=1000, objective=bounds, options=options))
    pins = dataclasses.replace(pins, prefill_mesh=MeshSpec.parse("dp=16"))
    question = ask(
        "h800-16-h20-16", prompt=4096, output=1000, objective=bounds, options=dataclasses.replace(options, pins=pins)
    )
    two = search(question).winner
    assert (two.prefill.cluster.hardware.key, two.decode.cluster.hardware.key) == ("h800", "h20")
    assert two.name() == "1 × dp=16 h800 | 1 × dp=16 h20"
    assert two.devices == 32
