"""From options to engines that compute prompts for others, or have others compute theirs: in one process, or in several."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.source import open_checkpoint
from dsjax.engine.contract.executor import Executor
from dsjax.engine.device.program_library import ProgramLibrary
from dsjax.engine.elastic.generations import Generations
from dsjax.engine.engine import attachments_of
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.schedule.page_events import EventSink
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.layout import Layout
from dsjax.engine.setup.loading import LoadedModel, PrefillSizes, load_model
from dsjax.engine.setup.side_options import decode_args, prefill_args
from dsjax.engine.stream.leader import pulled_stream
from dsjax.engine.transfer.chunk_network import ChunkServer, FollowerSendBuffers, RemoteChunks
from dsjax.engine.transfer.page_network import PrefillServer, RemoteLink
from dsjax.engine.transfer.page_parcels import move_parcel
from dsjax.engine.transfer.prefill_links import LocalLink
from dsjax.engine.transfer.prefill_service import Keepers
from dsjax.engine.transfer.send_buffers import Keeper
from dsjax.engine.transfer.transport import Transport, open_transport
from dsjax.errors import UserError
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.meeting import Arrival
from dsjax.hosts.stream import StreamWriter
from sharding import MeshError, MeshSpec

_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Separated:
    """The decode engine's model, with facts of both engines, and the link to the prefill engine, whose thread has started."""

    decode: LoadedModel
    link: LocalLink


def load_separated(args: EngineArgs, *, show_progress: bool = False) -> Separated:
    """Load the model for the decode engine and the prefill engine, on disjoint devices of this process.

    Raises:
        UserError, MeshError: options, model or devices that do not go together; before weights are read.
    """
    decode, prefill = MeshSpec.parse(args.decode_mesh), MeshSpec.parse(args.prefill_mesh)
    devices = _devices(args)
    meshes = [
        decode.arrange(devices[: decode.num_devices]),
        prefill.arrange(devices[decode.num_devices : args.num_devices]),
    ]
    _check_prefill(args, meshes[1])
    loaded = load_model(decode_args(args), mesh=meshes[0], show_progress=show_progress)
    own = prefill_args(args)
    with _named_prefill(args):
        model = load_model(own, mesh=meshes[1], is_later=True, show_progress=show_progress)
    config = own.scheduler_config(model.executor.limits)
    engine = PrefillEngine(
        model.executor,
        config,
        timeout=args.transfer_timeout,
        async_scheduling=args.async_scheduling,
        attachments=attachments_of(config, eplb=own.eplb),
    )
    engine.start()
    facts = replace(loaded.facts, prefill_meshes=[str(prefill)], prefill_sizes=PrefillSizes.of(model.facts))
    return Separated(replace(loaded, facts=facts), LocalLink(engine, move_parcel))


def _check_prefill(args: EngineArgs, mesh: Mesh) -> None:
    """Whether the model and the options go together with the prefill side's mesh, before the decode side's weights are read."""
    with _named_prefill(args):
        Layout.of(prefill_args(args), open_checkpoint(resolve(args.model, revision=args.revision)), mesh)


@contextmanager
def _named_prefill(args: EngineArgs) -> Iterator[None]:
    """Say of what cannot be that it is the prefill side's, whose options have other names than an engine's where it has its own."""
    try:
        yield
    except (UserError, MeshError) as error:
        raise UserError(
            f"of --prefill-mesh {args.prefill_mesh}, whose own values have --prefill- before an option's name: {error}"
        ) from error


def load_prefill(
    args: EngineArgs,
    group: HostGroup | None = None,
    *,
    port: int = 0,
    event_sink: EventSink | None = None,
    show_progress: bool = False,
) -> PrefillServer:
    """A prefill engine for other processes, its programs compiled at first use; `.warm_up()` compiles them before.

    ``emulate_devices`` must have been called before, where devices are to be emulated; or `join_group`, which gives the group that this
    is process 0 of. port: for messages; 0: a free one. event_sink: is given the events of pages.

    Raises:
        UserError, MeshError: options, model, devices or address that do not go together. GroupError: another process could not.
    """
    args, library = replace(args, disaggregation_mode="prefill"), ProgramLibrary()
    model = load_model(args, group, library=library, show_progress=show_progress)
    host, space = _host(args, group), _space(args, model)
    parcels = ChunkServer(
        lambda number: engine.buffers.take(number), _transport(args, host), space, host, args.transfer_timeout
    )
    config = args.scheduler_config(model.executor.limits)
    engine = PrefillEngine(
        model.executor,
        config,
        timeout=args.transfer_timeout,
        async_scheduling=args.async_scheduling,
        attachments=attachments_of(config, eplb=args.eplb, sink=event_sink),
        keepers=_keepers(parcels.address, group),
    )
    if group is not None:
        engine.follow(Generations(args, group, model, library))
    server = PrefillServer(engine, parcels, space, host, port)
    engine.start()
    return server


