"""`Follower`: what every process but the first does in a group: carry out the leader's commands, in its order, until it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from dsjax.background import start_thread
from dsjax.engine.contract.executor import Executor
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.stream.leader import LaunchMessage, Message, ReadRecord, Record, WarmUp, decode, is_collected
from dsjax.hosts.group import GroupError, Heard, HostGroup
from dsjax.hosts.wire import Announcement
from dsjax.messaging import PeerLostError, RefusedError

if TYPE_CHECKING:  # it brings JAX in
    from dsjax.engine.elastic.compile_ahead import CompileAhead

_END_SECONDS = 10.0
_REGROUP_SECONDS = 60.0
"""How long a process that failed in a step waits for a next generation, beside twice the heartbeat's timeout."""

_log = logging.getLogger(__name__)


class _OverError(Exception):
    """Raised in a warm-up: the leader has ended, or another generation has begun."""


class Follower:
    """An executor that does what the leader's does.

    Attributes:
        phase: what it is doing, as `/ready` has it; `ready` once programs are compiled, `standing by` without a part in the mesh.
        executor: of the generation of now; None between two, and without a part in the mesh. ahead: compiles for meshes that may come.
        has_served: whether it has been ready once. left: whether it has left the group in order, and the others go on.
        regroups: whether the group can go on without a process of it: then this one may leave, and go on after a failure.
        commands, steps: that it has carried out, and collected, in all generations.
    """

    def __init__(self, group: HostGroup):
        self.group = group
        self.phase = "loading"
        self.executor: Executor | None = None
        self.has_served = self.left = False
        self.commands = self.steps = 0
        self.reason: str | None = None
        self.ahead: CompileAhead | None = None
        self._on_warm: Callable[[], None] = lambda: None
        self._over, self._leaves = threading.Event(), threading.Event()
        self._signals, self.regroups = 0, True
        group.on_end = self._watch_end

    def leave(self) -> None:
        """Ask process 0 to go on without this process, and wait until it does, or says that it cannot. `run` returns then."""
        if self._leaves.is_set():
            return
        self._leaves.set()
        _log.info("This process leaves: process 0 is asked to go on without it. A second signal ends it now.")
        try:
            if self.group.ask_process_0_to_leave():
                self.left = True
                self.group.end_here()
        except RefusedError as error:
            self._leaves.clear()
            _log.warning("This process cannot be spared, and goes on: %s. A second signal ends it now.", error)
        except PeerLostError:
            return  # the group knows, and ends the process

    def handle_signals(self) -> None:
        """Leave the group in order at SIGTERM or SIGINT, and end at once at a second one; in Python's main thread alone.

        With stages no process can leave: it goes on until process 0, which finishes its requests, ends or is lost.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Have a thread ask process 0, and wait for its answer."""
        self._signals += 1
        if self._signals > 1:
            os._exit(1)
        name, comes_back = signal.Signals(number).name, self.group.generation > 0
        if self.phase == "compiling ahead" or not (self.has_served or comes_back):
            # Nobody counts on it yet; or the group has not served, and can form no other mesh.
            os.write(2, f"{name} while {self.phase}: this process ends now\n".encode())
            os._exit(0)
        if self.regroups:  # where it cannot ask, it ends at once: the others go on as after a loss
            start_thread("leave", self.leave, name="dsjax-leave", on_failure=lambda error: os._exit(1))
        else:
            why = "the others need this process's stages, so that it goes on until process 0 ends; a second signal ends it now"
            os.write(2, f"{name}: {why}\n".encode())

    def run_with(self, args: EngineArgs) -> None:
        """Follow all generations of an engine that was started with these options, as `run` does. To be called in the main thread."""
        from dsjax.checkpoint.held_weights import HeldWeights
        from dsjax.engine.elastic.compile_ahead import CompileAhead
        from dsjax.engine.elastic.generations import load_generation, release
        from dsjax.engine.program_cache.library import ProgramLibrary
        from dsjax.engine.setup.loading import load_model
        from sharding.mesh import MeshSpec

        chunks = None
        if args.is_side:
            from dsjax.engine.elastic.transfer_processes import FollowerTransfers

            chunks = FollowerTransfers(args, self.group)
        has_stages = MeshSpec.parse(args.mesh).pp_size > 1
        self.regroups = not has_stages  # no group goes on without one of its stages
        self.handle_signals()
        library = ProgramLibrary()
        self.ahead = ahead = CompileAhead(args, library)
        held = HeldWeights()

        def load(announcement: Announcement | None) -> Executor:
            if has_stages:  # there is no other generation
                return load_model(args, self.group, library=library).executor
            if announcement is None:
                loaded = load_model(args, self.group, library=library, held=held)
            else:
                loaded = load_generation(args, announcement, self.group, library, held)
            if chunks is not None:
                chunks.join(loaded)
            wanted = announcement.wanted if announcement else args.mesh
            spec, wanted = MeshSpec.parse(loaded.facts.mesh), MeshSpec.parse(wanted)
            self._on_warm = lambda: ahead.begin(spec, wanted, self.group.live_ids, loaded.facts.weights)
            return loaded.executor

        if self.group.generation > 0:
            # It comes back. The others, who go on meanwhile, are not to wait for its compiler.
            self.phase = "compiling ahead"
            ahead.prepare(MeshSpec.parse(self.group.wanted or args.mesh), "this process takes part again")
            self.phase = "standing by"

        def give_back(executor: Executor | None) -> None:
            if executor is None:
                held.clear()
            release(executor, held)

        self.run(load, give_back)

    def run(
        self,
        load: Callable[[Announcement | None], Executor],
        release: Callable[[Executor | None], None],
        seconds: float | None = None,
    ) -> None:
        """Follow generation after generation, until the leader ends or is lost. The process must end soon after.

        load: gives the executor of a generation; None: of the first one. release: gives back what an executor holds; None: the weights that
        are held. seconds: to wait for the next generation after a failure.

        Raises:
            GroupError: it did not end as it should. Other errors: this process's own, with which it leaves the group.
        """
        announcement = None
        if self.group.generation > 0:
            self.group.say_ready()
            announcement = self.group.next_announcement()
        while announcement is None or not announcement.ended:
            executor, failure = None, None
            try:
                if announcement is not None:
                    self.group.begin(announcement)
                if self.group.is_present:
                    self.phase = "loading"
                    executor = self.executor = load(announcement)
                    if self.follow(executor):
                        return
                else:
                    self.phase = "standing by"
                    release(None)
                    if self._leaves.is_set():
                        self.left = True
                        self._finish()
                        return
            except (RuntimeError, GroupError) as error:  # a collective, or an agreement, that lost its other side
                if executor is not None:  # others may wait for this process, which lives, in a collective or at a layer
                    self.group.collectives.cut(self.group.generation)
                unformed = announcement is None and isinstance(error, GroupError)
                if unformed or not self.regroups:
                    raise
                failure = error
            self.executor = None
            if executor is not None or failure is not None:
                self.phase = "regrouping"
            if failure is not None:
                _log.warning("Process 0 is waited for, as this generation has failed here: %s", failure)
                seconds = seconds or 2 * self.group.options.heartbeat_timeout + _REGROUP_SECONDS
            following = self.group.next_announcement(None if failure is None else seconds)
            if self.ahead is not None:
                self.ahead.stop()
            if following is None:
                raise failure
            if executor is not None:
                release(executor)
            announcement = following
            reason = self.group.links.why_left_out(announcement)
            if reason is not None:
                raise GroupError(reason)
        self.reason = announcement.reason or None
        self._finish()

    def follow(self, executor: Executor) -> bool:
        """Carry out messages of one generation, until the leader ends (True, or a `GroupError`) or announces another one (False)."""
        self.phase = "warming up"
        if not _Work(self, executor, self.group.commands(self.group.generation)).carry_out_all():
            return False
        self.phase = "shutting down"
        executor.shutdown()
        self._finish()
        return True

    def _finish(self) -> None:
        self._over.set()
        if self.ahead is not None:
            self.ahead.close()
        if self.reason is not None:
            raise GroupError(f"process 0 has ended the group: {self.reason}")

    def _watch_end(self) -> None:
        """Process 0 has ended: where it did in the middle of a step, this process may wait for it in a collective for ever."""

        def give_up() -> None:
            if not self._over.is_set():
                _log.warning("Process 0 has ended, and left a step behind that cannot end; this process ends now.")
                os._exit(0 if self.reason is None else 1)

        end = threading.Timer(_END_SECONDS, give_up)
        end.daemon = True
        end.start()


