"""The rendezvous, its processes played by threads: who comes, what must be alike, and one clear message for everybody."""

import contextlib
import dataclasses
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
from deployments import OTHER
from group_in_threads import enter, opened, options_of
from waits import until

from dsjax.addresses import split_address
from dsjax.errors import UserError
from dsjax.hosts import HostOptions, coordination, rendezvous
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.wire import JoinRequest, loopback_error
from dsjax.messaging import Endpoint

ALIKE = {"the version of dsjax": "1.0", "--mesh": "dp=4", "the checkpoint fingerprint": "ab12"}


@pytest.fixture(autouse=True)
def long_linger(monkeypatch):
    """Process 0 waits for those that come late on a busy machine; it waits no longer where all have come."""
    monkeypatch.setattr(rendezvous, "_LINGER_SECONDS", 30.0)


@pytest.fixture
def clock(monkeypatch):
    """Make a clock of the rendezvous that a test can put forward, until when it waits for those that do not come."""
    made = SimpleNamespace(ahead=0.0, monotonic=lambda: time.monotonic() + made.ahead, sleep=time.sleep)
    monkeypatch.setattr(rendezvous, "time", made)
    for name, seconds in (("_LINGER_SECONDS", 0.1), ("_FIRST_REPORT_SECONDS", 0.1), ("_REPORT_SECONDS", 0.2)):
        monkeypatch.setattr(rendezvous, name, seconds)
    return made


def hold(processes: list[HostOptions], alike: list | None = None) -> list[list[JoinRequest] | Exception]:
    """The members that each process finds, or what it raises, all at once. alike: what each says or raises; None: `ALIKE`."""

    def attend(process: HostOptions, given: dict | Exception) -> list[JoinRequest] | Exception:
        prepare = Mock(side_effect=given) if isinstance(given, Exception) else Mock(return_value=given)
        try:
            return enter(process, prepare).members
        except Exception as error:
            return error

    return list(ThreadPoolExecutor().map(attend, processes, alike or [ALIKE] * len(processes), timeout=60))


def messages(found: list) -> list[str]:
    """All raised, each in one line; give the lines."""
    assert all(isinstance(error, UserError) for error in found), found
    assert all("\n" not in str(error) for error in found)
    return [str(error) for error in found]


def test_all_get_the_same_members_in_the_order_of_their_ids():
    found = hold(options_of(4))
    assert [member.process_id for member in found[0]] == [0, 1, 2, 3]
    assert found[1:] == [found[0]] * 3


def test_jax_s_service_listens_before_anybody_is_told_where(monkeypatch):
    """Its port was free a moment before; what has taken it meanwhile is no reason to fail."""
    start = Mock(side_effect=[coordination.jax.errors.JaxRuntimeError("the address is in use"), "the service"])
    monkeypatch.setattr(coordination, "start_coordination_service", start)
    service, address = coordination.start_service(options_of(2)[0])
    assert (service, address) == ("the service", start.call_args_list[1].args[0])


def test_no_other_process_is_given_the_port_of_jax_s_service_while_it_starts(monkeypatch):
    """gRPC shares its port, so two services that were given the same free port would both listen."""

    def start(address: str, *_) -> str:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(split_address(address))
        with socket.socket() as shared:  # as gRPC does
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind(split_address(address))
        return "the service"

    monkeypatch.setattr(coordination, "start_coordination_service", start)
    assert coordination.start_service(options_of(2)[0])[0] == "the service"


def test_a_missing_process_is_named_by_all_that_came_and_by_process_0_again_and_again(caplog, clock):
    processes = options_of(4, start=600)
    forming = ThreadPoolExecutor().submit(hold, [processes[0], processes[2]])
    host = JoinRequest.of(processes[0], 0).host
    expected = f"Waiting at {processes[0].coordinator_text} for processes 1, 3 of 4; here: 0 ({host}), 2 ({host})"
    until(lambda: [record.getMessage() for record in caplog.records].count(expected) >= 2)
    clock.ahead = 600.0
    found = messages(forming.result(60))
    assert found[0] == found[1]
    assert "processes 1, 3 of 4 did not come to 127.0.0.1:" in found[0]
    assert "within 600 s (--start-timeout); here: 0 (" in found[0]


def test_without_process_0_each_says_where_it_looked():
    _, process = options_of(2, start=1)
    (found,) = messages(hold([process]))
    assert f"no process 0 at 127.0.0.1:{process.coordinator[1]} within 1 s" in found
    assert "nobody answers" in found
    assert "--coordinator-address" in found


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"the version of dsjax": "1.1"}, "has the version of dsjax 1.1, process 0 has 1.0"),
        ({"--kernels": "plain"}, "has --kernels plain, process 0 has not set"),
    ],
)
def test_what_is_not_alike_is_named_with_both_values_in_every_process(change, shown):
    found = messages(hold(options_of(3), [ALIKE, ALIKE, ALIKE | change]))
    assert len(set(found)) == 1
    assert found[0].startswith("process 2 (")
    assert shown in found[0]


