"""`HostGroup`: this process's face of a started group: who is alive, which generation it is, and what all in it agree on."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from dsjax.background import contained, start_thread
from dsjax.hosts import announcement, coordination
from dsjax.hosts.announcement import Announcement, Announcements
from dsjax.hosts.credentials import Credentials
from dsjax.hosts.gloo.collectives import Collectives
from dsjax.hosts.links import Answerer, Links
from dsjax.hosts.options import HostOptions
from dsjax.hosts.rendezvous import GroupError, JoinRequest, Rendezvous, located, meet

Result = TypeVar("Result")

_LOOK_SECONDS = 1.0
_LEAVE_SECONDS = 10.0
_GRACE_SECONDS = 5.0
_JOIN_SECONDS = 30.0
_LEAVING = "dsjax/leaving/"


class Said(msgspec.Struct, frozen=True, array_like=True):
    """What a process says to a question: a plain value, or why it cannot go on."""

    value: Any = None
    error: str | None = None


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
        excused: process 0's: processes that have asked to leave, and that no further generation counts on.
        needs_all: process 0's: whether nobody is spared any more, because the group ends when what runs is done.
        on_change: process 0's: called in another thread when a member has gone (with the error) or come back (with None).
        announcements: of generations, for every other process.
        collectives: this process's connections for them.
        links: whom of them it reaches. credentials: by which this process shows that it belongs to them.
    """

    def __init__(
        self,
        options: HostOptions,
        members: Sequence[JoinRequest],
        store: coordination.Store | None = None,
        rendezvous: Rendezvous | None = None,
        credentials: Credentials | None = None,
    ):
        self.options, self.members, self.credentials = options, list(members), credentials
        self.present = list(members)
        self.generation = 0
        self.on_change: Callable[[GroupError | None], None] | None = None
        self.lost: dict[int, GroupError] = {}
        self.excused: set[JoinRequest] = set()
        self.needs_all = False
        self.store = store or coordination.Store()
        self.announcements: Announcements | None = None
        self.collectives = Collectives()
        self.links = Links(self, self._drop)
        self._answerer: Answerer | None = None
        self._rendezvous = rendezvous
        self._unseen: set[int] = set()  # gave no sign of life when they were looked for last
        self._seen = threading.Condition()
        self._membership = threading.Lock()  # around `members`, `lost`, `excused` and the two that follow
        self._leavers: list[JoinRequest] = []  # have asked, and are not decided on
        self._ended: set[int] = (
            set()
        )  # the ids of processes that have gone or leave, and whose groups of devices are to be given up
        self._asked_lately = False
        self._coming: set[JoinRequest] = set()  # let in at the listener, and not joined yet
        self.leaving = False
        self._watching: threading.Thread | None = None
        self._alone = threading.Event()
        self._told: dict[str, int] = {}
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
        answerer = Answerer(options.address, credentials)
        rendezvous = meet(options, prepare, answerer.port, credentials)
        group = cls(options, rendezvous.members, rendezvous=rendezvous, credentials=credentials)
        group._answerer = answerer
        if rendezvous.generation > 0:
            group.links.check(rendezvous.here)
        coordination.join(options, rendezvous.service, group.collectives)
        group.generation = rendezvous.generation
        if group.is_leader:
            rendezvous.listener.watch(group._left, group._may_come)
        else:
            coordination.on_abort(group._end_on_abort)
            group.hear(max(1, rendezvous.generation))
        group._watching = start_thread("host watch", group._watch, name="dsjax-hosts", restarts=True)
        atexit.register(group.leave)
        if rendezvous.generation == 0:
            group.run("links", lambda: group.links.check([member.process_id for member in rendezvous.members]))
        return group

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
        gone = self.lost if self.is_leader else self._unseen
        return [member for member in self.members if member.process_id not in gone and member not in self.excused]

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
        self._told = {}

    def connect(self, device_ids: Sequence[int]) -> None:
        """Agree, with all processes of the generation, on where its collectives' connections will be. device_ids: of its mesh, in order."""
        endpoints = self.ask("collectives", self.collectives.endpoint)
        self.collectives.begin(self.generation, device_ids, map(_endpoint, endpoints))

    def say_prepared(self) -> None:
        """Say, as a process that comes back, that this one can be in the next generation without keeping the others waiting."""
        self.store.set(_prepared_key(self.me), b"1")

    # Leaving in order.

    @property
    def me(self) -> JoinRequest:
        """This process, as the others know it. A process id of the system would not do: in containers each process may have the same."""
        return next(member for member in self.members if member.process_id == self.options.process_id)

    def ask_to_leave(self) -> None:
        """Ask process 0 to go on without this process. The answer is a generation without it, or what `answer_to_leaver` gives."""
        self.store.set(_leaving_key(self.me), msgspec.msgpack.encode(self.me))

    def answer_to_leaver(self, seconds: float) -> str | None:
        """Wait for process 0's word: why this process cannot be spared; empty: it has no part, and may go. None where there is no word."""
        key = _answer_key(self.me)
        said = self.store.get(key, seconds)
        if said is not None:
            self.store.delete(key)
        return None if said is None else said.decode()

    @property
    def has_leavers(self) -> bool:
        """Whether a process has asked to leave, and was not decided on. Process 0 knows."""
        return bool(self._leavers)

    def take_leavers(self) -> list[JoinRequest]:
        """Process 0's: take those that have asked to leave, each once; it is `excuse` or `keep` that follows."""
        with self._membership:
            leavers, self._leavers = self._leavers, []
        return leavers

    def excuse(self, member: JoinRequest) -> None:
        """Process 0's: count on a process no more. It goes when a generation without it has begun, or now if it has no part in this one."""
        with self._membership:
            self.excused.add(member)
            self._ended.add(member.process_id)
        if member not in self.present:
            self.store.set(_answer_key(member), b"")

    def keep(self, member: JoinRequest, reason: str) -> None:
        """Process 0's: tell a process that has asked to leave why it cannot be spared."""
        self.store.set(_answer_key(member), reason.encode())

    def take_ended(self) -> set[int]:
        """Process 0's: the ids of processes that have gone or leave since this was asked last."""
        with self._membership:
            ended, self._ended = self._ended, set()
        return ended

    def _hear_leavers(self) -> None:
        """Look who has asked to leave. The engine is told when nobody has since the last time, so that many at once make one change."""
        asked = self.store.list(_LEAVING)
        for key, value in asked:
            self.store.delete(key)
            with self._membership:
                self._leavers.append(msgspec.msgpack.decode(value, type=JoinRequest))
        lately, self._asked_lately = self._asked_lately, bool(asked)
        if lately and not asked and self.on_change is not None:
            self.on_change(None)

    # Agreement.

    def run(self, stage: str, act: Callable[[], Result]) -> Result:
        """Do something that all present processes do; give its result when all have done it.

        Raises:
            GroupError: it failed elsewhere, or somebody is gone. What `act` itself raises is raised here, and told to the others.
        """
        try:
            result = act()
        except BaseException as error:
            self.tell(stage, error=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            raise
        self.ask(stage)
        return result

    def tell(self, stage: str, value: Any = None, error: str | None = None) -> None:
        """Say a plain value, or why this process cannot go on, to whoever asks for it."""
        number = self._told[stage] = self._told.get(stage, -1) + 1
        said = msgspec.msgpack.encode(Said(value, error))
        self.store.set(self.key("agree", stage, number, self.options.process_id), said)

    def ask(self, stage: str, value: Any = None) -> list[Any]:
        """Tell all present processes a plain value; give everybody's, in the order of their ids. All ask the same in the same order.

        Raises:
            GroupError: somebody says that it cannot go on, or is gone; or, not in process 0, another generation has begun.
        """
        self.tell(stage, value)
        values = []
        for member in self.present:
            said = self._hear(stage, member)
            if said.error is not None:
                raise GroupError(f"{member.name}: {said.error}")
            values.append(said.value)
        return values

    def alike(self, stage: str, what: str, value: Any) -> None:
        """Make sure that all have the same value of `what`.

        Raises:
            GroupError: one has another.
        """
        values = self.ask(stage, value)
        for member, members_value in zip(self.present, values, strict=True):
            if members_value != values[0]:
                raise GroupError(
                    f"{member.name} has {what} {members_value}, process 0 has {values[0]}; install all hosts alike"
                )

    def loss_of(self, member: JoinRequest) -> GroupError | None:
        """Why nothing more is to be expected of a member; None: it is not known to be gone. Another one may have its id by now."""
        with self._membership:
            error = self.lost.get(member.process_id)
            return error or (None if member in self.members else GroupError(gone(member)))

    def give_up(self, process_id: int, error: GroupError) -> None:
        """Process 0's: go on without a process that lives."""
        with self._membership:
            self.lost[process_id] = error
            self._ended.add(process_id)

    def check(self, failure: BaseException | None = None) -> None:
        """Raise the `GroupError` of a member of this generation that is gone. failure: what has come of that."""
        for member in self.present:
            error = self.loss_of(member)
            if error is not None:
                raise error from failure

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
            if self._answerer is not None:
                self._answerer.close()
        except Exception as error:  # at the end of a process nothing else is to be done about it
            print(f"dsjax: {error}", file=sys.stderr)

    def _hear(self, stage: str, member: JoinRequest) -> Said:
        key, generation = self.key("agree", stage, self._told[stage], member.process_id), self.generation
        while True:
            value = self.store.get(key, _LOOK_SECONDS)
            if value is not None:
                return msgspec.msgpack.decode(value, type=Said)
            self.check()
            if 0 in self.lost:
                raise self.lost[0]
            if self.announcements is not None and self.announcements.latest > generation:
                raise GroupError(f"generation {generation} was given up while {member.name} was waited for")

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
            with self._seen:
                self._unseen = set(ids) - alive
                self._seen.notify_all()
            if not self.leaving:
                self._look(alive)
            elif not self.is_leader or self._alone.is_set():
                return
            time.sleep(0.05 if self.leaving else min(_LOOK_SECONDS, self.options.heartbeat_timeout / 4))

    def _look(self, alive: set[int]) -> None:
        if not self.is_leader:
            return  # process 0 says who is to go on
        with self._seen:
            coming = {request.process_id for request in self._coming}  # let in, and not alive before it has joined
        for member in list(self.members):
            if member.process_id not in alive:
                if member.process_id not in coming:
                    self._drop(member.process_id)
                self._lose(member)
        self._hear_leavers()

    def _left(self, member: JoinRequest) -> None:
        """A member's connection has ended, in a thread of the listener."""
        with self._seen:
            self._coming.discard(member)
            self._seen.notify_all()
        if not self.leaving:
            self._lose(member)

    def _may_come(self, request: JoinRequest) -> int | None:
        """Wait until the coordination service has forgotten the process that had this id; then it may be joined."""
        with self._seen:
            self._coming.add(request)
            self._seen.wait_for(lambda: request.process_id in self._unseen or self.leaving)
        if self.leaving:
            return None
        refuse = lambda error: self._refuse(request)  # noqa: E731
        start_thread("welcome", self._welcome, request, name="dsjax-welcome", on_failure=refuse)
        return self.generation + 1

    def _refuse(self, request: JoinRequest) -> None:
        """Have a process that could not be welcomed come again, and let those that come with it go on."""
        with self._seen:
            self._coming.discard(request)
            self._seen.notify_all()
            others = bool(self._coming)
        self._drop(request.process_id)
        if self.on_change is not None and not self.leaving and not others:
            self.on_change(None)

    def _welcome(self, request: JoinRequest) -> None:
        """Wait until a process that comes back has joined, and has its programs. The mesh changes once for several that come together."""
        patience = 2 * self.options.heartbeat_timeout + _JOIN_SECONDS
        with self._seen:
            joined = self._seen.wait_for(
                lambda: request.process_id not in self._unseen or self.leaving or request not in self._coming,
                timeout=patience,
            )
            joined = joined and request in self._coming
        joined = joined and self._is_prepared(request)
        with self._seen:
            self._coming.discard(request)
            if joined and not self.leaving:
                with self._membership:
                    self.members = [
                        request if member.process_id == request.process_id else member for member in self.members
                    ]
                    self.lost.pop(request.process_id, None)
                    self.excused = {each for each in self.excused if each.process_id != request.process_id} | (
                        self.excused & {request}
                    )
                    self.links.left_out.pop(request.process_id, None)
            others = bool(self._coming)
        if self.on_change is not None and not self.leaving and not others:
            self.on_change(None)

    def _is_prepared(self, request: JoinRequest) -> bool:
        """Wait until a process that has joined says so, for as long as it lives: compilation may take its time. False: it is gone again."""
        key = _prepared_key(request)
        while not self.leaving and request.process_id not in self._unseen:
            try:
                if self.store.get(key, _LOOK_SECONDS) is not None:
                    self.store.delete(key)
                    return self._rendezvous.listener.has(request)
            except ConnectionError:
                return False
            if not self._rendezvous.listener.has(request):
                return False
        return False

    def _drop(self, process_id: int) -> None:
        if self._rendezvous is not None:
            self._rendezvous.listener.drop(process_id)

    def _lose(self, member: JoinRequest) -> None:
        with self._membership:  # the listener's thread and the one that watches may see it in the same moment
            if member.process_id in self.lost or member not in self.members:
                return  # it is known; or it is of a process in whose place another one is by now
            error = self.lost[member.process_id] = GroupError(gone(member))
            self._ended.add(member.process_id)
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


def _leaving_key(member: JoinRequest) -> str:
    return f"{_LEAVING}{_identity(member)}"


def _answer_key(member: JoinRequest) -> str:
    return f"dsjax/leaving-answers/{_identity(member)}"


def _prepared_key(member: JoinRequest) -> str:
    return f"dsjax/prepared/{_identity(member)}"


def _identity(member: JoinRequest) -> str:
    """What tells a process from another one under its id. In containers both may have the same pid, and the port is whatever was free."""
    return f"{member.process_id}/{member.pid}/{member.port}"


def gone(member: JoinRequest) -> str:
    """What is said of a member that died or hangs."""
    if member.process_id == 0:
        return f"{member.name} has gone away, and with it the group; start all processes again"
    return f"{member.name} has gone away; its own messages say why"
