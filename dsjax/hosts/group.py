"""`HostGroup`: this process's face of a started group: who is alive, and which generation it is."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dsjax.background import contained, start_thread
from dsjax.hosts import announcement, coordination
from dsjax.hosts.agreement import Agreement
from dsjax.hosts.announcement import Announcement, Announcements
from dsjax.hosts.comers import Comers
from dsjax.hosts.gloo.collectives import Collectives
from dsjax.hosts.leavers import Leavers
from dsjax.hosts.link_monitor import LinkMonitor
from dsjax.hosts.links import Links
from dsjax.hosts.options import HostOptions
from dsjax.hosts.rendezvous import GroupError, JoinRequest, Rendezvous, located, meet
from dsjax.messaging import Credentials, Endpoint

_LOOK_SECONDS = 1.0
_LEAVE_SECONDS = 10.0
_GRACE_SECONDS = 5.0


class HostGroup:
    """A group whose processes are all there. `start` forms it; `leave` must be called, or happens when Python ends.

    Process 0 sees a process go when its connection ends, or when it has given no sign of life for the heartbeat's timeout, whether it died
    or hangs. Compiling, loading or a long step never counts: signs of life come from threads of their own. What is to be done
    then is decided by process 0 alone, which announces a new generation; the others wait for that. Where process 0 goes, all end.

    Attributes:
        members: all processes, in the order of their ids, as they came last.
        present: those of the generation of now.
        generation: keys in the store begin with it. It changes when the mesh does.
        lost: members that are gone, with what is said of them.
        membership: the lock around `members`, `lost`, `ended` and who is excused. ended: ids of processes that have gone or leave, and
            whose groups of devices are to be given up.
        agreement: what all in it say. leavers: who has asked to go. comers: who comes back.
        seen: notified when it was looked who lives. unseen: ids of those that gave no sign of life when they were looked for last.
        on_change: process 0's: called in another thread when a member has gone (with the error) or come back (with None).
        announcements: of generations, for every other process.
        collectives: this process's connections for them.
        links: whom of them it reaches. monitor: how its links to them are; None where nobody looks.
        credentials: by which this process shows that it belongs to them. endpoint: its control connections.
    """

    def __init__(
        self,
        options: HostOptions,
        members: Sequence[JoinRequest],
        store: coordination.Store | None = None,
        rendezvous: Rendezvous | None = None,
        credentials: Credentials | None = None,
        endpoint: Endpoint | None = None,
    ):
        self.endpoint = endpoint
        self.options, self.members, self.credentials = options, list(members), credentials
        self.present = list(members)
        self.generation = 0
        self.on_change: Callable[[GroupError | None], None] | None = None
        self.lost: dict[int, GroupError] = {}
        self.agreement, self.leavers, self.comers = Agreement(self), Leavers(self), Comers(self)
        self.store = store or coordination.Store()
        self.announcements: Announcements | None = None
        self.collectives = Collectives()
        self.links = Links(self, self.drop)
        self.monitor: LinkMonitor | None = None
        self._rendezvous = rendezvous
        self.unseen: set[int] = set()
        self.seen = threading.Condition()
        self.membership = threading.Lock()
        self.ended: set[int] = set()
        self.leaving = False
        self._watching: threading.Thread | None = None
        self._alone = threading.Event()
        self._end: Callable[[str | None], None] | None = None

    @classmethod
    def start(cls, options: HostOptions, prepare: Callable[[], Mapping[str, Any]]) -> HostGroup:
        """Meet the others and join them; see `meet`. JAX must not have started, and starts with all devices of the group.

        Where the group has formed already, and this process's id is that of one that is gone, `generation` is the first one that this
        process may be in: it waits for its announcement.

        Raises:
            GroupError, UserError: there is no group, as `meet` says; or a link between two of its processes is cut.
        """
        options = located(options)
        credentials = options.read_credentials()
        with contextlib.ExitStack() as opened:  # a start that fails leaves no port open
            endpoint = Endpoint(options.address, credentials, silence=options.heartbeat_timeout)
            opened.callback(endpoint.close)
            rendezvous = meet(options, prepare, endpoint.port, credentials)
            opened.callback(rendezvous.close)
            group = cls(
                options, rendezvous.members, rendezvous=rendezvous, credentials=credentials, endpoint=endpoint
            )
            group._join()
            opened.pop_all()
        return group

    def _join(self) -> None:
        """Start JAX with the devices of the group, and watch the others."""
        options, rendezvous = self.options, self._rendezvous
        if rendezvous.generation > 0:
            self.links.check(rendezvous.here)
        coordination.join(options, rendezvous.service, self.collectives)
        self.generation = rendezvous.generation
        if self.is_leader:
            rendezvous.listener.watch(self._left, self.comers.let_in)
        else:
            coordination.on_abort(self._end_on_abort)
            self.hear(max(1, rendezvous.generation))
        self._watching = start_thread("host watch", self._watch, name="dsjax-hosts", restarts=True)
        if options.link_monitor_interval:
            self.monitor = LinkMonitor(self, options.link_monitor_interval)
            self.monitor.start()
        atexit.register(self.leave)
        if rendezvous.generation == 0:
            self.agreement.run("links", lambda: self.links.check([one.process_id for one in rendezvous.members]))

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0."""
        return self.options.is_leader

    @property
    def is_present(self) -> bool:
        """Whether this process has a part in the generation of now."""
        return any(member.process_id == self.options.process_id for member in self.present)

    @property
    def live(self) -> list[JoinRequest]:
        """Who can be in the next generation; outside process 0, who seems to be able to."""
        gone = self.lost if self.is_leader else self.unseen
        return [
            member for member in self.members if member.process_id not in gone and member not in self.leavers.excused
        ]

    @property
    def live_ids(self) -> list[int]:
        """The ids of `live`."""
        return [member.process_id for member in self.live]

    @property
    def reachable_ids(self) -> list[int]:
        """Process 0's: the ids of members that are not known to be gone, also of those that are about to leave."""
        return [member.process_id for member in self.members if member.process_id not in self.lost]

    @property
    def wanted(self) -> str:
        """The mesh that was asked for last, for a process that came back; empty: that of the start."""
        return self._rendezvous.wanted if self._rendezvous is not None else ""

    @property
    def me(self) -> JoinRequest:
        """This process, as the others know it. A process id of the system would not do: in containers each process may have the same."""
        return next(member for member in self.members if member.process_id == self.options.process_id)

    def key(self, *parts: object) -> str:
        """A key of the generation of now."""
        return "/".join(["dsjax", str(self.generation), *map(str, parts)])

    # Generations.

    def announce(self, news: Announcement) -> None:
        """Process 0's: begin a generation, and tell all others."""
        if self._rendezvous is not None:
            self._rendezvous.listener.wanted = news.wanted
        self.enter(news)
        news = msgspec.structs.replace(news, members=self.members)
        self.store.set(announcement.key(news.number), msgspec.msgpack.encode(news))

    def hear(self, first: int) -> None:
        """Begin to listen for announcements, from this generation's on."""
        self.announcements = Announcements(self, first)

    def enter(self, news: Announcement) -> None:
        """Be in a generation: its questions and its stream are new."""
        self.generation = news.number
        self.present = [member for member in self.members if member.process_id in news.process_ids]
        self.agreement.begin()

    def connect(self, device_ids: Sequence[int]) -> None:
        """Agree, with all processes of the generation, on where its collectives' connections will be. device_ids: of its mesh, in order."""
        endpoints = self.agreement.ask("collectives", self.collectives.endpoint)
        self.collectives.begin(self.generation, device_ids, map(_endpoint, endpoints))

    # Who is lost.

    def take_ended(self) -> set[int]:
        """Process 0's: the ids of processes that have gone or leave since this was asked last."""
        with self.membership:
            ended, self.ended = self.ended, set()
        return ended

    def loss_of(self, member: JoinRequest) -> GroupError | None:
        """Why nothing more is to be expected of a member; None: it is not known to be gone. Another one may have its id by now."""
        with self.membership:
            error = self.lost.get(member.process_id)
            return error or (None if member in self.members else GroupError(gone(member)))

    def give_up(self, process_id: int, error: GroupError) -> None:
        """Process 0's: go on without a process that lives."""
        with self.membership:
            self.lost[process_id] = error
            self.ended.add(process_id)

    def check(self, failure: BaseException | None = None) -> None:
        """Raise the `GroupError` of a member of this generation that is gone. failure: what has come of that."""
        for member in self.present:
            error = self.loss_of(member)
            if error is not None:
                raise error from failure

    def check_generation(self, number: int, doing: str) -> None:
        """Raise where a generation has failed or has been superseded. doing: what is given up then, for the message.

        Raises:
            GroupError: one of its processes is gone, process 0 has ended the group, or another generation has begun.
        """
        self.check()
        if 0 in self.lost:
            raise self.lost[0]
        news = self.announcements
        if news is not None and news.why_ended is not None:
            raise GroupError(f"process 0 has ended the group: {news.why_ended}; its own messages say more")
        if (news is not None and news.latest > number) or self.generation != number:
            raise GroupError(f"generation {number} was given up while {doing}")

    def lost_by(self, error: BaseException, seconds: float | None = None) -> GroupError | None:
        """The member that is gone where that may be why something failed; None: nobody is. seconds: to wait for that; None: until it
        would be known of one that hangs.
        """
        if self.leaving:
            return None
        seconds = self.options.heartbeat_timeout + 2 * _LOOK_SECONDS if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self.check()
            except GroupError as error:
                return error
            time.sleep(0.05)
        return None

    def replace(self, member: JoinRequest) -> None:
        """Process 0's: count on a process that has come back in the place of the one that had its id."""
        with self.membership:
            self.members = [member if each.process_id == member.process_id else each for each in self.members]
            self.lost.pop(member.process_id, None)
            self.leavers.welcome(member)
            self.links.left_out.pop(member.process_id, None)

    def is_connected(self, member: JoinRequest) -> bool:
        """Process 0's: whether a process's connection to the listener has not ended."""
        return self._rendezvous.listener.has(member)

    def drop(self, process_id: int) -> None:
        """Process 0's: end a process's connection to the listener."""
        if self._rendezvous is not None:
            self._rendezvous.listener.drop(process_id)

    # The end.

    def at_end(self, tell: Callable[[str | None], None]) -> None:
        """Have `tell(reason)` called when the leader leaves; None: as it should be. It takes the place of what was to be called before."""
        self._end = tell

    def leave(self, reason: str | None = None) -> None:
        """Leave the group; the leader tells the others, and waits until they have gone. reason: why it ends, where that is a fault."""
        if self.leaving:
            return
        self.leaving = True
        try:
            if self.is_leader:
                if self._end is not None:
                    self._end(reason)
                last = Announcement(self.generation + 1, reason=reason or "", ended=True)
                self.store.set(announcement.key(last.number), msgspec.msgpack.encode(last))
                if len(self.reachable_ids) > 1:
                    self._alone.clear()  # what was seen before may be old
                    self._alone.wait(_LEAVE_SECONDS)
            else:
                # A thread that waits in C++ when Python ends is ended by force there, which aborts the process.
                if self.announcements is not None:
                    self.announcements.close(_LEAVE_SECONDS)
                if self._watching is not None:
                    self._watching.join(_LEAVE_SECONDS)
            coordination.leave()
            if self._rendezvous is not None:
                self._rendezvous.close()
            if self.monitor is not None:
                self.monitor.close()
            if self.endpoint is not None:
                self.endpoint.close()
        except Exception as error:  # at the end of a process nothing else is to be done about it
            print(f"dsjax: {error}", file=sys.stderr)

    # Who is there.

    def _watch(self) -> None:
        ids = [member.process_id for member in self.members]
        while True:
            try:
                alive = coordination.live(ids)
            except ConnectionError:
                if not self.leaving:
                    self._lose(self.members[0])
                return
            if alive == {self.options.process_id}:
                self._alone.set()
            with self.seen:
                self.unseen = set(ids) - alive
                self.seen.notify_all()
            if not self.leaving:
                self._look(alive)
            elif not self.is_leader or self._alone.is_set():
                return
            time.sleep(0.05 if self.leaving else min(_LOOK_SECONDS, self.options.heartbeat_timeout / 4))

    def _look(self, alive: set[int]) -> None:
        if not self.is_leader:
            return  # process 0 says who is to go on
        coming = self.comers.ids
        for member in list(self.members):
            if member.process_id not in alive:
                if member.process_id not in coming:
                    self.drop(member.process_id)
                self._lose(member)
        self.leavers.hear()

    def _left(self, member: JoinRequest) -> None:
        """A member's connection has ended, in a thread of the listener."""
        self.comers.forget(member)
        if not self.leaving:
            self._lose(member)

    def _lose(self, member: JoinRequest) -> None:
        with self.membership:  # the listener's thread and the one that watches may see it in the same moment
            if member.process_id in self.lost or member not in self.members:
                return  # it is known; or it is of a process in whose place another one is by now
            error = self.lost[member.process_id] = GroupError(gone(member))
            self.ended.add(member.process_id)
        if any(each.process_id == member.process_id for each in self.present):
            # Its thread may wait for that process in one, or for another that does.
            with contained("host watch", "A collective without that process is waited for until its own limit."):
                self.collectives.cut(self.generation)
        if self.on_change is not None:
            self.on_change(error)
            return
        # Nothing goes on without that member, and a thread of this process may wait for it in a collective for ever.
        time.sleep(_GRACE_SECONDS)  # whoever waits in Python raises it
        if not self.leaving:
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _end_on_abort(self) -> None:
        """The last words of a follower that C++ code aborts; Python gets no further chance."""
        text = f"process {self.options.process_id} was aborted; the message above says why"
        try:
            socket.create_connection(self.options.coordinator, timeout=1.0).close()
        except OSError:
            text = gone(self.members[0])
        os.write(2, f"\nerror: {text}\n".encode())
        os._exit(1)


def _endpoint(said: Any) -> tuple[str, int] | None:
    return None if said is None else (said[0], said[1])


def gone(member: JoinRequest) -> str:
    """What is said of a member that died or hangs."""
    if member.process_id == 0:
        return f"{member.name} has gone away, and with it the group; start all processes again"
    return f"{member.name} has gone away; its own messages say why"
