"""From options to engines that compute prompts for others, or have others compute theirs: in one process, or in several."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO

import jax
import msgspec
from jax.sharding import Mesh

from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.source import open_checkpoint
from dsjax.engine.contract.executor import Executor
from dsjax.engine.device.program_library import ProgramLibrary
from dsjax.engine.elastic.generations import Generations
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from dsjax.engine.schedule.page_events import EventSink
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.layout import Layout
from dsjax.engine.setup.loading import LoadedModel, PrefillSizes, load_model
from dsjax.engine.setup.side_options import decode_args, prefill_args
from dsjax.engine.stream.leader import pulled_stream
from dsjax.engine.tiers.page_files import lock_folder
from dsjax.engine.transfer.leases import Keeper
from dsjax.engine.transfer.page_network import PrefillServer, RemoteLink
from dsjax.engine.transfer.page_parcels import move_parcel
from dsjax.engine.transfer.parcel_carrier import JaxCarrier
from dsjax.engine.transfer.parcel_network import KeptParcels, ParcelServer, RemoteParcels
from dsjax.engine.transfer.prefill_engine import Keepers, PrefillEngine
from dsjax.engine.transfer.prefill_links import LocalLink
from dsjax.errors import UserError
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.rendezvous import JoinRequest
from dsjax.hosts.stream import StreamWriter
from sharding import MeshError, MeshSpec

_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Separated:
    """Decode engines' models and the ways to the prefill engines, whose threads have started.

    Attributes:
        first: the first decode engine's model, with facts of all. links: of it, one to each prefill engine.
        beside: executor and links of each further one. lock: of the folder that has a folder for each decode engine's pages on the disk.
    """

    first: LoadedModel
    links: list[LocalLink]
    beside: list[tuple[Executor, list[LocalLink]]]
    lock: IO[bytes] | None = None


def load_separated(args: EngineArgs, *, show_progress: bool = False) -> Separated:
    """Load the model for each decode engine and each prefill engine, on disjoint devices of this process.

    Each kind reads the weights once and compiles its programs once: further engines copy the first one's weights from device to device,
    and load its programs for their own.

    Raises:
        UserError, MeshError: options, model or devices that do not go together; before weights are read.
    """
    decode, prefill = MeshSpec.parse(args.decode_mesh), MeshSpec.parse(args.prefill_mesh)
    devices = _devices(args)
    _check_prefill(args, prefill.arrange(devices[-prefill.num_devices :]))
    devices = iter(devices)
    lock = None
    if args.decode_instances > 1 and args.disk_cache is not None:
        lock = lock_folder(args.disk_cache)
    options = [decode_args(args, instance) for instance in range(args.decode_instances)]
    decodes = _load_alike(options, decode, devices, is_later=False, show_progress=show_progress)
    options = [prefill_args(args)] * args.prefill_instances
    prefills = []
    with _named_prefill(args):
        models = _load_alike(options, prefill, devices, show_progress=show_progress)
    for own, model in zip(options, models, strict=True):
        engine = PrefillEngine(
            model.executor,
            own.scheduler_config(model.executor.limits),
            timeout=args.transfer_timeout,
            async_scheduling=args.async_scheduling,
            balancer=_balancer(own, model.executor),
        )
        engine.start()
        prefills.append(engine)
    links = [[LocalLink(engine, move_parcel) for engine in prefills] for _ in decodes]
    beside = [(model.executor, own) for model, own in zip(decodes[1:], links[1:], strict=True)]
    first = decodes[0]
    tokens = ("cache_tokens", "host_cache_tokens", "disk_cache_tokens", "dp_ranks", "num_devices")
    facts = replace(
        first.facts,
        mesh=str(decode) if args.decode_instances == 1 else f"{args.decode_instances} × {decode}",
        prefill_meshes=[str(prefill)] * args.prefill_instances,
        decode_instances=args.decode_instances,
        prefill_sizes=PrefillSizes.of(models[0].facts),
        max_model_len=min(model.facts.max_model_len for model in decodes),
        **{name: sum(getattr(model.facts, name) for model in decodes) for name in tokens},
    )
    return Separated(replace(first, facts=facts), links[0], beside, lock)


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


def _load_alike(
    options: Sequence[EngineArgs],
    spec: MeshSpec,
    devices: Iterator[jax.Device],
    *,
    is_later: bool = True,
    show_progress: bool = False,
) -> list[LoadedModel]:
    """One model for each of these options, which differ in nothing that weights or programs depend on, on the next devices."""
    library, found = ProgramLibrary(), []
    for own in options:
        mesh = spec.arrange(list(itertools.islice(devices, spec.num_devices)))
        first = found[0] if found else None
        model = load_model(
            own,
            mesh=mesh,
            is_later=is_later or first is not None,
            weights_of=first,
            library=library,
            show_progress=show_progress,
        )
        library.pages[str(spec)] = model.executor.limits.pages_per_rank  # programs have the cache's size in them
        found.append(model)
    return found


def _balancer(args: EngineArgs, executor: Executor) -> ExpertBalancer | None:
    """What moves a prefill instance's experts after its own load, where that is asked for."""
    return None if args.eplb is None else ExpertBalancer(args.eplb, executor)


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
    host = _host(args, group)
    parcels = ParcelServer(
        lambda number: engine.leases.take(number), _carrier(host), model.page_space, host, args.transfer_timeout
    )
    engine = PrefillEngine(
        model.executor,
        args.scheduler_config(model.executor.limits),
        timeout=args.transfer_timeout,
        async_scheduling=args.async_scheduling,
        publisher=event_sink,
        balancer=_balancer(args, model.executor),
        keepers=_keepers(parcels.address, group),
    )
    if group is not None:
        engine.follow(Generations(args, group, model, library))
    server = PrefillServer(engine, parcels, model.page_space, host, port)
    engine.start()
    return server


