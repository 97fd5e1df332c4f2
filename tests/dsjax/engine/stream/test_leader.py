"""A leader and a follower over a store in memory: the same commands, the same results collected before each, and one end for both."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from dsjax.engine.contract.commands import Clear, Copy, Flush, RankStep, Step
from dsjax.engine.elastic.follower import Follower
from dsjax.engine.stream.leader import LeaderExecutor
from dsjax.hosts import HostOptions, group
from dsjax.hosts.announcement import Announcement
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.rendezvous import JoinRequest


@pytest.fixture(autouse=True)
def nobody_watches_who_leaves(monkeypatch):
    """Leave at once: no thread of these groups watches the connections, so that nothing would end the wait for the other process."""
    monkeypatch.setattr(group, "_LEAVE_SECONDS", 0)


class MemoryStore:
    """The coordination service's store, for threads."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self.values, key
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, min(seconds, 5))
            return self.values.get(key)

    def delete(self, folder: str) -> None:
        with self._changed:
            for key in [
                key for key in self.values if key == folder or (folder.endswith("/") and key.startswith(folder))
            ]:
                del self.values[key]


class Pending:
    def __init__(self, number: int, command):
        self.number, self.command = number, command


class Told:
    """An executor that remembers what it was told. wait: with emulated devices the next command starts then."""

    def __init__(self, max_in_flight: int = 1, fails_at: int | None = None):
        self.max_in_flight, self.events, self.fails_at = max_in_flight, [], fails_at
        self.launched = 0

    def launch(self, command):
        self.events.append(("launch", command))
        self.launched += 1
        if self.launched == self.fails_at:
            raise ValueError("it cannot be laid out")
        return Pending(self.launched, command)

    def wait(self, pending):
        self.events.append(("wait", pending.number))

    def collect(self, pending):
        self.events.append(("collect", pending.number))
        return [pending.number]

    def set_recording(self, on):
        self.events.append(("record", on))

    def warm_up(self, progress=None):
        progress and progress(0, 1, "a shape")
        self.events.append(("warm up",))

    def shutdown(self):
        self.events.append(("shutdown",))

    def in_order(self):
        """Without waiting, which each does in its own time."""
        return [event for event in self.events if event[0] != "wait"]


def step(slot: int) -> Step:
    return Step([RankStep([], [], slot.to_bytes(4, "little") * 2, [], [])])


class Pair:
    """Process 0 and process 1, the latter's loop in a thread."""

    def __init__(self, **options):
        self.store = MemoryStore()
        members = [JoinRequest(index, 2, "host", 10 + index, "127.0.0.1", "m") for index in (0, 1)]
        self.groups = [
            HostGroup(HostOptions(("127.0.0.1", 1), 2, index, "127.0.0.1", 1, 1), members, self.store)
            for index in (0, 1)
        ]
        self.inner, self.told = Told(), Told(**options)
        self.leader, self.follower = LeaderExecutor(self.inner, self.groups[0]), Follower(self.groups[1])
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self):
        try:
            self.follower.follow(self.told)
        except BaseException as error:
            self.error = error

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive()

    def take_part(self, count: int):
        """Wait until the follower has launched so many commands: on devices a step's result would not be there before."""
        deadline = time.monotonic() + 10
        while self.told.launched < count and time.monotonic() < deadline:
            time.sleep(0.001)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_follower_launches_and_collects_in_the_leaders_order(max_in_flight):
    pair = Pair(max_in_flight=max_in_flight)
    leader = pair.leader
    leader.warm_up()
    first = leader.launch(step(1))
    second = leader.launch(step(2))  # laid out before the first one's results are known
    leader.launch(Copy([b""]))
    leader.wait(first)
    assert leader.collect(first) == [1]
    third = leader.launch(step(3))
    leader.launch(Clear([b""]))
    leader.set_recording(True)
    leader.collect(second)
    leader.collect(third)
    flushed = leader.launch(Flush())
    leader.collect(flushed)
    leader.shutdown()
    pair.join()
    assert pair.error is None
    inner_events, followed = pair.inner.in_order(), pair.told.in_order()
    assert [event for event in followed if event[0] != "collect"] == [
        event for event in inner_events if event[0] != "collect"
    ]
    # What had been collected when a command was laid out is the same; what nothing came after is not collected at all.
    assert followed.index(("collect", 1)) < followed.index(("launch", step(3)))
    assert followed.index(("collect", 1)) > followed.index(("launch", step(2)))
    assert followed.index(("collect", 4)) < followed.index(("launch", Flush()))


