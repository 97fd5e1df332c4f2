"""The rendezvous, its processes played by threads: who comes, what must be alike, and one clear message for everybody."""

import dataclasses
import socket
import threading
import time

import msgspec
import pytest
from deployments import OTHER
from group_in_threads import enter, opened, options_of
from waits import until

from dsjax.errors import UserError
from dsjax.hosts import HostOptions, coordination, rendezvous
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.wire import JoinRequest, on_loopback

ALIKE = {"the version of dsjax": "1.0", "--mesh": "dp=4", "the checkpoint fingerprint": "ab12"}


@pytest.fixture(autouse=True)
def short_linger(monkeypatch):
    monkeypatch.setattr(rendezvous, "_LINGER_SECONDS", 0.5)


def group_of(count: int, timeout: int = 120) -> list[HostOptions]:
    return options_of(count, start=timeout)


def hold(
    processes: list[HostOptions], alike: list[dict | Exception] | None = None
) -> list[list[JoinRequest] | Exception]:
    """The members that each process finds, or what it raises, all at once."""
    found: list = [None] * len(processes)

    def attend(index: int) -> None:
        def prepare():
            given = ALIKE if alike is None else alike[index]
            if isinstance(given, Exception):
                raise given
            return given

        try:
            found[index] = enter(processes[index], prepare).members
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=attend, args=(index,), daemon=True) for index in range(len(processes))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(deadline - time.monotonic())
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    return found


def messages(found: list) -> list[str]:
    """All raised, each in one line; give the lines."""
    assert all(isinstance(error, UserError) for error in found), found
    assert all("\n" not in str(error) for error in found)
    return [str(error) for error in found]


def test_all_get_the_same_members_in_the_order_of_their_ids():
    found = hold(group_of(4))
    assert [member.process_id for member in found[0]] == [0, 1, 2, 3]
    assert found[1:] == [found[0]] * 3


def test_jax_s_service_listens_before_anybody_is_told_where(monkeypatch):
    """Its port was free a moment before; what has taken it meanwhile is no reason to fail."""
    taken = socket.create_server(("127.0.0.1", 0))
    tried = []

    def start(address: str, *_) -> str:
        tried.append(address)
        if len(tried) == 1:
            raise coordination.jax.errors.JaxRuntimeError("the address is in use")
        return "the service"

    monkeypatch.setattr(coordination, "start_coordination_service", start)
    service, address = coordination.start_service(group_of(2)[0])
    assert (service, address) == ("the service", tried[1])
    taken.close()


def test_no_other_process_is_given_the_port_of_jax_s_service_while_it_starts(monkeypatch):
    """gRPC shares its port, so two services that were given the same free port would both listen."""

    def start(address: str, *_) -> str:
        host, port = address.rsplit(":", 1)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        with socket.socket() as shared:  # as gRPC does
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((host, int(port)))
        return "the service"

    monkeypatch.setattr(coordination, "start_coordination_service", start)
    assert coordination.start_service(group_of(2)[0])[0] == "the service"


def test_a_missing_process_is_named_by_all_that_came_and_by_process_0_again_and_again_while_it_waits(
    caplog, monkeypatch
):
    monkeypatch.setattr(rendezvous, "_FIRST_REPORT_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.2)
    processes = group_of(4, timeout=2)
    found = messages(hold([processes[0], processes[2]]))
    assert found[0] == found[1]
    assert "processes 1, 3 of 4 did not come to 127.0.0.1:" in found[0]
    assert "within 2 s (--start-timeout); here: 0 (" in found[0]
    said = [record.getMessage() for record in caplog.records if "Waiting at" in record.getMessage()]
    host = JoinRequest.of(processes[0], 0).host
    expected = f"Waiting at {processes[0].coordinator_text} for processes 1, 3 of 4; here: 0 ({host}), 2 ({host})"
    assert said.count(expected) >= 2


def test_without_process_0_each_says_where_it_looked():
    _, process = group_of(2, timeout=1)
    (found,) = messages(hold([process]))
    assert f"no process 0 at 127.0.0.1:{process.coordinator[1]} within 1 s" in found
    assert "nobody answers" in found
    assert "--coordinator-address" in found


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("the version of dsjax", "1.1", "has the version of dsjax 1.1, process 0 has 1.0"),
        ("--kernels", "plain", "has --kernels plain, process 0 has not set"),
    ],
)
def test_what_is_not_alike_is_named_with_both_values_in_every_process(name, value, shown):
    found = messages(hold(group_of(3), [ALIKE, ALIKE, ALIKE | {name: value}]))
    assert len(set(found)) == 1
    assert found[0].startswith("process 2 (")
    assert shown in found[0]


def test_what_one_cannot_prepare_is_told_to_all_and_raised_as_it_was_there():
    wrong = UserError("no model at /nowhere")
    for index in (0, 1):
        alike: list = [ALIKE, ALIKE, ALIKE]
        alike[index] = wrong
        found = hold(group_of(3), alike)
        assert found[index] is wrong
        others = messages([error for error in found if error is not wrong])
        assert len(set(others)) == 1
        assert others[0].startswith(f"process {index} (")
        assert others[0].endswith(": no model at /nowhere")


def test_one_that_cannot_be_in_the_group_is_refused_alone_and_the_group_goes_on_forming(caplog, monkeypatch):
    processes = group_of(3)
    came = threading.Event()
    prepare = rendezvous.Door._prepare
    monkeypatch.setattr(rendezvous.Door, "_prepare", lambda *told: prepare(*told) or came.set())
    leader: list = []
    thread = threading.Thread(target=lambda: leader.extend(hold([processes[0], processes[1]])))
    thread.start()
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
    thread.join(60)
    assert leader == [last, last]
    assert [member.process_id for member in last] == [0, 1, 2]


