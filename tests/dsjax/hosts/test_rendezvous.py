"""The rendezvous, its processes played by threads: who comes, what must be alike, and one clear message for everybody."""

import contextlib
import dataclasses
import shutil
import socket
import threading
import time

import msgspec
import pytest
from deployments import make_certificates

from dsjax.errors import UserError
from dsjax.hosts import HostOptions, rendezvous
from dsjax.messaging.credentials import CredentialOptions
from dsjax.hosts.rendezvous import GroupError, JoinRequest, Rendezvous, meet
from dsjax.hosts.secure_channel import PROTOCOL
from dsjax.hosts.wire import Prepared, send

ALIKE = {"the version of dsjax": "1.0", "--mesh": "dp=4", "the checkpoint fingerprint": "ab12"}


@pytest.fixture(autouse=True)
def short_linger(monkeypatch):
    monkeypatch.setattr(rendezvous, "_LINGER_SECONDS", 0.5)


open_rendezvous: list[Rendezvous] = []


@pytest.fixture(autouse=True)
def closed_in_the_end():
    yield
    while open_rendezvous:
        open_rendezvous.pop().close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def group_of(count: int, timeout: int = 120) -> list[HostOptions]:
    port = free_port()
    return [HostOptions(("127.0.0.1", port), count, i, "127.0.0.1", timeout, 10) for i in range(count)]


def hold(
    processes: list[HostOptions], alike: list[dict | Exception] | None = None
) -> list[list[JoinRequest] | Exception]:
    """What `meet` gives or raises in each process, all at once; it may take ten seconds in all."""
    found: list = [None] * len(processes)

    def attend(index: int) -> None:
        def prepare():
            given = ALIKE if alike is None else alike[index]
            if isinstance(given, Exception):
                raise given
            return given

        try:
            meeting_of = meet(processes[index], prepare)
            open_rendezvous.append(meeting_of)
            found[index] = meeting_of.members
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


def test_all_are_told_where_the_service_will_be_which_is_beside_the_meetings_port():
    processes = group_of(3)
    hold(processes)
    services = {found.service for found in open_rendezvous}
    assert len(services) == 1
    host, port = services.pop().split(":")
    assert host == "127.0.0.1"
    with socket.socket() as probe:
        probe.bind((host, int(port)))
    assert int(port) != processes[0].coordinator[1]


def test_a_missing_process_is_named_by_all_that_came():
    processes = group_of(4, timeout=3)
    found = messages(hold([processes[0], processes[2]]))
    assert found[0] == found[1]
    assert "processes 1, 3 of 4 did not come to 127.0.0.1:" in found[0]
    assert "within 3 s (--start-timeout); here: 0 (" in found[0]


