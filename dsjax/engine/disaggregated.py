"""From the options of a separated engine to its models: decode's on the first devices, each prefill instance's on the next ones."""

from __future__ import annotations

from dataclasses import replace

import jax

from dsjax.engine.args import EngineArgs
from dsjax.engine.loading import LoadedModel, load_model
from dsjax.engine.page_parcels import move_parcel
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
