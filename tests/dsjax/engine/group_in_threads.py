"""A group of two processes as two threads, over a store in memory: executors that remember what they were told."""

import threading
import time

from dsjax.engine.contract.commands import RankStep, Step
from dsjax.engine.elastic.follower import Follower
from dsjax.engine.stream.leader import LeaderExecutor
from dsjax.hosts import HostOptions
from dsjax.hosts.announcement import Announcement
from dsjax.hosts.group import HostGroup
from dsjax.hosts.rendezvous import JoinRequest


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

    def list(self, folder: str) -> list[tuple[str, bytes]]:
        with self._changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

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
        self.recording = on

    def expert_counts(self):
        self.events.append(("read record",))

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


class Following:
    """Two groups over one store, and what the second one's process does, in a thread."""

    def __init__(self):
        self.store, self.error = MemoryStore(), None
        members = [JoinRequest(index, 2, "host", 10 + index, "127.0.0.1", "m") for index in (0, 1)]
        self.groups = [
            HostGroup(HostOptions(("127.0.0.1", 1), 2, index, "127.0.0.1", 1, 1), members, self.store)
            for index in (0, 1)
        ]
        self.follower = Follower(self.groups[1])
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self):
        try:
            self.follow()
        except BaseException as error:
            self.error = error

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive()

    def until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)


class Pair(Following):
    """Process 0 and process 1, the latter's loop in a thread."""

    def __init__(self, **options):
        super().__init__()
        self.inner, self.told = Told(), Told(**options)
        self.leader = LeaderExecutor(self.inner, self.groups[0])
        self.thread.start()

    def follow(self):
        self.follower.follow(self.told)

    def take_part(self, count: int):
        """Wait until the follower has launched so many commands: on devices a step's result would not be there before."""
        self.until(lambda: self.told.launched >= count)


class Group(Following):
    """Process 1 of a group that it follows through generations, in a thread; process 0 is the test."""

    def __init__(self, **options):
        super().__init__()
        self.options, self.loaded, self.released = options, [], []
        self.leader, self.second = self.groups
        self.leader._alone.set()
        self.second.hear(1)
        self.thread.start()

    def _load(self, announcement):
        executor = Told()
        executor.generation = 0 if announcement is None else announcement.number
        self.loaded.append(executor)
        return executor

    def follow(self):
        self.follower.run(self._load, self.released.append, seconds=1.0, **self.options)

    def announce(self, number: int, *process_ids: int):
        self.leader.announce(Announcement(number, list(process_ids), [0], {"mesh": "dp=1"}, "a test"))

    def end(self):
        self.leader.leave()
        self.join()