def test_process_0_says_whom_it_waits_for_again_and_again(caplog, monkeypatch):
    monkeypatch.setattr(rendezvous, "_FIRST_REPORT_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.2)
    processes = group_of(4, timeout=2)
    hold([processes[0], processes[2]])
    said = [record.getMessage() for record in caplog.records if "Waiting at" in record.getMessage()]
    host = JoinRequest.of(processes[0], 0).host
    expected = f"Waiting at {processes[0].coordinator_text} for processes 1, 3 of 4; here: 0 ({host}), 2 ({host})"
    assert said.count(expected) >= 2


def test_without_process_0_each_says_where_it_looked():
    _, process = group_of(2, timeout=1)
    (found,) = messages(hold([process]))
    assert f"no process 0 at 127.0.0.1:{process.coordinator[1]} within 1 s" in found
    assert "Connection refused" in found
    assert "--coordinator-address" in found


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("the version of dsjax", "1.1", "has the version of dsjax 1.1, process 0 has 1.0"),
        ("--mesh", "dp=8", "has --mesh dp=8, process 0 has dp=4"),
        ("the checkpoint fingerprint", "cd34", "has the checkpoint fingerprint cd34, process 0 has ab12"),
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
    enter = rendezvous._Host._enter
    monkeypatch.setattr(
        rendezvous._Host, "_enter", lambda *told: enter(*told) or (told[1].process_id == 1 and came.set())
    )
    leader: list = []
    thread = threading.Thread(target=lambda: leader.extend(hold([processes[0], processes[1]])))
    thread.start()
    assert came.wait(60)
    for wrong, message in (
        (processes[1], "both have --process-id 1; give each its own"),
        (
            dataclasses.replace(processes[1], num_processes=4),
            "has --num-processes 4, process 0 has 3; give all the same",
        ),
        (dataclasses.replace(processes[1], process_id=3), "came, but ids go from 0 to 2"),
    ):
        (found,) = messages(hold([wrong]))
        assert message in found
        assert message in caplog.text
    (last,) = hold([processes[2]])
    thread.join(60)
    assert leader == [last, last]
    assert [member.process_id for member in last] == [0, 1, 2]


def test_who_was_refused_and_who_had_another_key_is_named_when_the_time_is_over(monkeypatch):
    processes = group_of(2, timeout=4)
    leader: list = []
    thread = threading.Thread(target=lambda: leader.extend(hold([processes[0]])))
    thread.start()
    (refused,) = messages(hold([dataclasses.replace(processes[1], num_processes=3)]))
    monkeypatch.setenv("DSJAX_CLUSTER_KEY", "another key, and a long one, too".replace(" ", "-"))
    (stranger,) = messages(hold([processes[1]]))
    thread.join(60)
    (found,) = messages(leader)
    assert "process 1 of 2 did not come to 127.0.0.1:" in found
    assert f"Refused: {refused}" in found
    assert "Connections that were turned away: 1 with another cluster key" in found
    assert "which is from the environment variable DSJAX_CLUSTER_KEY: that side has another one" in stranger


def listener_of(left: list, next_generation: int | None = 3):
    """The listener of the group that was held last, with a group behind it that lets everybody come back."""
    listener = next(found.listener for found in open_rendezvous if found.listener)
    listener.watch(lambda request: left.append(request.process_id), lambda request: next_generation)
    return listener


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_member_that_goes_is_seen_at_once_and_may_come_back_under_its_id():
    processes = group_of(3)
    hold(processes)
    left: list[int] = []
    listener_of(left).wanted = "dp=2"
    next(found for found in open_rendezvous if found.connection).close()
    until(lambda: len(left) == 1)
    back = processes[left[0]]
    (members,) = hold([back])
    assert [member.process_id for member in members] == [0, 1, 2]
    assert open_rendezvous[-1].generation == 3
    assert open_rendezvous[-1].here == [0, 1, 2]  # whom it has to reach, itself among them
    assert open_rendezvous[-1].wanted == "dp=2"  # what it should compile for
    assert open_rendezvous[-1].service == open_rendezvous[0].service


def test_another_process_under_the_id_of_a_member_that_lives_is_refused_alone():
    processes = group_of(2)
    hold(processes)
    left: list[int] = []
    listener_of(left)
    (found,) = messages(hold([processes[1]]))
    assert "is in the group, and another on " in found
    assert "has its --process-id 1; give each its own" in found
    assert not left


def test_of_two_that_come_back_under_one_id_at_once_one_comes_in_and_the_other_is_told():
    processes = group_of(2)
    hold(processes)
    both = threading.Barrier(2)

    def may_come(request: JoinRequest) -> int:
        """Wait for the other one, which comes here too where nothing keeps them apart."""
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)
        return 3

    listener = listener_of([])
    listener.watch(lambda request: None, may_come)
    listener.drop(1)
    came = hold([processes[1], processes[1]])
    refused = [one for one in came if isinstance(one, Exception)]
    assert len(refused) == 1, came
    assert "is coming back to the group, and another on " in str(refused[0])
    assert "has its --process-id 1; give each its own" in str(refused[0])


