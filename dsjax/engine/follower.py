"""`follow`: what every process but the first does in a group: carry out the leader's commands, in its order, until it ends."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from typing import Any

from dsjax.engine.executor import Executor
from dsjax.engine.leader import End, Launch, Message, Record, WarmUp, decode, is_collected
from dsjax.hosts.group import GroupError, HostGroup, StreamReader

_END_SECONDS = 10.0

_log = logging.getLogger(__name__)


class _EndedError(Exception):
    """Raised in a warm-up: the leader has ended."""


class Follower:
    """An executor that does what the leader's does.

    Attributes:
        phase: what it is doing, as `/ready` has it; `ready` once programs are compiled.
        commands, steps: how many commands it has carried out, and how many of them have been collected.
    """

    def __init__(self, group: HostGroup):
        self.group = group
        self.phase = "loading"
        self.commands = self.steps = 0
        self.reason: str | None = None
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ended, self._over = threading.Event(), threading.Event()
        self._under_way: deque[Any] = deque()  # launched, and not collected yet
        self._running: deque[Any] = deque()  # of those, what has not been waited for

    def follow(self, executor: Executor) -> None:
        """Carry out messages until the leader ends, or is lost. The process must end soon after, for the leader waits for that.

        Raises:
            GroupError: it did not end as it should.
        """
        self.phase = "warming up"
        threading.Thread(target=self._read, name="dsjax-stream", daemon=True).start()
        while True:
            message = self._inbox.get()
            if isinstance(message, End):
                break
            self._carry_out(executor, message)
            if executor.max_in_flight > 1:
                continue
            # A program starts when the one before it has been waited for. The next command's inputs are laid out meanwhile if it is here.
            while self._running and (self._inbox.empty() or len(self._running) > 1):
                executor.wait(self._running.popleft())
        self.phase = "shutting down"
        executor.shutdown()
        self._over.set()
        if self.reason is not None:
            raise GroupError(f"process 0 has ended the group: {self.reason}")

    def _carry_out(self, executor: Executor, message: Message) -> None:
        if isinstance(message, WarmUp):
            self._warm_up(executor)
        elif isinstance(message, Record):
            executor.set_recording(message.on)
        elif isinstance(message, Launch):
            self.phase = "ready"
            while self.steps < message.collected:
                executor.collect(self._under_way.popleft())
                self.steps += 1
            pending = executor.launch(message.command)
            self.commands += 1
            if is_collected(message.command):
                self._under_way.append(pending)
                if executor.max_in_flight == 1:
                    self._running.append(pending)

    def _warm_up(self, executor: Executor) -> None:
        def check_going_on(done: int, total: int, label: str) -> None:
            if self._ended.is_set():
                raise _EndedError

        try:
            executor.warm_up(check_going_on)
        except _EndedError:
            return
        except BaseException as error:
            self.group.tell("warm-up", error=f"{type(error).__name__}: {error}")
            raise
        self.group.tell("warm-up")
        self.phase = "ready"

    def _read(self) -> None:
        """Take messages out of the store as they come."""
        reader = StreamReader(self.group)
        while True:
            try:
                message = decode(reader.next())
            except ConnectionError:
                return  # the group knows, and ends the process
            if isinstance(message, End):
                self.reason = message.reason
                self._ended.set()
            self._inbox.put(message)
            if isinstance(message, End):
                # Where the leader ended in the middle of a step, this process may wait for it in a collective for ever.
                if not self._over.wait(_END_SECONDS):
                    self._give_up()
                return

    def _give_up(self) -> None:
        _log.warning("Process 0 has ended, and left a step behind that cannot end; this process ends now.")
        os._exit(0 if self.reason is None else 1)