def remote_links(args: EngineArgs, loaded: LoadedModel, group: HostGroup | None = None) -> Callable[[str], RemoteLink]:
    """What gives the link to a prefill engine at an address, for a model that was loaded with ``transfers``."""
    parcels = _remote_parcels(args, loaded, group)
    return lambda address: RemoteLink(address, parcels, loaded.page_space)


class FollowersParcels:
    """The part in transfers that a process other than the first of a side has, from generation to generation.

    On the prefill side it keeps the parcels of its ranks, and others pull them from it. On the decode side it pulls, straight from the
    processes that keep them, the parcels of the ranks that it has devices of, and tells process 0 what came of each.
    """

    def __init__(self, args: EngineArgs, group: HostGroup):
        self._args, self._group = args, group
        self._kept = KeptParcels(args.transfer_timeout / 2)
        self._server: ParcelServer | None = None
        self._parcels: RemoteParcels | None = None

    def join(self, loaded: LoadedModel) -> None:
        """Take part in the transfers of another generation, with its executor."""
        args, group = self._args, self._group
        own = group.options.process_id
        if args.disaggregation_mode == "prefill":
            self._kept = kept = KeptParcels(args.transfer_timeout / 2)
            if self._server is None:
                host = _host(args, group)
                take = lambda number: self._kept.take(number)  # noqa: E731
                self._server = ParcelServer(take, _carrier(host), loaded.page_space, host, args.transfer_timeout)
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


def _address_of(member: JoinRequest, group: HostGroup) -> str:
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


def _remote_parcels(args: EngineArgs, loaded: LoadedModel, group: HostGroup | None) -> RemoteParcels:
    carrier = _carrier(_host(args, group))
    return RemoteParcels(carrier, loaded.page_space, loaded.executor.parcel_shapes, args.transfer_timeout)


def _carrier(host: str) -> JaxCarrier:
    return JaxCarrier(jax.local_devices()[0], host)


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
        decode, prefill = (
            f"{count} × " if count > 1 else "" for count in (args.decode_instances, args.prefill_instances)
        )
        raise UserError(
            f"{decode}--decode-mesh {args.decode_mesh} and {prefill}--prefill-mesh {args.prefill_mesh} want {args.num_devices} devices, "
            f"found {len(found)} of platform {found[0].platform!r}; use smaller meshes, or set JAX_PLATFORMS=cpu to emulate them in "
            "a fresh process"
        )
    return found