def remote_links(args: EngineArgs, loaded: LoadedModel, group: HostGroup | None = None) -> Callable[[str], RemoteLink]:
    """What gives the link to a prefill engine at an address, for a model that was loaded with ``transfers``."""
    parcels, space = _remote_parcels(args, loaded, group), _space(args, loaded)
    return lambda address: RemoteLink(address, parcels, space)


class FollowersParcels:
    """The part in transfers that a process other than the first of a side has, from generation to generation.

    On the prefill side it keeps the parcels of its ranks, and others pull them from it. On the decode side it pulls, straight from the
    processes that keep them, the parcels of the ranks that it has devices of, and tells process 0 what came of each.
    """

    def __init__(self, args: EngineArgs, group: HostGroup):
        self._args, self._group = args, group
        self._kept = FollowerSendBuffers(args.transfer_timeout / 2)
        self._server: ChunkServer | None = None
        self._parcels: RemoteChunks | None = None

    def join(self, loaded: LoadedModel) -> None:
        """Take part in the transfers of another generation, with its executor."""
        args, group = self._args, self._group
        own = group.options.process_id
        if args.disaggregation_mode == "prefill":
            self._kept = kept = FollowerSendBuffers(args.transfer_timeout / 2)
            if self._server is None:
                host = _host(args, group)
                take = lambda number: self._kept.take(number)  # noqa: E731
                transport, space = _transport(args, host), _space(args, loaded)
                self._server = ChunkServer(take, transport, space, host, args.transfer_timeout)
                group.store.set(_address_key(own, os.getpid()), self._server.address.encode())
            loaded.executor.send_parcels(kept.ready, kept.drop)
            return
        if self._parcels is None:
            self._parcels = _remote_parcels(args, loaded, group)
        pull, writer = self._parcels.pull, StreamWriter(group, pulled_stream(own))
        loaded.executor.pull_parcels(
            lambda source, number, device: pull(source.address, number, device),
            lambda parcel: writer.put(msgspec.msgpack.encode(parcel)) and None,
        )


def _keepers(own: str, group: HostGroup | None) -> Keepers:
    """Which processes keep the parcels of an executor's ranks. own: the address of this one's."""

    def keepers(executor: Executor) -> Sequence[Keeper]:
        if group is None:
            return [Keeper(own)] * executor.limits.num_ranks
        this = group.options.process_id
        members = {member.process_id: member for member in group.present}
        firsts = [processes[0] for processes in executor.processes_of_ranks]
        found = {first: own if first == this else _address_of(members[first], group) for first in set(firsts)}
        return [Keeper(found[first], first != this) for first in firsts]

    return keepers


def _address_of(member: Arrival, group: HostGroup) -> str:
    """Where the parcels of another process are pulled from. It says so once its model is loaded."""
    deadline = time.monotonic() + group.options.start_timeout
    while time.monotonic() < deadline:
        found = group.store.get(_address_key(member.process_id, member.pid), _LOOK_SECONDS)
        if found is not None:
            return found.decode()
        group.check()
    raise GroupError(f"{member.name} does not say where its pages can be pulled; start all processes alike")


def _address_key(process_id: int, pid: int) -> str:
    return f"dsjax/parcels/{process_id}/{pid}"


def _remote_parcels(args: EngineArgs, loaded: LoadedModel, group: HostGroup | None) -> RemoteChunks:
    transport = _transport(args, _host(args, group))
    return RemoteChunks(transport, _space(args, loaded), loaded.executor.parcel_shapes, args.transfer_timeout)


def _transport(args: EngineArgs, host: str) -> Transport:
    return open_transport(args.disaggregation_transfer_backend, jax.local_devices()[0], host)


def _space(args: EngineArgs, loaded: LoadedModel) -> dict[str, Any]:
    """What both sides must have alike (`Greeting.space`): what pages' values depend on, and by what they are moved."""
    return loaded.page_space | {"disaggregation_transfer_backend": args.disaggregation_transfer_backend}


def _host(args: EngineArgs, group: HostGroup | None) -> str:
    """This host's address, as others reach it."""
    if args.transfer_host is not None:
        return args.transfer_host
    if group is not None:
        return group.options.address
    try:
        return socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return "127.0.0.1"


def _devices(args: EngineArgs) -> list[jax.Device]:
    """Enough of them, by process and id."""
    found = sorted(jax.devices(), key=lambda d: (d.process_index, getattr(d, "slice_index", 0) or 0, d.id))
    if len(found) < args.num_devices:
        raise UserError(
            f"--decode-mesh {args.decode_mesh} and --prefill-mesh {args.prefill_mesh} want {args.num_devices} devices, "
            f"found {len(found)} of platform {found[0].platform!r}; use smaller meshes, or set JAX_PLATFORMS=cpu to emulate them in "
            "a fresh process"
        )
    return found