def test_emulated_devices_are_waited_for_until_nothing_more_is_under_way():
    pair = Pair(max_in_flight=1)
    pair.leader.launch(step(1))
    pair.leader.launch(step(2))
    deadline = time.monotonic() + 10
    while ("wait", 2) not in pair.told.events and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [event for event in pair.told.events if event[0] == "wait"] == [("wait", 1), ("wait", 2)]
    pair.leader.shutdown()
    pair.join()


def test_the_leader_deletes_what_all_have_read_and_keeps_the_rest():
    pair = Pair()
    for number in range(150):
        pending = pair.leader.launch(step(number))
        pair.take_part(number + 1)
        pair.leader.collect(pending)
    # A step's result shows that all have read its message: whole blocks of 64 before it are gone.
    left = sorted(int(key.rpartition("/")[2]) for key in pair.store.values if "/stream/" in key)
    assert left == list(range(128, 150))
    pair.leader.shutdown()
    pair.join()


def test_a_warm_up_that_fails_elsewhere_is_raised_by_the_leader():
    pair = Pair()
    pair.told.warm_up = lambda progress=None: (_ for _ in ()).throw(RuntimeError("no compiler"))
    with pytest.raises(GroupError, match=r"process 1 \(host, pid 11\): RuntimeError: no compiler"):
        pair.leader.warm_up()
    pair.join()
    assert isinstance(pair.error, RuntimeError)


def test_a_command_that_the_leader_cannot_launch_ends_all():
    pair = Pair()
    pair.inner.fails_at = 2
    pair.groups[0].lost_by = lambda error: None
    pair.leader.launch(step(1))
    with pytest.raises(ValueError, match="it cannot be laid out"):
        pair.leader.launch(step(2))
    pair.join()
    assert isinstance(pair.error, GroupError)
    assert "process 0 has ended the group: a command could not be launched (ValueError)" in str(pair.error)


def test_what_fails_because_a_member_is_gone_names_it():
    pair = Pair()
    pending = pair.leader.launch(step(1))

    def fail(pending):
        pair.groups[0].on_change = lambda error: None
        pair.groups[0]._lose(pair.groups[0].members[1])
        raise RuntimeError("Gloo: connection closed by peer")

    pair.inner.wait = fail
    with pytest.raises(GroupError, match=r"process 1 \(host, pid 11\) has gone away"):
        pair.leader.wait(pending)
    with pytest.raises(GroupError, match="has gone away"):
        pair.leader.launch(step(2))
    pair.leader.group.leave("a test")
    pair.join()


def test_questions_are_answered_by_all_in_the_order_of_their_ids():
    pair = Pair()
    answers: list = []
    other = threading.Thread(target=lambda: answers.append(pair.groups[1].ask("pages", 7)))
    other.start()
    assert pair.groups[0].ask("pages", 9) == [9, 7]
    other.join(60)
    assert answers == [[9, 7]]
    with pytest.raises(ValueError, match="damaged"):
        pair.groups[1].run("loading", lambda: (_ for _ in ()).throw(ValueError("damaged")))
    with pytest.raises(GroupError, match=r"process 1 \(host, pid 11\): damaged"):
        pair.groups[0].run("loading", lambda: 1)
    pair.leader.shutdown()
    pair.join()


def test_a_process_that_comes_back_keeps_its_way_in_until_it_has_joined():
    members = [JoinRequest(index, 2, "host", 10 + index, "127.0.0.1", "m") for index in (0, 1)]
    dropped, told = [], []
    rendezvous = SimpleNamespace(listener=SimpleNamespace(drop=dropped.append))
    options = HostOptions(("127.0.0.1", 1), 2, 0, "127.0.0.1", 1, 1)
    group = HostGroup(options, members, MemoryStore(), rendezvous=rendezvous)
    group.on_change = told.append
    group._unseen = {1}
    group._look({0})
    assert dropped == [1]
    assert "process 1" in str(told[0])
    group._welcome = lambda arrival: None
    assert group._may_come(JoinRequest(1, 2, "host", 99, "127.0.0.1", "m")) == group.generation + 1
    group._look({0})  # it is let in, and has not joined JAX's service yet
    assert dropped == [1]
    assert len(told) == 1


class Group:
    """Process 1 of a group that it follows through generations, in a thread; process 0 is the test."""

    def __init__(self):
        self.store = MemoryStore()
        members = [JoinRequest(index, 2, "host", 10 + index, "127.0.0.1", "m") for index in (0, 1)]
        self.leader, self.second = (
            HostGroup(HostOptions(("127.0.0.1", 1), 2, index, "127.0.0.1", 1, 1), members, self.store)
            for index in (0, 1)
        )
        self.leader._alone.set()
        self.second.hear(1)
        self.follower, self.loaded, self.released = Follower(self.second), [], []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _load(self, announcement):
        executor = Told()
        executor.generation = 0 if announcement is None else announcement.number
        self.loaded.append(executor)
        return executor

    def _follow(self):
        try:
            self.follower.run(self._load, self.released.append, seconds=1.0)
        except BaseException as error:
            self.error = error

    def announce(self, number: int, *process_ids: int):
        self.leader.announce(Announcement(number, list(process_ids), [0], {"mesh": "dp=1"}, "a test"))

    def until(self, condition):
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def end(self):
        self.leader.leave()
        self.thread.join(60)
        assert not self.thread.is_alive()


