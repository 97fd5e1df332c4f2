"""Load the engines of disaggregated prefill: both sides in one process, a prefill side, or a decode side's links."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax

from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.source import open_checkpoint
from dsjax.engine.elastic.generations import Generations
from dsjax.engine.elastic.transfer_processes import chunk_owners, endpoint_of, remote_chunks, space_of, transport_of
from dsjax.engine.engine import attachments_of
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.engine.schedule.page_events import EventSink
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.facts import PrefillSizes
from dsjax.engine.setup.loading import LoadedEngine, load_model
from dsjax.engine.setup.side_options import decode_args, naming_prefill, prefill_args
from dsjax.engine.setup.sizes import EngineLayout
from dsjax.engine.transfer.chunk_network import ChunkServer
from dsjax.engine.transfer.page_chunks import move_chunk
from dsjax.engine.transfer.page_network import PrefillServer, RemoteLinks
from dsjax.engine.transfer.prefill_links import LocalLink
from dsjax.errors import UserError
from dsjax.hosts.group import HostGroup
from sharding import MeshSpec
from sharding.mesh import device_order


def load_separated(args: EngineArgs, *, show_progress: bool = False) -> tuple[LoadedEngine, LocalLink]:
    """Load the decode engine's model and start the prefill engine, on disjoint devices of this process. The facts describe both.

    Raises:
        UserError, MeshError: options, model or devices do not go together. This is found before weights are read.
    """
    decode, prefill = MeshSpec.parse(args.decode_mesh), MeshSpec.parse(args.prefill_mesh)
    devices = sorted(jax.devices(), key=device_order)
    if len(devices) < args.num_devices:
        raise UserError(
            f"--decode-mesh {args.decode_mesh} and --prefill-mesh {args.prefill_mesh} want {args.num_devices} devices, "
            f"found {len(devices)} of platform {devices[0].platform!r}; use smaller meshes, or set JAX_PLATFORMS=cpu to emulate them in "
            "a fresh process"
        )
    meshes = [
        decode.arrange(devices[: decode.num_devices]),
        prefill.arrange(devices[decode.num_devices : args.num_devices]),
    ]
    prefill_options = prefill_args(args)
    with naming_prefill(args):  # before the decode side's weights are read
        EngineLayout.of(prefill_options, open_checkpoint(resolve(args.model, revision=args.revision)), meshes[1])
    with ExitStack() as opened:
        loaded = load_model(decode_args(args), mesh=meshes[0], show_progress=show_progress)
        opened.callback(loaded.executor.shutdown)
        with naming_prefill(args):
            model = load_model(prefill_options, mesh=meshes[1], is_later=True, show_progress=show_progress)
        opened.callback(model.executor.shutdown)
        engine = _engine_of(prefill_options, model)
        opened.pop_all()
    engine.start()
    facts = replace(loaded.facts, prefill_meshes=[str(prefill)], prefill_sizes=PrefillSizes.of(model.facts))
    return replace(loaded, facts=facts), LocalLink(engine, move_chunk)


def _engine_of(args: EngineArgs, model: LoadedEngine, sink: EventSink | None = None, **options: Any) -> PrefillEngine:
    config = args.scheduler_config(model.executor.limits)
    options |= {"timeout": args.transfer_timeout, "async_scheduling": args.async_scheduling}
    return PrefillEngine(
        model.executor, config, attachments=attachments_of(config, args, () if sink is None else (sink,)), **options
    )


def load_prefill(
    args: EngineArgs,
    group: HostGroup | None = None,
    *,
    port: int = 0,
    event_sink: EventSink | None = None,
    show_progress: bool = False,
) -> PrefillServer:
    """Start a prefill engine for other processes. Programs compile at first use or in `.warm_up()`.

    Call `emulate_devices` or `join_group` first.

    Args:
        group: the group, of which this is process 0. port: for messages; 0: the group's, or a free one. event_sink: receives KV events.

    Raises:
        UserError, MeshError: options, model, devices or address do not go together.
        GroupError: another process of the group could not load.
    """
    args, library = replace(args, disaggregation_mode="prefill"), ProgramLibrary()
    with ExitStack() as opened:
        endpoint = endpoint_of(args, group, port)
        opened.callback(endpoint.release)
        model = load_model(args, group, library=library, show_progress=show_progress)
        opened.callback(model.executor.shutdown)
        owners = chunk_owners(endpoint.address, group)
        mesh_changer = None if group is None else Generations(args, group, model, library)
        engine = _engine_of(args, model, event_sink, owners=owners, mesh_changer=mesh_changer)
        transport = transport_of(args, endpoint.host)
        open_chunk = lambda number, take: take(engine.buffers.take(number))  # noqa: E731
        chunks = ChunkServer(endpoint, open_chunk, transport, args.transfer_timeout)
        server = PrefillServer(engine, chunks, space_of(args, model), endpoint)
        opened.pop_all()
    engine.start()
    return server


def remote_links(args: EngineArgs, loaded: LoadedEngine, group: HostGroup | None = None) -> RemoteLinks:
    """Make the links of a decode engine to prefill engines in other processes."""
    endpoint = endpoint_of(args, group)
    with ExitStack() as opened:
        opened.callback(endpoint.release)
        links = RemoteLinks(remote_chunks(args, loaded, endpoint), space_of(args, loaded))
        opened.pop_all()
    return links