def test_who_was_refused_and_who_had_another_key_is_named_when_the_time_is_over():
    processes = group_of(2, timeout=4)
    leader: list = []
    thread = threading.Thread(target=lambda: leader.extend(hold([processes[0]])))
    thread.start()
    (refused,) = messages(hold([dataclasses.replace(processes[1], num_processes=3)]))
    (stranger,) = messages(hold([dataclasses.replace(processes[1], credentials=OTHER)]))
    thread.join(60)
    (found,) = messages(leader)
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


def held(processes: list[HostOptions], left: list) -> list[HostGroup]:
    hold(processes)
    groups = sorted(opened, key=lambda group: group.options.process_id)
    groups[0].on_change = left.append
    return groups


def test_another_process_under_the_id_of_a_member_that_lives_is_refused_alone():
    processes, left = group_of(2), []
    held(processes, left)
    (found,) = messages(hold([processes[1]]))
    assert "is in the group, and another on " in found
    assert "has its --process-id 1; give each its own" in found
    assert not left


def test_a_process_that_comes_in_the_moment_in_which_the_one_before_has_died_is_let_in(forgotten):
    processes, left = group_of(2), []
    groups = held(processes, left)
    for _ in range(3):
        groups[-1].endpoint.close()
        groups.append(enter(processes[1], lambda: ALIKE))


def test_of_two_that_come_back_under_one_id_at_once_one_comes_in_and_the_other_is_told(forgotten):
    processes, left = group_of(2), []
    held(processes, left)[1].endpoint.close()
    until(lambda: left)
    forgotten.clear()
    came: list = []
    threads = [threading.Thread(target=lambda: came.extend(hold([processes[1]]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: came)
    (refused,) = messages(came)
    assert "is coming back to the group, and another on " in refused
    assert "has its --process-id 1; give each its own" in refused
    forgotten.set()
    for thread in threads:
        thread.join(60)
    assert [member.process_id for member in came[1]] == [0, 1]


def test_one_that_goes_while_it_waits_to_come_back_gives_way_to_the_next(forgotten):
    processes, left = group_of(2), []
    leader, second = held(processes, left)
    second.endpoint.close()
    until(lambda: left)
    forgotten.clear()
    first = rendezvous.open_endpoint(processes[1])
    peer = first.connect(leader.endpoint.address, "member")
    peer.request("join", JoinRequest.of(processes[1], first.port))
    peer.send("prepared", {"alike": ALIKE})
    until(lambda: 1 in leader._door._callers)
    first.close()
    until(lambda: 1 not in leader._door._callers)
    forgotten.set()
    back = enter(processes[1], lambda: ALIKE)
    back.report_ready()
    until(lambda: leader.live_ids == [0, 1])
    assert leader.members[1].port == back.endpoint.port


def test_one_that_comes_back_otherwise_or_at_the_end_is_told_so():
    processes, left = group_of(2), []
    leader, second = held(processes, left)
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
    processes = group_of(2, timeout=1)
    with socket.socket() as service:
        service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        service.bind(("127.0.0.1", processes[0].coordinator[1]))
        service.listen()

        def answer() -> None:
            while True:
                try:
                    service.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)
                except OSError:
                    return

        threading.Thread(target=answer, daemon=True).start()
        (found,) = messages(hold([processes[1]]))
        service.shutdown(socket.SHUT_RDWR)
    assert "it may be no dsjax process" in found


def test_a_port_in_use_is_known_at_once():
    processes = group_of(2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", processes[0].coordinator[1]))
        other.listen()
        (found,) = messages(hold([processes[0]]))
    assert "--coordinator-address: cannot listen at 127.0.0.1 port" in found
    assert "Address already in use" in found


def test_a_process_that_dies_while_the_group_forms_ends_it():
    processes = group_of(3)

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
    processes = group_of(2)
    second = rendezvous.open_endpoint(processes[1])
    leader = rendezvous.open_endpoint(processes[0])
    door = rendezvous.Door(processes[0], leader, "127.0.0.1:1")
    peer = second.connect(leader.address, "member")
    peer.request("join", JoinRequest.of(processes[1], second.port))
    peer.send("prepared", {"alike": ALIKE})

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
    processes = group_of(2)
    other = rendezvous.open_endpoint(processes[1])
    (found,) = messages(hold([dataclasses.replace(processes[1], coordinator=("127.0.0.1", other.port))]))
    other.close()
    assert "'join' is not served here" in found


def test_an_address_that_was_not_known_is_found_before_anything_listens(monkeypatch):
    options = dataclasses.replace(group_of(2)[1], address="", start_timeout=1)
    answers = iter(["", "127.0.0.1"])
    monkeypatch.setattr(rendezvous, "own_address", lambda *_: next(answers))
    assert rendezvous.with_own_address(options).address == "127.0.0.1"
    monkeypatch.setattr(rendezvous, "own_address", lambda *_: "")
    with pytest.raises(GroupError, match=r"the name of process 0, '127\.0\.0\.1', is not known"):
        rendezvous.with_own_address(options)


def test_loopback_addresses_are_refused_where_the_machines_differ():
    here = JoinRequest(0, 2, "a", 1, "10.0.0.1", "boot-1")
    other = JoinRequest(1, 2, "b", 2, "127.0.1.1", "boot-2")
    assert "listens at 127.0.1.1, which other hosts cannot reach" in on_loopback({0: here, 1: other})
    for change in ({"machine": "boot-1"}, {"address": "10.0.0.2"}):
        assert on_loopback({0: here, 1: msgspec.structs.replace(other, **change)}) is None
