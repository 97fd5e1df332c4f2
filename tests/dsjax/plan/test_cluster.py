"""Cluster files: the bundled ones hold together, the user's are checked."""

import dataclasses
import re
from importlib import resources

import pytest

from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import bundled_clusters, load_cluster
from dsjax.plan.operator_tables import BUNDLED, operator_tables
from dsjax.plan.own_cluster import with_tables
from dsjax.plan.precision import PRECISIONS

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


@pytest.fixture
def written(tmp_path):
    def write(text, name="cluster.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", bundled_clusters())
def test_bundled_clusters_have_the_devices_of_their_names(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.num_devices == int(name.rsplit("-", 1)[1])
    assert cluster.latency_low <= cluster.latency <= cluster.latency_high


def test_the_issues_clusters_are_bundled():
    assert set(bundled_clusters()) >= {
        "h20-32",
        "h200-8",
        "h200-16",
        "h100-32",
        "h800-32",
        "gb200-nvl72-36",
        "tpu-v5e-32",
        "tpu-v6e-32",
    }


def test_cards_are_shared_by_the_devices_of_a_host(written):
    cluster = load_cluster(written(GOOD))
    assert cluster.devices_per_host == 8
    assert cluster.network_bandwidth == 100e9 / 8 * 2 / 8
    assert cluster.domains_of(9) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("hosts = 2", "hosts = 0"), "hosts is 0, expected at least 1"),
        (("hosts = 2", 'hosts = "two"'), "hosts is 'two', expected a whole number"),
        (("network_gbps = 100", "network_gbps = -1"), "expected a number above 0"),
        (("network_gbps = 100", "network_gbps = nan"), "network_gbps is nan, expected a number above 0"),
        (("latency_us_range = [2, 8]", "latency_us_range = [2, inf]"), "two numbers around latency_us"),
        (("latency_us_range = [2, 8]", "latency_us_range = [6, 8]"), "two numbers around latency_us"),
        (('network = "RoCE"', ""), "missing network; the fields are"),
        (("hosts = 2", "hosts = 2\nspeed = 3"), "unknown speed"),
        (('hardware = "h100"', 'hardware = "h1000"'), r"cluster '.*': no hardware 'h1000'"),
        (("hosts = 2", "hosts = 2\nscale_up_devices = 6"), "cut each other"),
        (("hosts = 2", "hosts = = 2"), "not valid TOML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(written, change, message):
    with pytest.raises(UserError, match=message):
        load_cluster(written(GOOD.replace(*change)))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match="h20-32"):
        load_cluster("h21-32")


def device_of(written, **changes):
    """A cluster of H200s whose file is the user's own, changed; and the tables of operations."""
    text = (resources.files("configs") / "hardware" / "h200.toml").read_text()
    fields, *tables = re.split(r"(?m)^(?=\[)", text)
    kept = [line for line in fields.splitlines() if line.split(" = ")[0] not in changes]
    given = [f"{name} = {value}" for name, value in changes.items() if value is not None]
    path = written("\n".join([*kept, *given, *tables]), "own.toml")
    cluster = load_cluster(written(GOOD.replace('hardware = "h100"', f'hardware = "{path}"')))
    return with_tables(cluster, BUNDLED)[0].hardware


def test_a_copy_of_a_bundled_device_is_that_device(written):
    assert device_of(written).key == "h200"
    assert device_of(written, memory_bytes=96_000_000_000, operators=None).key == "h200"
    faster = device_of(written, memory_bandwidth=5e12)
    assert (faster.key, faster.operators, faster.same_die) == ("own", "h200", True)


def test_a_device_of_an_unknown_die_is_carried_over_and_not_called_the_same(written):
    own = device_of(written, operators=None, die=None)
    assert (own.key, own.operators, own.same_die) == ("own", "h200", False)


def test_operators_of_a_device_without_tables_are_refused(written):
    with pytest.raises(UserError, match=r"operators is 'h900', but tables of operations are of b200, h200"):
        device_of(written, operators='"h900"')


def test_a_device_of_the_users_own_for_experts_is_known_like_that_of_a_cluster():
    copy = dataclasses.replace(load_hardware("h20"), key="own")
    cluster = load_cluster("h200-8").with_experts_on(copy, 1)
    assert with_tables(cluster, BUNDLED)[0].experts.hardware.key == "h20"
    other = load_cluster("h200-8").with_experts_on(dataclasses.replace(copy, operators="h900"), 1)
    with pytest.raises(UserError, match="operators is 'h900'"):
        with_tables(other, BUNDLED)


def test_tables_of_the_users_own_device_are_read_with_its_own_figures(written, tmp_path):
    (tmp_path / "gemm.csv").write_text("device,gemm_dtype,m,n,k,latency_ms\nown,bfloat16,1,256,7168,0.1\n")
    hardware = dataclasses.replace(load_hardware("h200"), key="own", operators="")
    cluster = dataclasses.replace(load_cluster("h200-8"), hardware=hardware)
    cluster, tables = with_tables(cluster, operator_tables(tmp_path))
    assert tables.device("own") is hardware
    assert Chip(cluster.hardware, PRECISIONS["fp8"], tables).bf16_product(1, 256, 7168).value == 1e-4


def test_a_cluster_of_another_size_does_not_say_that_it_has_the_old_one():
    cluster = load_cluster("h200-8")
    assert cluster.resized(2).description == "2 hosts, each as in 1 host x 8 H200"
    assert cluster.resized(1).description == cluster.description