def test_one_that_goes_while_it_waits_to_come_back_gives_way_to_the_next():
    processes = group_of(2)
    hold(processes)
    waiting, may_come, left = [], threading.Event(), []

    def wait(request: JoinRequest) -> int:
        waiting.append(request)
        assert may_come.wait(60)
        return 3

    listener = listener_of([])
    listener.watch(left.append, wait)
    listener.drop(1)
    first = JoinRequest.of(processes[1], 7)
    with rendezvous._connect(processes[1], processes[1].read_credentials()) as channel:
        send(channel, first)
        send(channel, Prepared(ALIKE))
        until(lambda: waiting == [first])
    second: list = []
    thread = threading.Thread(target=lambda: second.extend(hold([processes[1]])))
    thread.start()
    until(lambda: len(waiting) == 2)
    may_come.set()
    thread.join(60)
    assert [member.process_id for member in second[0]] == [0, 1]
    until(lambda: left == [first])
    assert listener.has(waiting[1])
    assert not listener.has(first), "though it may have the same pid"


def test_one_that_comes_back_otherwise_or_at_the_end_is_told_so():
    processes = group_of(2)
    hold(processes)
    left: list[int] = []
    listener = listener_of(left, None)
    listener.drop(1)
    (found,) = messages(hold([processes[1]], [ALIKE | {"--mesh": "dp=8"}]))
    assert "has --mesh dp=8, process 0 has dp=4" in found
    (found,) = messages(hold([processes[1]]))
    assert found == "process 0 is ending the group; start all processes again"
    (found,) = messages(hold([dataclasses.replace(processes[1], num_processes=3)]))
    assert "has --num-processes 3, process 0 has 2" in found


def test_a_stranger_in_the_place_of_process_0_is_no_group():
    processes = group_of(2, timeout=1)
    with socket.socket() as service:
        service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        service.bind(("127.0.0.1", processes[0].coordinator[1]))
        service.listen()

        def answer() -> None:
            while True:
                try:
                    service.accept()[0].sendall(b"\0\0\0\x12 HTTP/2")
                except OSError:
                    return

        threading.Thread(target=answer, daemon=True).start()
        (found,) = messages(hold([processes[1]]))
        service.shutdown(socket.SHUT_RDWR)
    assert "what answers there is no dsjax that waits for other processes" in found


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

    # It comes, and goes without a word.
    def visit() -> None:
        with rendezvous._connect(processes[2], processes[2].read_credentials()) as channel:
            send(channel, JoinRequest.of(processes[2]))

    threading.Thread(target=visit, daemon=True).start()
    found = messages(hold(processes[:2]))
    assert all(text.startswith("process 2 (") and "has gone away while the group was forming" in text for text in found)


def test_strangers_at_the_port_are_ignored():
    processes = group_of(2)

    def knock() -> None:
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            PROTOCOL + b"\xff" * 64,
            PROTOCOL + b"\x01\0\0\0x",
            b"",
        ):
            for _ in range(100):
                try:
                    with socket.create_connection(processes[0].coordinator, timeout=1) as connection:
                        connection.sendall(data)
                    break
                except OSError:
                    time.sleep(0.01)

    thread = threading.Thread(target=knock)
    thread.start()
    results: list = []
    leader = threading.Thread(target=lambda: results.extend(hold([processes[0]])), daemon=True)
    leader.start()
    thread.join(60)
    (followed,) = hold([processes[1]])
    leader.join(60)
    assert results == [followed]


def test_an_address_that_was_not_known_is_found_before_anything_listens(monkeypatch):
    options = dataclasses.replace(group_of(2)[1], address="", start_timeout=1)
    answers = iter(["", "127.0.0.1"])
    monkeypatch.setattr(rendezvous, "own_address", lambda *_: next(answers))
    assert rendezvous.located(options).address == "127.0.0.1"
    monkeypatch.setattr(rendezvous, "own_address", lambda *_: "")
    with pytest.raises(GroupError, match=r"the name of process 0, '127\.0\.0\.1', is not known"):
        rendezvous.located(options)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_loopback_addresses_are_refused_where_the_machines_differ():
    here = JoinRequest(0, 2, "a", 1, "10.0.0.1", "boot-1")
    other = JoinRequest(1, 2, "b", 2, "127.0.1.1", "boot-2")
    assert "listens at 127.0.1.1, which other hosts cannot reach" in rendezvous._on_loopback({0: here, 1: other})
    for change in ({"machine": "boot-1"}, {"address": "10.0.0.2"}):
        assert rendezvous._on_loopback({0: here, 1: msgspec.structs.replace(other, **change)}) is None
