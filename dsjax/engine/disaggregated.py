"""From options to engines that compute prompts for others, or have others compute theirs: in one process, or in several."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

import jax

from dsjax.engine.args import EngineArgs
from dsjax.engine.loading import LoadedModel, load_model
from dsjax.engine.page_events import EventSink
from dsjax.engine.page_network import PrefillServer, RemoteLink
from dsjax.engine.page_parcels import move_parcel
from dsjax.engine.parcel_carrier import JaxCarrier
from dsjax.engine.prefill_engine import LocalLink, PrefillEngine
from dsjax.errors import UserError
from sharding import MeshSpec

_DECODES_ALONE = {
    "host_cache_bytes": 0,
    "disk_cache": None,
    "disk_cache_bytes": 0,
    "kv_events_config": None,
    "enable_eplb": False,
    "eplb_config": None,
    "record_steps": None,
}
"""Options that prefill instances do without, and their values there."""


def decode_args(args: EngineArgs) -> EngineArgs:
    """The options of the side that makes tokens."""
    return replace(args, mesh=args.decode_mesh, prefill_mesh=None, decode_mesh=None, prefill_instances=1)


def prefill_args(args: EngineArgs) -> EngineArgs:
    """The options of a prefill instance."""
    own = {"mesh": args.prefill_mesh, "redundant_experts": args.num_redundant}
    return replace(decode_args(args), **own, **_DECODES_ALONE)


def load_separated(args: EngineArgs, *, show_progress: bool = False) -> tuple[LoadedModel, list[LocalLink]]:
    """The model that decodes, and prefill instances whose threads have started.

    Raises:
        UserError, MeshError: options, model or devices that do not go together; before weights are read.
    """
    decode, prefill = MeshSpec.parse(args.decode_mesh), MeshSpec.parse(args.prefill_mesh)
    devices = _devices(args)
    groups = [devices[: decode.num_devices]]
    for instance in range(args.prefill_instances):
        start = decode.num_devices + instance * prefill.num_devices
        groups.append(devices[start : start + prefill.num_devices])
    loaded = load_model(decode_args(args), mesh=decode.arrange(groups[0]), transfers=True, show_progress=show_progress)
    own = prefill_args(args)
    links = []
    for group in groups[1:]:
        model = load_model(own, mesh=prefill.arrange(group), is_later=True, transfers=True, show_progress=show_progress)
        engine = PrefillEngine(
            model.executor,
            own.scheduler_config(model.executor.limits),
            timeout=args.transfer_timeout,
            async_scheduling=args.async_scheduling,
        )
        engine.start()
        links.append(LocalLink(engine, move_parcel))
    facts = replace(loaded.facts, prefill_meshes=[str(prefill)] * args.prefill_instances)
    return replace(loaded, facts=facts), links


def load_prefill(
    args: EngineArgs, *, port: int = 0, event_sink: EventSink | None = None, show_progress: bool = False
) -> PrefillServer:
    """A prefill engine for other processes, its programs compiled at first use; `.engine.core.executor.warm_up()` compiles them before.

    ``emulate_devices`` must have been called before, where devices are to be emulated. port: for messages; 0: a free one.
    event_sink: is given the events of pages.

    Raises:
        UserError, MeshError: options, model, devices or address that do not go together.
    """
    model = load_model(replace(args, **_DECODES_ALONE), transfers=True, show_progress=show_progress)
    engine = PrefillEngine(
        model.executor,
        args.scheduler_config(model.executor.limits),
        timeout=args.transfer_timeout,
        async_scheduling=args.async_scheduling,
        publisher=event_sink,
    )
    host = _host(args)
    server = PrefillServer(engine, JaxCarrier(jax.local_devices()[0], host), model.page_space, host, port)
    engine.start()
    return server


def remote_links(args: EngineArgs, loaded: LoadedModel) -> Callable[[str], RemoteLink]:
    """What gives the link to a prefill engine at an address, for a model that was loaded with ``transfers``."""
    carrier = JaxCarrier(jax.local_devices()[0], _host(args))
    shapes = loaded.executor.parcel_shapes
    return lambda address: RemoteLink(address, carrier, loaded.page_space, shapes, args.transfer_timeout)


def _host(args: EngineArgs) -> str:
    """This host's address, as others reach it."""
    if args.transfer_host is not None:
        return args.transfer_host
    try:
        return socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return "127.0.0.1"


def _devices(args: EngineArgs) -> list[jax.Device]:
    """Enough of them, by process and id."""
    found = sorted(jax.devices(), key=lambda d: (d.process_index, getattr(d, "slice_index", 0) or 0, d.id))
    if len(found) < args.num_devices:
        instances = f"{args.prefill_instances} × " if args.prefill_instances > 1 else ""
        raise UserError(
            f"--decode-mesh {args.decode_mesh} and {instances}--prefill-mesh {args.prefill_mesh} want {args.num_devices} devices, "
            f"found {len(found)} of platform {found[0].platform!r}; use smaller meshes, or set JAX_PLATFORMS=cpu to emulate them in "
            "a fresh process"
        )
    return found
