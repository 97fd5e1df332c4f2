"""``RemoteExperts``: experts in another process, which may die and come back while the attention side keeps its caches and requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Array

from dsjax.engine.afd.expert_side import Side
from dsjax.engine.afd.messages import SERVICE, VERSION, Answered, Call, Hello, Welcome, receive, send
from dsjax.errors import UserError
from dsjax.hosts.credentials import Credentials
from dsjax.hosts.secure_channel import SecureChannel, connect
from dsjax.hosts.wire import split_address
from dsjax.model.apart import LayerPass
from dsjax.model.parameters import ParameterInfo
from sharding import MeshSpec
from sharding.arrays import put
from sharding.dispatch.between import Between

RETRY_SECONDS = 0.2
_log = logging.getLogger(__name__)


class ExpertsGoneError(UserError):
    """The experts' process has not come back in time."""


class RemoteExperts(Side):
    """The experts' side as the attention side's process sees it: a connection on which rows are sent and answers come back.

    A call that fails because the connection ends is made again once there is a process at the address, as often as it takes: a layer's
    experts depend on the rows alone, and nothing of the attention side has changed meanwhile.

    Args:
        address: ``HOST:PORT`` of the experts' process. patience: seconds in which one must be there, at the start and after a loss.
        silence: seconds after which a host that says nothing is taken for dead.

    Attributes:
        space: as of ``Hello``; assigned before the first call. losses: how often the connection has ended. last_gap: seconds from the
            last loss to the answer of the call that met it.
    """

    def __init__(
        self,
        spec: MeshSpec,
        infos: Mapping[str, ParameterInfo],
        address: str,
        credentials: Credentials,
        *,
        waits: bool,
        patience: float,
        silence: int,
    ):
        super().__init__(spec, infos, waits=waits)
        self.address, self.patience, self._silence = address, patience, silence
        self._credentials = credentials
        self.space: dict[str, Any] = {}
        self._channel: SecureChannel | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsjax-experts")
        self.losses, self.last_gap = 0, 0.0

    def way(self, through: LayerPass) -> WayToProcess:
        """Have the experts' process compile for the rows of a pass."""
        between = through.between()
        call = Call(through.stack, -1, between.senders * between.rows)
        self._thread.submit(self.exchange, call, None, None).result()
        return WayToProcess(self, through.stack, between)

    def begin(self, call: Call, rows: Array, answers: np.ndarray) -> Future[np.ndarray]:
        """Have rows computed: calls are made one after the other, in a thread. answers: memory for what comes back."""
        return self._thread.submit(self.exchange, call, rows, answers)

    def connect(self) -> None:
        """Connect, and say what both sides must have alike.

        Raises:
            UserError: the other side has another model or other options, or does not belong to the deployment. ExpertsGoneError: nobody is
                there in time.
        """
        end, said = time.monotonic() + self.patience, False
        while self._channel is None:
            try:
                channel = connect(split_address(self.address), SERVICE, self._credentials)
                channel.keep_alive(self._silence, unacknowledged=True)
                send(channel, Hello(VERSION, self.space))
                welcome: Welcome = receive(channel, Welcome)
            except (OSError, EOFError) as error:
                if time.monotonic() > end:
                    raise ExpertsGoneError(
                        f"no process with experts is at {self.address} for {self.patience:g} s ({error}); start one with --afd-role expert"
                    ) from error
                if not said:
                    _log.warning("No process with experts is at %s (%s); it is waited for.", self.address, error)
                said = True
                time.sleep(RETRY_SECONDS)
                continue
            if welcome.error:
                channel.close()
                raise UserError(f"the process with experts at {self.address} refuses: {welcome.error}")
            self._channel = channel

    def exchange(self, call: Call, rows: Array | None, answers: np.ndarray | None) -> np.ndarray | None:
        """Make a call, again where the connection ends, and wait for its answers.

        Raises:
            UserError, ExpertsGoneError: as of ``connect``. RuntimeError: the experts' process could not compute it.
        """
        sent = None if rows is None else memoryview(np.ascontiguousarray(np.asarray(rows)).view(np.uint8))
        lost = None
        while True:
            self.connect()
            try:
                send(self._channel, call)
                if sent is not None:
                    self._channel.send_bytes(sent)
                answered: Answered = receive(self._channel, Answered)
                if answered.error:
                    raise RuntimeError(f"the process with experts at {self.address} failed: {answered.error}")
                if answers is not None:
                    self._channel.receive_into(memoryview(answers.view(np.uint8)))
            except (OSError, EOFError) as error:
                _log.warning(
                    "The process with experts at %s has gone (%s); the call is made again.", self.address, error
                )
                self._channel.close()
                self._channel, self.losses = None, self.losses + 1
                lost = time.monotonic() if lost is None else lost
                continue
            if lost is not None:
                self.last_gap = time.monotonic() - lost
            return answers

    def close(self) -> None:
        """End the connection and the thread."""
        self._thread.shutdown(cancel_futures=True)
        if self._channel is not None:
            self._channel.close()


@dataclass(frozen=True, eq=False)
class WayToProcess:
    """``Way`` to another process: through this host's memory."""

    side: RemoteExperts
    stack: str
    between: Between

    def call(self, rows: Array, layer: int) -> Future[np.ndarray]:
        """Begin to send the rows of all token devices."""
        between = self.between
        count = between.senders * between.rows
        answers = np.empty((between.group.size, count * between.columns, between.wire.width), between.wire.dtype)
        return self.side.begin(Call(self.stack, layer, count), rows, answers)

    def returned(self, away: Future[np.ndarray]) -> Sequence[Array]:
        """Wait for the answers, and send them to the tokens' devices."""
        return [
            put(answer, one.sharding) for answer, one in zip(away.result(), self.between.described_returns, strict=True)
        ]
