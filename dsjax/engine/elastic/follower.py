"""`Follower`: executes the leader's commands in order, in every process of a group except the first, until the leader ends."""

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
from dsjax.hosts.group import EpochMessage, GroupError, HostGroup
from dsjax.hosts.wire import Announcement
from dsjax.messaging import PeerLostError, RefusedError

if TYPE_CHECKING:  # imports JAX
    from dsjax.engine.elastic.compile_ahead import CompileAhead

_END_SECONDS = 10.0
_REGROUP_SECONDS = 60.0
"""How long a process waits for the next mesh epoch after a failed step, in addition to twice the heartbeat timeout."""

_log = logging.getLogger(__name__)


class _OverError(Exception):
    """Raised during warm-up if the leader has ended or another mesh epoch has begun."""


class Follower:
    """Runs an executor in step with the leader's.

    Attributes:
        phase: current activity, as shown by `/ready`: `ready` once programs are compiled, `standing by` if not part of the mesh.
        executor: executor of the current mesh epoch; None between epochs and while standing by. ahead: compiles for possible next meshes.
        has_served: whether it has ever been ready. left: whether it has left the group in an orderly way while the others continue.
        regroups: whether the group can continue without one of its processes. If so, this process may leave, and survives a failed step.
        commands, steps: number of commands executed and steps collected, in all mesh epochs.
    """

    def __init__(self, group: HostGroup):
        self.group = group
        self.phase = "loading"
        self.executor: Executor | None = None
        self.has_served = self.left = False
        self.commands = self.steps = 0
        self.reason: str | None = None
        self.ahead: CompileAhead | None = None
        self._on_warm_up: Callable[[], None] = lambda: None
        self._has_finished, self._is_leaving = threading.Event(), threading.Event()
        self._num_signals, self.regroups = 0, True
        group.on_end = self._watch_end

    def leave(self) -> None:
        """Ask process 0 to continue without this process, and wait until it does (`run` then returns) or refuses."""
        if self._is_leaving.is_set():
            return
        self._is_leaving.set()
        _log.info("This process leaves: process 0 is asked to go on without it. A second signal ends it now.")
        try:
            if self.group.request_leave():
                self.left = True
                self.group.end_locally()
        except RefusedError as error:
            self._is_leaving.clear()
            _log.warning("This process cannot be spared, and goes on: %s. A second signal ends it now.", error)
        except PeerLostError:
            return  # the group has noticed and ends the process

    def handle_signals(self) -> None:
        """Leave the group at SIGTERM or SIGINT, and exit at once at a second signal. Does nothing outside Python's main thread.

        With pipeline stages no process can leave: it continues until process 0, which finishes its requests, ends or is lost.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Leave the group from a thread, which asks process 0 and waits for its answer."""
        self._num_signals += 1
        if self._num_signals > 1:
            os._exit(1)
        name, is_rejoining = signal.Signals(number).name, self.group.epoch > 0
        if self.phase == "compiling ahead" or not (self.has_served or is_rejoining):
            # No mesh contains this process yet; or the group has not served, and cannot form another mesh.
            os.write(2, f"{name} while {self.phase}: this process ends now\n".encode())
            os._exit(0)
        if self.regroups:  # if it cannot ask, it exits at once: the others continue as after a loss
            start_thread("leave", self.leave, name="dsjax-leave", on_failure=lambda error: os._exit(1))
        else:
            why = "the others need this process's stages, so that it goes on until process 0 ends; a second signal ends it now"
            os.write(2, f"{name}: {why}\n".encode())

    def run_with(self, args: EngineArgs) -> None:
        """Follow all mesh epochs of an engine started with these options, see `run`. Must be called in the main thread."""
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
        self.regroups = not has_stages  # a group cannot continue without one of its stages
        self.handle_signals()
        library = ProgramLibrary()
        self.ahead = ahead = CompileAhead(args, library)
        held = HeldWeights()

        def load(announcement: Announcement | None) -> Executor:
            if has_stages:  # there is only one mesh epoch
                return load_model(args, self.group, library=library).executor
            if announcement is None:
                loaded = load_model(args, self.group, library=library, held=held)
            else:
                loaded = load_generation(args, announcement, self.group, library, held)
            if chunks is not None:
                chunks.join(loaded)
            wanted = announcement.wanted if announcement else args.mesh
            spec, wanted = MeshSpec.parse(loaded.facts.mesh), MeshSpec.parse(wanted)
            self._on_warm_up = lambda: ahead.begin(spec, wanted, self.group.live_ids, loaded.facts.weights)
            return loaded.executor

        if self.group.epoch > 0:
            # This process is rejoining. It compiles first, so that the others, which are serving, do not wait for its compiler.
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
        """Follow successive mesh epochs until the leader ends or is lost. The process must exit soon after.

        load: returns the executor of an announced epoch; None: the first epoch. release: frees an executor's arrays; None: frees the held
        weights. seconds: how long to wait for the next epoch after a failure.

        Raises:
            GroupError: the group did not end in an orderly way. Other errors: an error of this process, with which it leaves the group.
        """
        announcement = None
        if self.group.epoch > 0:
            self.group.report_ready()
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
                    if self._is_leaving.is_set():
                        self.left = True
                        self._finish()
                        return
            except (RuntimeError, GroupError) as error:  # a collective or an all-gather over the group lost a peer
                if executor is not None:  # others may wait for this live process in a collective or at a layer
                    self.group.collectives.cut(self.group.epoch)
                never_formed = announcement is None and isinstance(error, GroupError)
                if never_formed or not self.regroups:
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
        """Execute the messages of one mesh epoch until the leader ends (True, or a `GroupError`) or announces another epoch (False)."""
        self.phase = "warming up"
        if not _Work(self, executor, self.group.commands(self.group.epoch)).run():
            return False
        self.phase = "shutting down"
        executor.shutdown()
        self._finish()
        return True

    def _finish(self) -> None:
        self._has_finished.set()
        if self.ahead is not None:
            self.ahead.close()
        if self.reason is not None:
            raise GroupError(f"process 0 has ended the group: {self.reason}")

    def _watch_end(self) -> None:
        """Exit soon after process 0 has ended: if it ended during a step, this process could wait in a collective forever."""

        def give_up() -> None:
            if not self._has_finished.is_set():
                _log.warning("Process 0 has ended, and left a step behind that cannot end; this process ends now.")
                os._exit(0 if self.reason is None else 1)

        end = threading.Timer(_END_SECONDS, give_up)
        end.daemon = True
        end.start()