def test_a_follower_goes_from_generation_to_generation_and_stands_by_in_one_without_it():
    group = Group()
    first = LeaderExecutor(Told(), group.leader)
    first.launch(step(1))
    group.until(lambda: group.loaded and group.loaded[0].launched == 1)
    first.retire()
    group.announce(1, 0)
    group.until(lambda: group.follower.phase == "standing by")
    assert group.released == group.loaded[:1]
    group.announce(2, 0, 1)
    second = LeaderExecutor(Told(), group.leader)
    second.launch(step(2))
    group.until(lambda: len(group.loaded) == 2 and group.loaded[1].launched == 1)
    assert group.loaded[1].generation == 2
    # The stream of a generation begins anew, and so do the results that were collected.
    assert group.loaded[1].in_order() == [("launch", step(2))]
    assert group.follower.commands == 2
    group.end()
    assert group.error is None


def test_all_say_whom_they_reach_when_process_0_asks_and_who_is_left_out_ends_with_the_reason():
    group = Group()
    group.until(lambda: group.loaded)
    assert group.leader.links.look(Announcement(1, looks=True)) == (None, True)
    group.until(lambda: group.follower.phase == "standing by")  # it is no mesh
    group.second.links.unreached = lambda members: [0]  # process 0 hears of it by another way
    error, all_answered = group.leader.links.look(Announcement(2, looks=True))
    assert all_answered
    assert "the link between process 1 (host, pid 11) and process 0 (host, pid 10) at 127.0.0.1 is cut" in str(error)
    assert group.leader.live == group.leader.members[:1]
    ((pid, reason),) = group.leader.links.left_out.values()
    assert pid == 11  # this process is another one, so that it is not meant
    group.leader.announce(Announcement(3, [0], [0], {"mesh": "dp=1"}, left_out={1: (pid, reason)}))
    group.until(lambda: group.second.generation == 3)
    group.leader.announce(Announcement(4, [0], [0], {"mesh": "dp=1"}, left_out={1: (os.getpid(), reason)}))
    group.thread.join(60)
    assert str(group.error) == str(error)


def test_one_that_does_not_say_whom_it_reaches_may_hang_and_is_not_left_out(monkeypatch):
    group = Group()
    group.until(lambda: group.loaded)
    monkeypatch.setattr("dsjax.hosts.links._GRACE_SECONDS", -2.9)  # of the 3 s that they have to look
    group.second.links.tell = lambda number: None
    group.leader.links.unreached = lambda members: [1]
    assert group.leader.links.look(Announcement(1, looks=True)) == (None, False)
    assert len(group.leader.live) == 2
    group.leader.on_change = lambda error: None
    group.leader._lose(group.leader.members[1])  # its signs of life have ended
    assert "process 1 (host, pid 11) has gone away" in str(group.leader.lost_by(RuntimeError(), 0.1))
    group.end()


def test_a_follower_whose_step_fails_waits_for_the_next_generation_and_not_for_ever():
    group = Group()
    leader = LeaderExecutor(Told(), group.leader)
    group.until(lambda: group.loaded)

    def fail(command):
        raise RuntimeError("Gloo: connection closed by peer")

    group.loaded[0].launch = fail
    leader.launch(step(1))
    group.until(lambda: group.follower.phase == "regrouping")
    group.announce(1, 0, 1)
    group.until(lambda: len(group.loaded) == 2)
    group.loaded[1].launch = fail
    LeaderExecutor(Told(), group.leader).launch(step(2))
    group.thread.join(60)
    assert not group.thread.is_alive()
    assert str(group.error) == "Gloo: connection closed by peer"


def test_a_follower_that_waits_for_an_answer_of_a_generation_that_was_given_up_goes_on_to_the_next():
    group = Group()
    group.until(lambda: group.loaded)
    asked: list[BaseException] = []

    def ask():
        try:
            group.second.ask("loading")
        except GroupError as error:
            asked.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    group.announce(1, 0, 1)
    thread.join(60)
    assert "generation 0 was given up while process 0 (host, pid 10) was waited for" in str(asked[0])
    group.end()
