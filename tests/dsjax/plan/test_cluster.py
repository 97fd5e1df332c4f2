"""Cluster files: the bundled ones hold together, the user's are checked."""

import pytest

from dsjax.errors import UserError
from dsjax.plan.cluster import bundled_clusters, load_cluster

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


def loaded(folder, text):
    path = folder / "cluster.toml"
    path.write_text(text)
    return load_cluster(path)


@pytest.mark.parametrize("name", bundled_clusters())
def test_bundled_clusters_have_the_devices_of_their_names(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.num_devices == int(name.rsplit("-", 1)[1])
    assert cluster.latency_low <= cluster.latency <= cluster.latency_high


def test_cards_are_shared_by_the_devices_of_a_host(tmp_path):
    cluster = loaded(tmp_path, GOOD)
    assert cluster.devices_per_host == 8
    assert cluster.network_bandwidth == 100e9 / 8 * 2 / 8
    assert cluster.domains_of(9) == 2


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
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        loaded(tmp_path, GOOD.replace(*change))
