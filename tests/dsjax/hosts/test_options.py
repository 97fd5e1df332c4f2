"""Where a process finds its place: options, LeaderWorkerSet, what JAX knows; and what cannot be."""

import re
from unittest.mock import MagicMock

import pytest
from deployments import LEADER_WORKER_SET

from dsjax.addresses import join_address, split_address
from dsjax.errors import UserError
from dsjax.hosts import options
from dsjax.hosts.options import GroupOptions, HostOptions


def find(coordinator_address=None, num_processes=None, process_id=None, host_address=None, **options):
    place = {"num_processes": num_processes, "process_id": process_id, "host_address": host_address}
    return HostOptions.find(GroupOptions(coordinator_address=coordinator_address, **place, **options))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Nothing in the environment says that this process has others."""
    for name in ("LWS_LEADER_ADDRESS", "SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_without_options_is_alone():
    assert find() is None
    assert find(num_processes=1) is None


def test_options_say_all():
    found = find("127.0.0.1:1234", 4, 3, start_timeout=7, heartbeat_timeout=5)
    assert found == HostOptions(("127.0.0.1", 1234), 4, 3, "127.0.0.1", 7, 5)
    assert not found.is_leader


def test_leader_worker_set_says_where_a_pod_is(monkeypatch):
    for name, value in LEADER_WORKER_SET.items():
        monkeypatch.setenv(name, value)
    found = find()
    assert (found.coordinator, found.num_processes, found.process_id) == (("127.0.0.1", 8476), 2, 1)
    assert find(process_id=0).process_id == 0
    monkeypatch.setenv("LWS_GROUP_SIZE", "four")
    with pytest.raises(UserError, match="LWS_GROUP_SIZE is 'four'"):
        find()


def test_slurm_is_found_as_jax_finds_it(monkeypatch):
    variables = {"JOB_ID": "77", "STEP_NODELIST": "127.0.0.1", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = find()
    assert (found.coordinator[0], found.num_processes, found.process_id) == ("127.0.0.1", 2, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("127.0.0.1:1234", None, None), "--num-processes and --process-id missing"),
        (("127.0.0.1:1234", 4, 4), "--process-id is 4 and --num-processes 4; expected an id from 0 to 3"),
        (("127.0.0.1:99999", 4, 1), "--coordinator-address is '127.0.0.1:99999', expected HOST:PORT"),
        (("192.0.2.1:1234", 2, 0), "--coordinator-address: '192.0.2.1' is no address of this host"),
        (("no.such.host.invalid:1", 2, 0), "--coordinator-address: 'no.such.host.invalid' is no name or address"),
        (("node..0:1", 2, 0), "--coordinator-address: 'node..0' is no name or address"),
        (("node..0:1", 2, 1), "--coordinator-address: 'node..0' can be no name of a host"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would(given, message):
    with pytest.raises(UserError, match=re.escape(message)):
        find(*given)


def test_a_host_address_must_be_this_hosts_own():
    assert find("127.0.0.1:1234", 2, 1, host_address="127.0.0.1").address == "127.0.0.1"
    with pytest.raises(UserError, match=r"--host-address: '192\.0\.2\.1' is no address of this host"):
        find("127.0.0.1:1234", 2, 1, host_address="192.0.2.1")
    with pytest.raises(UserError, match="others cannot reach"):
        find("127.0.0.1:1234", 2, 1, host_address="0.0.0.0")
    with pytest.raises(UserError, match="give --coordinator-address too"):
        find(host_address="127.0.0.1")


def test_a_group_beyond_loopback_needs_a_cluster_key(monkeypatch, tmp_path):
    monkeypatch.delenv("DSJAX_CLUSTER_KEY", raising=False)
    with pytest.raises(UserError, match="in the environment variable DSJAX_CLUSTER_KEY"):
        find("192.0.2.1:1234", 2, 1)
    (tmp_path / "key").write_text("k" * 32)
    options = find("192.0.2.1:1234", 2, 1, cluster_key_file=str(tmp_path / "key"))
    assert options.coordinator == ("192.0.2.1", 1234)
    assert "kkkk" not in repr(options)


@pytest.fixture
def names(monkeypatch):
    """A host that knows names as its file of hosts says, has all addresses that a test wants, and is reached from the last one given."""
    known, resolve = {"node0": "127.0.1.1", "node1": "10.0.0.1"}, options.socket.getaddrinfo

    def use(source):
        opened = MagicMock()
        opened.return_value.__enter__.return_value.getsockname.return_value = (source, 0)
        look_up = lambda host, *a, **k: resolve(known.get(host, host), *a, **k)  # noqa: E731
        monkeypatch.setattr(options.socket, "getaddrinfo", look_up)
        monkeypatch.setattr(options.socket, "socket", opened)

    return use


@pytest.mark.parametrize(
    ("coordinator", "process_id", "host_address", "source", "message"),
    [
        ("node0:1", 0, None, "", "--coordinator-address is 'node0', 127.0.1.1 on this host, which others cannot reach"),
        ("node1:1", 0, "node0", "", "--host-address is 'node0', 127.0.1.1 on this host, which others cannot reach"),
        ("10.0.0.1:1", 1, "127.0.0.1", "", "is '127.0.0.1', which others cannot reach: it is the loopback"),
        ("10.0.0.1:1", 1, "169.254.3.4", "", "a link-local address holds on one link"),
        ("[fe80::1]:1", 0, None, "", "--coordinator-address is 'fe80::1', which others cannot reach: a link-local"),
        ("10.0.0.1:1", 1, None, "169.254.3.4", "this host is at 169.254.3.4 on the way to '10.0.0.1'"),
        ("node0:1", 1, None, "127.0.0.1", "this host is at 127.0.0.1 on the way to 'node0'"),
        ("0.0.0.0:1", 0, None, "", "it stands for all addresses of this host"),
        ("10.0.0.1:1", 1, "::ffff:127.0.0.1", "", "it is the loopback interface's"),
    ],
)
def test_an_address_that_others_cannot_reach_is_refused(names, coordinator, process_id, host_address, source, message):
    names(source)
    with pytest.raises(UserError, match=re.escape(message)):
        find(coordinator, 2, process_id, host_address)


@pytest.mark.parametrize(("host", "process_id"), [("127.0.0.1", 0), ("localhost", 1), ("127.0.1.1", 0)])
def test_a_group_that_is_wholly_on_loopback_is_allowed(host, process_id):
    for host_address in (None, "127.0.0.1"):
        assert find(f"{host}:1234", 2, process_id, host_address).address.startswith("127.")


def test_addresses_of_both_families_are_read_and_written():
    for text in ("10.0.0.1:8476", "[fd00::1]:8476", "leader.ns:80"):
        assert join_address(*split_address(text)) == text