def test_what_one_cannot_prepare_is_told_to_all_and_raised_as_it_was_there():
    wrong = UserError("no model at /nowhere")
    for index in (0, 1):
        found = hold(options_of(3), [wrong if number == index else ALIKE for number in range(3)])
        assert found[index] is wrong
        others = messages([error for error in found if error is not wrong])
        assert len(set(others)) == 1
        assert others[0].startswith(f"process {index} (")
        assert others[0].endswith(": no model at /nowhere")


def test_one_that_cannot_be_in_the_group_is_refused_alone_and_the_group_goes_on_forming(caplog, monkeypatch):
    processes = options_of(3)
    came = threading.Event()
    prepare = rendezvous.Door._prepare
    monkeypatch.setattr(rendezvous.Door, "_prepare", lambda *told: prepare(*told) or came.set())
    leader = ThreadPoolExecutor().submit(hold, processes[:2])
    assert came.wait(60)
    for wrong, message in (
        (processes[1], "both have --process-id 1; give each its own"),
        (dataclasses.replace(processes[1], num_processes=4), "has --num-processes 4, process 0 has 3; give all"),
        (dataclasses.replace(processes[1], process_id=3), "came, but ids go from 0 to 2"),
    ):
        (found,) = messages(hold([wrong]))
        assert message in found
        assert message in caplog.text
    (last,) = hold([processes[2]])
    assert leader.result(60) == [last, last]
    assert [member.process_id for member in last] == [0, 1, 2]


def test_who_was_refused_and_who_had_another_key_is_named_when_the_time_is_over(caplog, clock):
    processes = options_of(2, start=600)
    leader = ThreadPoolExecutor().submit(hold, processes[:1])
    (refused,) = messages(hold([dataclasses.replace(processes[1], num_processes=3)]))
    (stranger,) = messages(hold([dataclasses.replace(processes[1], credentials=OTHER)]))
    until(lambda: "were turned away" in caplog.text)
    clock.ahead = 600.0
    (found,) = messages(leader.result(60))
    assert "process 1 of 2 did not come to 127.0.0.1:" in found
    assert f"Refused: {refused}" in found
    assert "Connections that were turned away: 1 with another cluster key" in found
    assert "it has another cluster key (--cluster-key-file, DSJAX_CLUSTER_KEY)" in stranger


@pytest.fixture
def forgotten(monkeypatch):
    """JAX forgets each process that is gone once this is set."""
    event = threading.Event()
    event.set()
    monkeypatch.setattr(coordination, "wait_until_forgotten", lambda process_id: event.wait(60))
    return event


def come(options: HostOptions, leader: Endpoint) -> Endpoint:
    """Ask process 0 to join its group, and wait for no answer."""
    endpoint = rendezvous.open_endpoint(options)
    peer = endpoint.connect(leader.address, "member")
    peer.request("join", JoinRequest.of(options, endpoint.port))
    peer.send("prepared", {"alike": ALIKE})
    return endpoint


def held() -> tuple[list[HostOptions], list[HostGroup], list]:
    """A group of two: its options, the processes, and who has left."""
    processes, left = options_of(2), []
    hold(processes)
    groups = sorted(opened, key=lambda group: group.options.process_id)
    groups[0].on_change = left.append
    return processes, groups, left


def test_another_process_under_the_id_of_a_member_that_lives_is_refused_alone():
    processes, _, left = held()
    (found,) = messages(hold([processes[1]]))
    assert "is in the group, and another on " in found
    assert "has its --process-id 1; give each its own" in found
    assert not left


def test_a_process_that_comes_in_the_moment_in_which_the_one_before_has_died_is_let_in(forgotten):
    processes, groups, _ = held()
    for _ in range(3):
        groups[-1].endpoint.close()
        groups.append(enter(processes[1], lambda: ALIKE))


def test_of_two_that_come_back_under_one_id_at_once_one_comes_in_and_the_other_is_told(forgotten):
    processes, (_, second), left = held()
    second.endpoint.close()
    until(lambda: left)
    forgotten.clear()
    pool = ThreadPoolExecutor()
    answers = as_completed([pool.submit(hold, processes[1:]) for _ in range(2)], timeout=60)
    (refused,) = messages(next(answers).result())
    assert "is coming back to the group, and another on " in refused
    assert "has its --process-id 1; give each its own" in refused
    forgotten.set()
    (members,) = next(answers).result()
    assert [member.process_id for member in members] == [0, 1]


