"""``EngineLayout``: what an engine's programs are made of before there is any weight: step, shapes of launches, and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from dsjax.checkpoint.source import Checkpoint
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import cache as device_cache
from dsjax.engine.device import device_state, expert_programs
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.device.cache import Pool
from dsjax.engine.device.lowered_programs import LoweredPrograms
from dsjax.engine.device.process import available_bytes
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.engine.schedule.landing_area import MOST_LANDED
from dsjax.engine.schedule.page_loads import MOST_LOADED
from dsjax.engine.schedule.pages import held_windows, window_columns
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import experts_per_exchange, make_step
from dsjax.engine.tiers.page_folder import bytes_on_disk
from dsjax.engine.transfer.messages import CHUNK_PAGES, MOST_KEPT
from dsjax.errors import UserError
from dsjax.model.cache_groups import KEPT_WINDOWS, Table
from dsjax.model.parameters import device_bytes
from dsjax.model.stage import Stage
from dsjax.model.step import ModelStep
from sharding import MeshSpec
from sharding.cut import Worker

TOTAL_SEQUENCES = 256
"""Running requests over all DP ranks when ``--max-num-seqs`` is not given."""
LEAST_SEQUENCES = 8
"""And at least so many on each rank."""


@dataclass(frozen=True)
class EngineLayout:
    """A step, the shapes of its launches, and the sizes that bound them.

    sizes: with the fewest pages that can be. per_exchange: experts that a rank sends and receives at once; 0: they stay where they are.
    """

    step: ModelStep
    sizes: ExecutorLimits
    buckets: Buckets
    num_drafts: int
    per_exchange: int

    @classmethod
    def of(cls, args: EngineArgs, checkpoint: Checkpoint, mesh: Mesh, stage: Stage | None = None) -> EngineLayout:
        """Lay out the model that ``args`` describe, or a stage of it, on a mesh. Raises what ``make_step`` raises."""
        config, spec, speculation = checkpoint.config, MeshSpec.parse(args.mesh).stage, args.speculation
        mtp = speculation is not None
        step = make_step(args, config, spec, mesh, bf16_experts=checkpoint.bf16_experts, mtp=mtp, stage=stage)
        per_exchange = experts_per_exchange(args, step)
        sizes = _sizes(args, step)
        mixed = mesh.devices.flat[0].platform != "cpu"
        buckets = Buckets.covering(sizes.max_rows_decode, sizes.max_chunk, mixed=mixed, speculation=speculation)
        return cls(step, sizes, buckets, args.num_drafts, per_exchange)

    def limits(
        self,
        args: EngineArgs,
        library: ProgramLibrary,
        params: Mapping[str, Any],
        used: int | None,
        experts: Worker | None = None,
    ) -> ExecutorLimits:
        """Give ``sizes`` as many pages as are wanted and fit.

        params: or descriptions of them. used: bytes of a device's pool that are taken; None: ask the device.
        experts: see ``LoweredPrograms``.
        """
        if self.step.mesh.devices.flat[0].platform == "cpu":
            return _limits(args, self.step, self.sizes, None)
        key, known = (str(self.step.spec), self.step.stage), library.beside_the_cache
        if key not in known:
            known[key] = beside_the_cache(self.step, params, self.sizes, self.buckets, self.num_drafts, experts)
        moves = self.per_exchange and self.step.apart is None  # else it takes memory of other devices
        moving = expert_programs.exchange_bytes(self.step, self.per_exchange) if moves else 0
        pool = Pool.of(self.step, known[key] + moving + chunk_bytes(args, self.step))
        return _limits(args, self.step, self.sizes, pool if pool is None or used is None else replace(pool, used=used))


def chunk_bytes(args: EngineArgs, step: ModelStep) -> int:
    """Bytes of a device for pages on their way to another engine, or from one.

    Of a prefill side, the chunks that it keeps and one that is being made; of a decode side, those that have come and what is staged.
    """
    sides = {"agg": 0, "prefill": MOST_KEPT + CHUNK_PAGES, "decode": MOST_LANDED + MOST_LOADED}
    chunk = CHUNK_PAGES * device_cache.bytes_per_page(step)
    of_windows = device_state.MOVED_WINDOWS * device_cache.bytes_per_page(step, "window")
    return sides[args.disaggregation_mode] // CHUNK_PAGES * max(chunk, of_windows)


def _sizes(args: EngineArgs, step: ModelStep) -> ExecutorLimits:
    """Choose the executor's sizes but for the cache's, which has the fewest pages that can be."""
    positions, page, kept = step.config.max_position_embeddings, step.page_size, args.cache_tokens
    if kept is not None and kept % page:
        raise UserError(
            f"--cache-tokens is {kept}, which is no whole number of pages of {page} tokens (--page-size); give {-(-kept // page) * page}"
        )
    if args.max_model_len is not None and args.max_model_len > positions:
        raise UserError(f"--max-model-len is {args.max_model_len}, but the model has {positions} positions; lower it")
    max_model_len = args.max_model_len or positions
    sequences = args.max_num_seqs or min(
        max(LEAST_SEQUENCES, TOTAL_SEQUENCES // step.spec.dp_size), args.max_num_batched_tokens
    )
    sizes = ExecutorLimits(
        max_rows_decode=sequences,
        max_rows_prefill=sequences,
        max_chunk=min(args.chunk_tokens, max_model_len),
        page_size=page,
        pages_per_rank=2,
        num_ranks=step.spec.dp_size,
        max_model_len=max_model_len,
        vocab_size=step.config.vocab_size,
        transfers=args.is_side,
        num_stages=1 if step.stage is None else step.stage.count,
    )
    return with_windows(sizes, args, step)


def with_windows(limits: ExecutorLimits, args: EngineArgs, step: ModelStep) -> ExecutorLimits:
    """Add window pages, where the model has any: all that requests may hold, so that none waits for one, and those that are kept."""
    if not any(group.table == "window" for group in step.cache_groups):
        return limits
    drafts = args.num_drafts
    tokens, page_size = max(2, limits.num_stages) * args.max_num_batched_tokens, limits.page_size
    held = held_windows(limits.max_rows_decode, tokens, page_size, drafts)
    return replace(
        limits,
        windows_per_rank=device_cache.with_kept_windows(step, limits.pages_per_rank, held),
        window_columns=window_columns(max(limits.max_chunk, 3 * drafts + 2), page_size),
    )


def _limits(args: EngineArgs, step: ModelStep, sizes: ExecutorLimits, pool: Pool | None) -> ExecutorLimits:
    """Give ``sizes`` as many pages as are wanted and fit."""
    wanted = -(-args.cache_tokens // step.page_size) if args.cache_tokens else sizes.max_rows_decode * sizes.max_pages
    pages = device_cache.pages_that_fit(step, wanted + 1, pool, sizes.windows_per_rank)
    room = (pages - 1) * step.page_size
    if args.cache_tokens and room < args.cache_tokens:
        raise UserError(
            f"--cache-tokens is {args.cache_tokens:,}, but the memory of a device has room for {room:,} tokens; lower it to {room}, "
            "or leave it out to take what fits"
        )
    if args.max_model_len and room < args.max_model_len:
        cache_tokens = f", or raise --cache-tokens from {args.cache_tokens:,}" if args.cache_tokens else ""
        raise UserError(
            f"--max-model-len is {args.max_model_len:,}, but the cache of a DP rank holds {room:,} tokens, so a request of that length "
            f"could never run; lower it{cache_tokens or ' or use a mesh of more devices'}"
        )
    for flag, given in (("--disk-cache", args.disk_cache), ("--page-source", args.page_source)):
        if given is not None and sizes.windows_per_rank:
            raise UserError(
                f"{flag} keeps pages of one kind, and this model also has window pages, without which the others are of no use; leave it "
                "out, or use --host-cache-bytes"
            )
    on_disk = 0 if args.disk_cache is None else bytes_on_disk(page_bytes(args, step))
    if on_disk and args.disk_cache_bytes < on_disk:
        raise UserError(
            f"--disk-cache-bytes is {args.disk_cache_bytes:,}, which is less than one page takes; give at least {on_disk:,}"
        )
    host_pages, host_windows = _host_pages(args, step)
    return replace(
        sizes,
        pages_per_rank=pages,
        windows_per_rank=device_cache.with_kept_windows(step, pages, sizes.windows_per_rank),
        moves_pages=bool(sizes.transfers or args.page_source is not None or on_disk or host_pages),
        host_pages_per_rank=host_pages,
        host_windows_per_rank=host_windows,
        disk_pages=args.disk_cache_bytes // on_disk if on_disk else 0,
        disk_page_bytes=on_disk,
    )


def _host_pages(args: EngineArgs, step: ModelStep) -> tuple[int, int]:
    """Count the pages of each kind of each DP rank for which ``--host-cache-bytes`` has room."""
    if not args.host_cache_bytes:
        return 0, 0
    each, window = page_bytes(args, step), page_bytes(args, step, "window")
    room = args.host_cache_bytes // step.spec.dp_size
    windows = max(1, int(KEPT_WINDOWS * room) // window) if window else 0
    pages = (room - windows * window) // each
    if pages < 1:
        least = each + window
        raise UserError(
            f"--host-cache-bytes is {args.host_cache_bytes:,}, which is less than a page for each of {step.spec.dp_size} DP ranks; "
            f"a page takes {least:,} bytes: give at least {least * step.spec.dp_size:,}"
        )
    return pages, windows


def page_bytes(args: EngineArgs, step: ModelStep, table: Table = "context") -> int:
    """Count the bytes of a page of a kind outside the devices: all layers, all shards, and which slots the MTP module has filled.

    step: of any stage of the model, where there are several.
    """
    has_module = args.speculation is not None
    layers = step.cache_layers if step.stage is None else step.stage.model_layers + has_module
    groups = step.attention.groups(range(layers), step.page_size)
    filled = step.page_size * (has_module and step.fills_windows == (table == "window"))
    return sum(group.page_bytes for group in groups if group.table == table) + filled


def check_host_memory(args: EngineArgs, *steps: ModelStep, held: int = 0) -> None:
    """Refuse weights that the host's memory cannot hold: the kernel would end the process while they are read.

    steps: the model's one, or those of its stages. held: bytes of another mesh's weights, whose place they take.
    """
    if (available := available_bytes()) is None:
        return
    available += held
    devices = sum(len(step.mesh.local_devices) for step in steps)
    needed = sum(weight_bytes(step) * len(step.mesh.local_devices) for step in steps)
    if args.expert_mesh is not None and args.afd_role == "both":
        [step] = steps
        devices += step.apart.spec.num_devices
        needed += step.apart.bytes_of_device * step.apart.spec.num_devices
    if needed > available:
        raise UserError(
            f"the weights of {args.model} take {needed / 1e9:,.1f} GB on {devices} emulated devices, and this "
            f"host has {available / 1e9:,.1f} GB of memory available; use a mesh of fewer devices or a smaller model, or look at "
            f"this one with dsjax dryrun --model {args.model} --mesh {MeshSpec.parse(args.mesh)}"
        )


def check_device_memory(args: EngineArgs, step: ModelStep, pool: Pool | None) -> None:
    """Refuse weights that the pool of a device cannot hold, before they are read. A pool that is not known holds anything."""
    needed, on = weight_bytes(step), str(step.spec)
    if args.expert_mesh is not None and args.afd_role == "both" and step.apart.bytes_of_device > needed:
        needed, on = step.apart.bytes_of_device, f"ep={step.apart.spec.ep_size} of experts"
    if pool is None or needed <= pool.room:
        return
    ways = ["use a mesh of more devices"] + (["--weights fp8"] if args.weights == "auto" else [])
    whole = pool.size / args.gpu_memory_utilization
    if needed < 0.95 * whole:
        ways.append(f"a --gpu-memory-utilization above {needed / whole:.2f} (it is {args.gpu_memory_utilization:g})")
    raise UserError(
        f"the weights of {args.model} take {needed / 1e9:,.1f} GB on each device of {on}, and the pool of a device has "
        f"{pool.room / 1e9:,.1f} GB of {pool.size / 1e9:,.1f} GB free; {', or '.join(ways)}. "
        "dsjax dryrun --fit says what a mesh has room for"
    )


def weight_bytes(step: ModelStep) -> int:
    """Count the bytes of all weights on one device."""
    return sum(device_bytes(step.abstract_parameters()).values())


def beside_the_cache(
    step: ModelStep,
    params: Mapping[str, Any],
    limits: ExecutorLimits,
    buckets: Buckets,
    num_drafts: int,
    experts: Worker | None = None,
) -> int:
    """Bytes of a device that the launch with most tokens needs beside weights and cache, as its compiler counts them.

    Temporaries, two results (of two steps in flight), and the state beside the cache. ``limits`` may have any number of pages.
    """
    state = device_state.describe(step, limits, num_drafts)
    programs = LoweredPrograms(step, params, state, limits, experts=experts)
    shapes = [programs.shape(decode, prefill) for decode, prefill, _ in buckets.shapes()]
    largest = max(shapes, key=lambda shape: shape.tokens)
    stats = programs.lower_step(largest).compile().memory_analysis()
    arrays = {str(index): array for index, array in enumerate(jax.tree.leaves(replace(state, cache={})))}
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.temp_size_in_bytes + 2 * results + sum(device_bytes(arrays).values())
