"""Cluster files: the bundled ones hold together, the user's are checked; hosts of two kinds."""

import pytest

from dsjax.errors import UserError
from dsjax.plan.cluster import bundled_clusters, load_cluster
from dsjax.plan.search import search
from dsjax.plan.workload import Objective, Pins, PlanOptions
from sharding.mesh import MeshSpec

GOOD = """
name = "two"
description = "2 hosts x 8 H100"
hardware = "h100"
hosts = 2
network = "RoCE"
network_gbps = 100
nics_per_host = 2
latency_us = 4
latency_us_range = [2, 8]
[sources]
network_gbps = "ours"
"""
PREFILL = '[prefill]\nhardware = "h200"\nhosts = 3\n'


@pytest.fixture
def loaded(tmp_path):
    def load(text):
        (tmp_path / "cluster.toml").write_text(text)
        return load_cluster(tmp_path / "cluster.toml")

    return load


@pytest.mark.parametrize("name", bundled_clusters())
def test_bundled_clusters_have_the_devices_of_their_names(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.num_devices == int(name.rsplit("-", 1)[1])
    assert cluster.latency_low <= cluster.latency <= cluster.latency_high


def test_cards_are_shared_by_the_devices_of_a_host_and_hosts_of_another_kind_are_read(loaded):
    cluster = loaded(GOOD + PREFILL)
    assert (cluster.devices_per_host, cluster.domains_of(9)) == (8, 2)
    assert cluster.network_bandwidth == 100e9 / 8 * 2 / 8
    found = cluster.prefill
    assert (found.hardware.key, found.num_devices, found.network_gbps) == ("h200", 24, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("hosts = 2", "hosts = 0"), "hosts is 0, expected `int` >= 1"),
        (("hosts = 2", 'hosts = "two"'), "hosts is 'two', expected `int`"),
        (("network_gbps = 100", "network_gbps = nan"), "network_gbps is nan, expected `float` > 0"),
        (("latency_us_range = [2, 8]", "latency_us_range = [6, 8]"), "two numbers around latency_us"),
        (('network = "RoCE"', ""), "missing network; the fields are"),
        (("hosts = 2", "hosts = 2\nspeed = 3"), "unknown speed"),
        (('hardware = "h100"', 'hardware = "h1000"'), r"cluster '.*': no hardware 'h1000'"),
        (("hosts = 2", "hosts = 2\nscale_up_devices = 6"), "cut each other"),
        (("hosts = 2", "hosts = = 2"), "not valid TOML"),
        (('"ours"\n', f'"ours"\n{PREFILL}latency_us = 3\n'), r"prefill is .* unknown field `latency_us`"),
        (('"ours"\n', f'"ours"\n{PREFILL}'.replace("h200", "h2")), r"cluster '.*', prefill: no hardware 'h2'"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(loaded, change, message):
    with pytest.raises(UserError, match=message):
        loaded(GOOD.replace(*change))


def test_prompts_are_computed_on_the_hosts_that_are_for_them(ask):
    def found(prefill_mesh):
        pins = Pins(MeshSpec.parse(prefill_mesh), MeshSpec.parse("dp=16"))
        options = PlanOptions(modes=("separated",), redundant=0, pins=pins)
        return search(ask("h800-16-h20-16", 4096, 1000, Objective(ttft=3, tpot=0.05), options)).winner

    with pytest.raises(UserError, match=r"--prefill-mesh dp=8 is no layout that fits here"):
        found("dp=8")
    two = found("dp=16")
    assert (two.prefill.cluster.hardware.key, two.decode.cluster.hardware.key) == ("h800", "h20")
    assert two.name() == "1 × dp=16 h800 | 1 × dp=16 h20"
    assert two.devices == 32
