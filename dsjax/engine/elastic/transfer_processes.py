"""KV transfers of engines with several processes: which process owns which chunks (KV transfer units), and what a follower does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from dsjax.engine.contract.executor import Executor
from dsjax.engine.elastic.joining import LOOPBACK
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.loading import LoadedEngine
from dsjax.engine.stream.leader import PULLED, Pulled
from dsjax.engine.transfer.chunk_network import ChunkServer, FollowerSendBuffers, RemoteChunks
from dsjax.engine.transfer.messages import VERSION, ChunkPort
from dsjax.engine.transfer.prefill_service import ChunkOwners
from dsjax.engine.transfer.send_buffers import ChunkOwner
from dsjax.engine.transfer.transport import Transport, open_transport
from dsjax.errors import UserError
from dsjax.hosts.group import HostGroup
from dsjax.messaging import Endpoint

_ADDRESSES = "addresses of chunks"  # name of the all-gather in which each process gives the address of its chunks


class FollowerTransfers:
    """The KV transfers of a follower, a process of an engine other than process 0.

    On a prefill engine, it keeps its ranks' chunks until decode pulls them. On a decode engine, it pulls chunks and reports to process 0.
    """

    def __init__(self, args: EngineArgs, group: HostGroup):
        self._args, self._group, self._endpoint = args, group, endpoint_of(args, group)
        self._kept: FollowerSendBuffers | None = None
        self._server: ChunkServer | None = None
        self._chunks: RemoteChunks | None = None

    def join(self, loaded: LoadedEngine) -> None:
        """Take part in the transfers of a new mesh epoch."""
        args, group = self._args, self._group
        if args.disaggregation_mode == "prefill":
            if self._kept is not None:
                self._kept.end()
            self._kept = buffers = FollowerSendBuffers()
            if self._server is None:
                self._server = ChunkServer(
                    self._endpoint,
                    lambda number, take: self._kept.open(number, take),
                    transport_of(args, self._endpoint.host),
                    args.transfer_timeout,
                )
            loaded.executor.extension(ChunkPort).send_chunks(buffers.ready, buffers.drop)
            group.agreement.contribute(_ADDRESSES, self._endpoint.address)
            return
        if self._chunks is None:
            self._chunks = remote_chunks(args, loaded, self._endpoint)
        pull, epoch = self._chunks.pull, group.epoch
        loaded.executor.extension(ChunkPort).pull_chunks(
            lambda source, number, device: pull(source.address, number, device),
            lambda chunk: group.leader.send(PULLED, Pulled(epoch, chunk)),
        )


def chunk_owners(own_address: str, group: HostGroup | None) -> ChunkOwners:
    """Return a function that takes an executor and returns the owner of each rank's chunks.

    own_address: the address from which others pull this process's chunks. The function then does an all-gather over the group, if any.
    """

    def owners(executor: Executor) -> Sequence[ChunkOwner]:
        if group is None:
            return [ChunkOwner(own_address)] * executor.limits.num_ranks
        gathered = group.agreement.all_gather(_ADDRESSES, own_address)
        addresses = {member.process_id: address for member, address in zip(group.present, gathered, strict=True)}
        owner_ids = [processes[0] for processes in executor.extension(ChunkPort).processes_of_ranks]
        return [ChunkOwner(addresses[owner_id], owner_id != group.options.process_id) for owner_id in owner_ids]

    return owners


def remote_chunks(args: EngineArgs, loaded: LoadedEngine, endpoint: Endpoint) -> RemoteChunks:
    """Make the client through which this process pulls chunks from prefill processes."""
    port = loaded.executor.extension(ChunkPort)
    shapes, window_shapes = port.chunk_shapes, port.window_shapes
    return RemoteChunks(endpoint, transport_of(args, endpoint.host), shapes, args.transfer_timeout, window_shapes)


def transport_of(args: EngineArgs, host: str) -> Transport:
    """Start the transport that moves chunks to and from this process."""
    return open_transport(args.disaggregation_transfer_backend, jax.local_devices()[0], host)


def space_of(args: EngineArgs, loaded: LoadedEngine) -> dict[str, Any]:
    """Return the compatibility fingerprint, whose values must be equal on the prefill and decode engines (`Greeting.space`)."""
    backend = args.disaggregation_transfer_backend
    return loaded.page_space | {"disaggregation_transfer_backend": backend, "transfer_messages": VERSION}


def host_of(args: EngineArgs, group: HostGroup | None) -> str:
    """Return the address at which other hosts reach this one: `--transfer-host`, else the group's address, else loopback."""
    if args.transfer_host is not None:
        return args.transfer_host
    return group.options.address if group is not None else LOOPBACK


def endpoint_of(args: EngineArgs, group: HostGroup | None, port: int = 0) -> Endpoint:
    """Return the endpoint for this process's transfers: the group's, or a new one if the host differs from the group's or `port` is given.

    Raises:
        UserError: the address cannot be used, or it is not loopback and no cluster key was given.
    """
    host = host_of(args, group)
    if group is not None and not port and host == group.options.address:
        return group.endpoint
    credentials = group.endpoint.credentials if group is not None else args.credentials(host)
    try:
        silence = (group.options if group else args).heartbeat_timeout
        return Endpoint(host, credentials, port=port, silence=silence)
    except OSError as error:
        raise UserError(f"the address {host}:{port} for pages cannot be used: {error.strerror or error}") from error