def test_one_that_goes_while_it_waits_to_come_back_gives_way_to_the_next(forgotten):
    processes, (leader, second), left = held()
    second.endpoint.close()
    until(lambda: left)
    forgotten.clear()
    first = come(processes[1], leader.endpoint)
    until(lambda: 1 in leader._door._callers)
    first.close()
    until(lambda: 1 not in leader._door._callers)
    forgotten.set()
    back = enter(processes[1], lambda: ALIKE)
    back.report_ready()
    until(lambda: leader.live_ids == [0, 1])
    assert leader.members[1].port == back.endpoint.port


def test_one_that_comes_back_otherwise_or_at_the_end_is_told_so():
    processes, (leader, second), left = held()
    second.endpoint.close()
    until(lambda: left)
    (found,) = messages(hold([processes[1]], [ALIKE | {"--mesh": "dp=8"}]))
    assert "has --mesh dp=8, process 0 has dp=4" in found
    (found,) = messages(hold([dataclasses.replace(processes[1], num_processes=3)]))
    assert "has --num-processes 3, process 0 has 2" in found
    leader._door.is_closing = True
    (found,) = messages(hold([processes[1]]))
    assert found == "process 0 is ending the group; start all processes again"


def test_a_stranger_in_the_place_of_process_0_is_no_group():
    processes = options_of(2, start=1)
    with socket.create_server(processes[0].coordinator) as service:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    service.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)

        threading.Thread(target=answer, daemon=True).start()
        (found,) = messages(hold([processes[1]]))
        service.shutdown(socket.SHUT_RDWR)
    assert "it may be no dsjax process" in found


def test_a_port_in_use_is_known_at_once():
    processes = options_of(2)
    with socket.create_server(processes[0].coordinator):
        (found,) = messages(hold([processes[0]]))
    assert "--coordinator-address: cannot listen at 127.0.0.1 port" in found
    assert "Address already in use" in found


def test_a_process_that_dies_while_the_group_forms_ends_it():
    processes = options_of(3)

    def visit() -> None:
        """Come, and go without a word."""
        endpoint = rendezvous.open_endpoint(processes[2])
        peer = rendezvous._connect(processes[2], endpoint)
        peer.request("join", JoinRequest.of(processes[2]))
        peer.request("ping").result(60)
        endpoint.close()

    threading.Thread(target=visit, daemon=True).start()
    found = messages(hold(processes[:2]))
    assert all(text.startswith("process 2 (") and "has gone away while the group was forming" in text for text in found)


def test_a_process_that_dies_while_jax_s_service_starts_ends_the_group_too(monkeypatch):
    processes = options_of(2)
    leader = rendezvous.open_endpoint(processes[0])
    door = rendezvous.Door(processes[0], leader, "127.0.0.1:1")
    second = come(processes[1], leader)

    def start(options):
        second.close()
        until(lambda: door._problem is not None)
        return None, "127.0.0.1:1"

    monkeypatch.setattr(coordination, "start_service", start)
    with pytest.raises(GroupError, match=r"process 1 \(.*\) has gone away while the group was forming"):
        door.meet(lambda: ALIKE)
    leader.close()


def test_who_comes_to_another_process_than_process_0_is_told_so():
    """On one host the coordinator's port may be the one that another process was given."""
    processes = options_of(2)
    other = rendezvous.open_endpoint(processes[1])
    (found,) = messages(hold([dataclasses.replace(processes[1], coordinator=("127.0.0.1", other.port))]))
    other.close()
    assert "'join' is not served here" in found


def test_an_address_that_was_not_known_is_found_before_anything_listens(monkeypatch):
    options = dataclasses.replace(options_of(2)[1], address="")
    answers = iter(["", "127.0.0.1"])
    monkeypatch.setattr(rendezvous, "own_address", lambda *_: next(answers))
    assert rendezvous.with_own_address(options).address == "127.0.0.1"
    monkeypatch.setattr(rendezvous, "own_address", lambda *_: "")
    with pytest.raises(GroupError, match=r"the name of process 0, '127\.0\.0\.1', is not known"):
        rendezvous.with_own_address(dataclasses.replace(options, start_timeout=1))


def test_loopback_addresses_are_refused_where_the_machines_differ():
    here = JoinRequest(0, 2, "a", 1, "10.0.0.1", "boot-1")
    other = JoinRequest(1, 2, "b", 2, "127.0.1.1", "boot-2")
    assert "listens at 127.0.1.1, which other hosts cannot reach" in loopback_error({0: here, 1: other})
    for change in ({"machine": "boot-1"}, {"address": "10.0.0.2"}):
        assert loopback_error({0: here, 1: msgspec.structs.replace(other, **change)}) is None
