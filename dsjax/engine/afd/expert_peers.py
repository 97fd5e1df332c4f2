"""``ExpertPeers``: from one process with experts to the others, from which it takes those that it is to have."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsjax.engine.afd.expert_slots import Expert, SlotWriter
from dsjax.engine.afd.messages import SERVICE, VERSION, Answered, Hello, Take, Welcome, reason_of, receive, send
from dsjax.errors import UserError
from dsjax.hosts.credentials import Credentials
from dsjax.hosts.secure_channel import SecureChannel, connect
from dsjax.hosts.wire import split_address

_SECONDS = 60
_log = logging.getLogger(__name__)


class ExpertPeers:
    """Takes experts out of other processes' slots.

    Args:
        addresses: of all processes with experts, in the order of their slots; credentials: for each. space: as of ``Hello``.
    """

    def __init__(self, addresses: Sequence[str], credentials: Sequence[Credentials], space: Mapping[str, Any]):
        self._addresses, self._credentials, self._space = addresses, credentials, dict(space)

    def fetch(self, writer: SlotWriter, row: int, slots: Mapping[int, int]) -> dict[int, Expert]:
        """The experts in these slots of a layer, as far as their processes give them. slots: which expert is to be in each."""
        per_process = writer.rows.shape[1] // len(self._addresses)
        by_process: dict[int, dict[int, int]] = {}
        for slot, expert in slots.items():
            by_process.setdefault(slot // per_process, {})[slot] = expert
        found: dict[int, Expert] = {}
        for process, wanted in by_process.items():
            address = self._addresses[process]
            try:
                found |= self._ask(address, self._credentials[process], writer, row, wanted)
            except (OSError, EOFError, UserError) as error:
                _log.warning(
                    "The process with experts at %s gives none (%s); they are read from the checkpoint.",
                    address,
                    reason_of(error),
                )
        return found

    def _ask(
        self, address: str, credentials: Credentials, writer: SlotWriter, row: int, slots: Mapping[int, int]
    ) -> dict[int, Expert]:
        with connect(split_address(address), SERVICE, credentials) as channel:
            channel.settimeout(_SECONDS)
            send(channel, Hello(VERSION, self._space))
            welcome: Welcome = receive(channel, Welcome)
            if welcome.error:
                raise ConnectionError(welcome.error)
            send(channel, Take(row, list(slots), list(slots.values())))
            answered: Answered = receive(channel, Answered)
            if answered.error:
                raise ConnectionError(answered.error)
            return {slot: _received(channel, writer, row) for slot in slots}


def send_expert(channel: SecureChannel, expert: Expert) -> None:
    """Send an expert's parameters, in the order of their paths."""
    for path in sorted(expert):
        channel.send_bytes(memoryview(np.ascontiguousarray(np.asarray(expert[path])).view(np.uint8)))


def _received(channel: SecureChannel, writer: SlotWriter, row: int) -> Expert:
    expert: Expert = {}
    for path in writer.paths(writer.stack_rows[row].stack):
        info = writer.side.infos[path]
        expert[path] = np.empty(info.shape[2:], info.storage_dtype)
        channel.receive_into(memoryview(expert[path].view(np.uint8)))
    return expert
