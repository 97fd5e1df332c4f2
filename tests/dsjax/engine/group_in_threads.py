"""A group of processes that are threads, over real connections and without JAX: executors that remember what they were told."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from processes import free_port
from waits import until

from dsjax.engine.contract.commands import RankStep, Step
from dsjax.engine.elastic.follower import Follower
from dsjax.engine.stream.leader import LeaderExecutor
from dsjax.hosts import HostOptions, coordination
from dsjax.hosts.group import HostGroup
from dsjax.hosts.rendezvous import Door, join_leader, open_endpoint
from dsjax.hosts.wire import Announcement
from dsjax.messaging.broadcast import BroadcastLog


def options_of(count: int, heartbeat: int = 240, start: int = 60) -> list[HostOptions]:
    port = free_port()
    return [HostOptions(("127.0.0.1", port), count, index, "127.0.0.1", start, heartbeat) for index in range(count)]


def enter(options: HostOptions, prepare=dict) -> HostGroup:
    """Be a process of a group, without JAX; it ends no process where it loses process 0."""
    endpoint = open_endpoint(options)
    try:
        if options.is_leader:
            log = BroadcastLog(endpoint)
            door = Door(options, endpoint, log.address)
            with mock.patch.object(coordination, "start_service", return_value=(None, "127.0.0.1:1")):
                response = door.meet(prepare)
            group = HostGroup(options, response, endpoint, door=door, log=log)
        else:
            response, leader = join_leader(options, endpoint, prepare)
            group = HostGroup(options, response, endpoint, leader=leader)
    except BaseException:
        endpoint.close(linger=1.0)
        raise
    group._end_process = lambda error: None
    opened.append(group)
    return group


opened: list[HostGroup] = []


def close_groups() -> None:
    while opened:
        group = opened.pop()
        group.leaving = True
        group.links.close()
        group.endpoint.close()


def groups(count: int, heartbeat: int = 240, start: int = 60) -> list[HostGroup]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(enter, options_of(count, heartbeat, start)))


class Pending:
    def __init__(self, number: int, command):
        self.number, self.command = number, command


class Told:
    """An executor that remembers what it was told. wait: with emulated devices the next command starts then."""

    def __init__(self, max_in_flight: int = 1):
        self.max_in_flight, self.events, self.fails_at = max_in_flight, [], None
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

    def warm_up(self, progress=None, lazily=False):
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
    """Two groups, and what the second one's process does, in a thread."""

    def __init__(self):
        self.error = None
        self.groups = groups(2)
        self.follower = Follower(self.groups[1])
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self):
        try:
            self.follow()
        except BaseException as error:
            self.error = error
        finally:
            self.groups[1].leave()

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive()


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
        until(lambda: self.told.launched >= count)


class Group(Following):
    """Process 1 of a group that it follows through generations, in a thread; process 0 is the test."""

    def __init__(self, regroups: bool = True):
        super().__init__()
        self.follower.regroups = regroups
        self.loaded, self.released, self.dropped = [], [], []
        self.leader, self.second = self.groups
        self.thread.start()

    def _load(self, announcement):
        executor = Told()
        executor.generation = 0 if announcement is None else announcement.number
        self.loaded.append(executor)
        return executor

    def _release(self, executor):
        if executor is None:
            self.dropped.append(self.second.epoch)
        else:
            self.released.append(executor)

    def follow(self):
        self.follower.run(self._load, self._release, seconds=1.0)

    def announce(self, number: int, *process_ids: int):
        self.leader.announce(Announcement(number, list(process_ids), [0], {"mesh": "dp=1"}, "dp=1", "a test"))

    def end(self):
        self.leader.leave()
        self.join()