class _Work:
    """Messages to the executor of one mesh epoch, and its commands in flight."""

    def __init__(self, follower: Follower, executor: Executor, inbox: queue.SimpleQueue[EpochMessage]):
        self._follower, self._executor, self._inbox = follower, executor, inbox
        self._collected = 0
        self._launched: deque[Any] = deque()  # launched, not collected yet
        self._unwaited: deque[Any] = deque()  # the ones not waited for yet

    def run(self) -> bool:
        """Execute messages as they arrive. Return True if the leader has ended, False if only the mesh epoch has."""
        executor, follower = self._executor, self._follower
        while True:
            message = self._inbox.get()
            if isinstance(message, Announcement) and message.ended:
                follower.reason = message.reason or None
                return True
            if follower.group.is_superseded:
                if follower._is_leaving.is_set():  # others may still receive from this process's programs
                    with contextlib.suppress(RuntimeError):  # the mesh epoch has failed
                        while self._unwaited:
                            executor.wait(self._unwaited.popleft())
                return False  # the remaining steps can never finish, or have finished: the leader has waited for them
            self._execute(decode(message))
            if executor.max_in_flight > 1:
                continue
            # A program starts after the wait for the previous one. If the next command has arrived, prepare its inputs before waiting.
            while self._unwaited and (self._inbox.empty() or len(self._unwaited) > 1):
                executor.wait(self._unwaited.popleft())

    def _execute(self, message: Message) -> None:
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
                self._launched.append(pending)
                if executor.max_in_flight == 1:
                    self._unwaited.append(pending)

    def _collect_until(self, collected: int) -> None:
        """Collect results until their number since the start equals the leader's, `collected`."""
        while self._collected < collected:
            self._executor.collect(self._launched.popleft())
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
            group.agreement.contribute("warm-up", error=f"{type(error).__name__}: {error}")
            raise
        # Set before process 0 learns of it: once process 0 is ready, all followers are, too.
        self._follower.phase, self._follower.has_served = "ready", True
        group.agreement.contribute("warm-up")
        self._follower._on_warm_up()