class _Work:
    """What one generation's executor is told, and has under way."""

    def __init__(self, follower: Follower, executor: Executor, inbox: queue.SimpleQueue[Heard]):
        self._follower, self._executor, self._inbox = follower, executor, inbox
        self._collected = 0
        self._under_way: deque[Any] = deque()  # launched, and not collected yet
        self._running: deque[Any] = deque()  # of those, what has not been waited for

    def carry_out_all(self) -> bool:
        """Carry out messages as they come; whether the leader has ended, and not the generation."""
        executor, follower = self._executor, self._follower
        while True:
            heard = self._inbox.get()
            if isinstance(heard, Announcement) and heard.ended:
                follower.reason = heard.reason or None
                return True
            if follower.group.is_superseded:
                if follower._leaves.is_set():  # others may still receive from this process's programs
                    with contextlib.suppress(RuntimeError):  # the generation has broken
                        while self._running:
                            executor.wait(self._running.popleft())
                return False  # what is left can never be done, or is done: the leader has waited for it
            self._carry_out(decode(heard))
            if executor.max_in_flight > 1:
                continue
            # A program starts when the one before it has been waited for. The next command's inputs are laid out meanwhile if it is here.
            while self._running and (self._inbox.empty() or len(self._running) > 1):
                executor.wait(self._running.popleft())

    def _carry_out(self, message: Message) -> None:
        executor, follower = self._executor, self._follower
        if isinstance(message, WarmUp):
            self._warm_up()
        elif isinstance(message, Record):
            executor.set_recording(message.on)
        elif isinstance(message, ReadRecord):
            self._collect_until(message.collected)
            executor.expert_counts()
        elif isinstance(message, LaunchMessage):
            follower.phase, follower.has_served = "ready", True
            self._collect_until(message.collected)
            pending = executor.launch(message.command)
            follower.commands += 1
            if is_collected(message.command):
                self._under_way.append(pending)
                if executor.max_in_flight == 1:
                    self._running.append(pending)

    def _collect_until(self, collected: int) -> None:
        """Collect results until there are so many since the start, as the leader has."""
        while self._collected < collected:
            self._executor.collect(self._under_way.popleft())
            self._collected += 1
            self._follower.steps += 1

    def _warm_up(self) -> None:
        group = self._follower.group

        def check_going_on(done: int, total: int, label: str) -> None:
            if group.is_superseded or group.has_ended:
                raise _OverError

        try:
            self._executor.warm_up(check_going_on)
        except _OverError:
            return
        except BaseException as error:
            group.agreement.tell("warm-up", error=f"{type(error).__name__}: {error}")
            raise
        group.agreement.tell("warm-up")
        self._follower.phase, self._follower.has_served = "ready", True
        self._follower._on_warm()
