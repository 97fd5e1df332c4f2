"""Transfers of pages where a side is several processes: which process keeps what, at which address, and a follower's part in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import msgspec

from dsjax.engine.contract.executor import Executor
from dsjax.engine.elastic.joining import LOOPBACK
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.loading import LoadedEngine
from dsjax.engine.stream.leader import PULLED, Pulled
from dsjax.engine.transfer.chunk_network import ChunkServer, FollowerSendBuffers, RemoteChunks
from dsjax.engine.transfer.messages import ChunkPort
from dsjax.engine.transfer.prefill_service import Keepers
from dsjax.engine.transfer.send_buffers import ChunkTickets, Keeper
from dsjax.engine.transfer.transport import Transport, open_transport
from dsjax.messaging.credentials import Credentials
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.rendezvous import JoinRequest

_LOOK_SECONDS = 1.0
_SECRET_KEY = "dsjax/chunk-tickets"


class FollowerTransfers:
    """The part in transfers that a process other than the first of a side has, from generation to generation.

    On the prefill side it keeps the chunks of its ranks, and others pull them from it. On the decode side it pulls, straight from the
    processes that keep them, the chunks of the ranks that it has devices of, and tells process 0 what came of each.
    """

    def __init__(self, args: EngineArgs, group: HostGroup):
        self._args, self._group = args, group
        self._kept: FollowerSendBuffers | None = None
        self._tickets: ChunkTickets | None = None
        self._server: ChunkServer | None = None
        self._chunks: RemoteChunks | None = None

    def join(self, loaded: LoadedEngine) -> None:
        """Take part in the transfers of another generation, with its executor."""
        args, group = self._args, self._group
        process_id = group.options.process_id
        if args.disaggregation_mode == "prefill":
            self._tickets = self._tickets or tickets_of(group)
            if self._kept is not None:
                self._kept.end()
            self._kept = kept = FollowerSendBuffers(args.transfer_timeout / 2, self._tickets)
            if self._server is None:
                host = host_of(args, group)
                open_chunk = lambda number, ticket: self._kept.open(number, ticket)  # noqa: E731
                transport, space = transport_of(args, host), space_of(args, loaded)
                self._server = ChunkServer(open_chunk, transport, space, host, args.transfer_timeout, group.credentials)
                group.store.set(_address_key(group.me), self._server.address.encode())
            loaded.executor.extension(ChunkPort).send_chunks(kept.ready, kept.drop)
            return
        if self._chunks is None:
            self._chunks = remote_chunks(args, loaded, group)
        pull, generation = self._chunks.pull, group.generation
        loaded.executor.extension(ChunkPort).pull_chunks(
            lambda source, number, device: pull(source.address, number, device),
            lambda chunk: group.leader.send(PULLED, Pulled(generation, chunk)),
        )


def keepers_of(own_address: str, group: HostGroup | None) -> Keepers:
    """Say which processes keep the chunks of an executor's ranks. own_address: where this one's are pulled from."""

    def keepers(executor: Executor) -> Sequence[Keeper]:
        if group is None:
            return [Keeper(own_address)] * executor.limits.num_ranks
        this = group.options.process_id
        members = {member.process_id: member for member in group.present}
        firsts = [processes[0] for processes in executor.extension(ChunkPort).processes_of_ranks]
        addresses = {
            first: own_address if first == this else _address_of(members[first], group) for first in set(firsts)
        }
        return [Keeper(addresses[first], first != this) for first in firsts]

    return keepers


def tickets_of(group: HostGroup | None) -> ChunkTickets:
    """Make the tickets of a prefill side's chunks, the same in all its processes: process 0 makes the secret, and the others wait for it.

    Raises:
        GroupError: process 0 has not said it in time.
    """
    if group is None:
        return ChunkTickets()
    if group.is_leader:
        tickets = ChunkTickets()
        group.store.set(_SECRET_KEY, tickets.secret)
        return tickets
    return ChunkTickets(
        _wait_for(group, _SECRET_KEY, f"{group.members[0].name} does not say how its chunks are opened")
    )


def _wait_for(group: HostGroup, key: str, complaint: str) -> bytes:
    """Wait until another process has entered a value."""
    deadline = time.monotonic() + group.options.start_timeout
    while time.monotonic() < deadline:
        value = group.store.get(key, _LOOK_SECONDS)
        if value is not None:
            return value
        group.check()
    raise GroupError(f"{complaint}; start all processes alike")


def _address_of(member: JoinRequest, group: HostGroup) -> str:
    """Wait until another process says where its chunks are pulled from, which it does once its model is loaded."""
    key = _address_key(member)
    return _wait_for(group, key, f"{member.name} does not say where its pages can be pulled").decode()


def _address_key(member: JoinRequest) -> str:
    return f"dsjax/chunks/{member.process_id}/{member.pid}/{member.port}"


def remote_chunks(args: EngineArgs, loaded: LoadedEngine, group: HostGroup | None) -> RemoteChunks:
    """Make what this process pulls chunks with, from whichever process of the prefill side keeps them."""
    transport = transport_of(args, host_of(args, group))
    shapes, credentials = loaded.executor.extension(ChunkPort).chunk_shapes, credentials_of(args, group)
    return RemoteChunks(transport, space_of(args, loaded), shapes, args.transfer_timeout, credentials)


def transport_of(args: EngineArgs, host: str) -> Transport:
    """Start the transport that moves chunks to and from this process."""
    return open_transport(args.disaggregation_transfer_backend, jax.local_devices()[0], host)


def space_of(args: EngineArgs, loaded: LoadedEngine) -> dict[str, Any]:
    """Say what both sides must have alike (`Greeting.space`): what pages' values depend on, and by what they are moved."""
    return loaded.page_space | {"disaggregation_transfer_backend": args.disaggregation_transfer_backend}


def host_of(args: EngineArgs, group: HostGroup | None) -> str:
    """Give the address by which others reach this host: the one that is given, or the group's, or the loopback interface's."""
    if args.transfer_host is not None:
        return args.transfer_host
    return group.options.address if group is not None else LOOPBACK


def credentials_of(args: EngineArgs, group: HostGroup | None) -> Credentials:
    """Give the credentials by which the processes of both sides know each other.

    Raises:
        UserError: the side is reached beyond loopback, and no cluster key was given; or as `CredentialOptions.read` says.
    """
    return group.credentials if group is not None else args.credentials.read(host_of(args, None))
