"""``EngineLayout``: the step, batch shapes and sizes that determine an engine's programs before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from dsjax.checkpoint.source import Checkpoint
from dsjax.config import ModelConfig
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
from dsjax.engine.setup.side_options import check_cache_tokens
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
"""Total running requests of all DP ranks, if ``--max-num-seqs`` is not given."""
LEAST_SEQUENCES = 8
"""Minimum running requests per rank, if ``--max-num-seqs`` is not given."""


@dataclass(frozen=True)
class EngineLayout:
    """A step, the shapes of its batches, and the sizes that bound them.

    sizes: sizes with the minimum number of pages. per_exchange: experts that a rank sends and receives at once; 0: experts do not move.
    config: of the whole model, also if the step is of a stage.
    """

    step: ModelStep
    sizes: ExecutorLimits
    buckets: Buckets
    num_drafts: int
    per_exchange: int
    config: ModelConfig

    @classmethod
    def of(cls, args: EngineArgs, checkpoint: Checkpoint, mesh: Mesh, stage: Stage | None = None) -> EngineLayout:
        """Return the layout of the model that ``args`` describe, or of a stage, on a mesh. Raises the errors of ``make_step``."""
        config, spec, speculation = checkpoint.config, MeshSpec.parse(args.mesh).stage, args.speculation
        mtp = speculation is not None
        step = make_step(args, config, spec, mesh, bf16_experts=checkpoint.bf16_experts, mtp=mtp, stage=stage)
        per_exchange = experts_per_exchange(args, step)
        sizes = _sizes(args, step)
        mixed = mesh.devices.flat[0].platform != "cpu"
        buckets = Buckets.covering(sizes.max_rows_decode, sizes.max_chunk, mixed=mixed, speculation=speculation)
        return cls(step, sizes, buckets, args.num_drafts, per_exchange, config)

    def limits(
        self,
        args: EngineArgs,
        library: ProgramLibrary,
        params: Mapping[str, Any],
        used: int | None,
        experts: Worker | None = None,
    ) -> ExecutorLimits:
        """Return ``sizes`` with the requested number of pages, or as many as fit.

        params: arrays or their descriptions. used: used bytes of a device's memory pool; None: ask the device.
        experts: see ``LoweredPrograms``.
        """
        if self.step.mesh.devices.flat[0].platform == "cpu":
            return self._limits(args, None)
        key, cached = (str(self.step.spec), self.step.stage), library.beside_the_cache
        if key not in cached:
            cached[key] = beside_the_cache(self.step, params, self.sizes, self.buckets, self.num_drafts, experts)
        moves = self.per_exchange and self.step.apart is None  # experts apart use memory of other devices
        moving = expert_programs.exchange_bytes(self.step, self.per_exchange) if moves else 0
        pool = Pool.of(self.step, cached[key] + moving + chunk_bytes(args, self.step))
        return self._limits(args, pool if pool is None or used is None else replace(pool, used=used))

    def _limits(self, args: EngineArgs, pool: Pool | None) -> ExecutorLimits:
        """Return ``sizes`` with the requested number of pages, or as many as fit."""
        step, sizes = self.step, self.sizes
        wanted = (
            -(-args.cache_tokens // step.page_size) if args.cache_tokens else sizes.max_rows_decode * sizes.max_pages
        )
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
        on_disk = 0 if args.disk_cache is None else bytes_on_disk(self.page_bytes())
        window_on_disk = bytes_on_disk(self.page_bytes("window")) if on_disk and sizes.windows_per_rank else 0
        if args.disk_cache_bytes < on_disk + window_on_disk:
            raise UserError(
                f"--disk-cache-bytes is {args.disk_cache_bytes:,}, which is less than one page takes; give at least "
                f"{on_disk + window_on_disk:,}"
            )
        host_pages, host_windows = self._host_pages(args)
        return replace(
            sizes,
            pages_per_rank=pages,
            windows_per_rank=device_cache.with_kept_windows(step, pages, sizes.windows_per_rank),
            moves_pages=bool(sizes.transfers or args.page_source is not None or on_disk or host_pages),
            host_pages_per_rank=host_pages,
            host_windows_per_rank=host_windows,
            disk_pages=args.disk_cache_bytes // on_disk if on_disk else 0,
            disk_page_bytes=on_disk,
            disk_pages_per_window=-(-window_on_disk // on_disk) if window_on_disk else 1,
        )

    def _host_pages(self, args: EngineArgs) -> tuple[int, int]:
        """Return the number of pages and window pages per DP rank that fit in ``--host-cache-bytes``."""
        if not args.host_cache_bytes:
            return 0, 0
        step, bytes_per_page, window = self.step, self.page_bytes(), self.page_bytes("window")
        room = args.host_cache_bytes // step.spec.dp_size
        windows = max(1, int(KEPT_WINDOWS * room) // window) if window else 0
        pages = (room - windows * window) // (bytes_per_page or window)
        if pages < 1:
            least = bytes_per_page + window
            raise UserError(
                f"--host-cache-bytes is {args.host_cache_bytes:,}, which is less than a page for each of {step.spec.dp_size} DP ranks; "
                f"a page takes {least:,} bytes: give at least {least * step.spec.dp_size:,}"
            )
        return pages, windows

    def page_bytes(self, table: Table = "context") -> int:
        """Return the bytes of a page of a kind outside the devices: layers of all stages, all shards, and flags of slots that the MTP
        module has filled."""
        step, drafts = self.step, self.num_drafts > 0
        layers = range(self.config.num_hidden_layers + drafts)
        groups = replace(step.attention, config=self.config).groups(layers, step.page_size)
        filled = step.page_size * (drafts and step.mtp_fills_windows == (table == "window"))
        return sum(group.page_bytes for group in groups if group.table == table) + filled


def chunk_bytes(args: EngineArgs, step: ModelStep) -> int:
    """Return the bytes per device for pages in transfer to or from another engine.

    Prefill side: the chunks that it keeps, and one being computed. Decode side: the received chunks and the staged pages.
    """
    sides = {"agg": 0, "prefill": MOST_KEPT + CHUNK_PAGES, "decode": MOST_LANDED + MOST_LOADED}
    chunk = CHUNK_PAGES * device_cache.bytes_per_page(step)
    of_windows = device_state.MOVED_WINDOWS * device_cache.bytes_per_page(step, "window")
    return sides[args.disaggregation_mode] // CHUNK_PAGES * max(chunk, of_windows)


def _sizes(args: EngineArgs, step: ModelStep) -> ExecutorLimits:
    """Return the executor's sizes, with the minimum number of cache pages."""
    positions, page = step.config.max_position_embeddings, step.page_size
    check_cache_tokens(args.cache_tokens, page)
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
    """Add window pages if the model has any: the most that requests can hold, so that none has to wait, plus the kept ones."""
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


def check_host_memory(args: EngineArgs, *steps: ModelStep, held: int = 0) -> None:
    """Raise a ``UserError`` if the weights do not fit in host memory; otherwise the OOM killer would end the process while it loads them.

    steps: the steps of all stages, or the model's single step. held: bytes of another mesh's weights, which these replace.
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
    """Raise a ``UserError`` if the weights do not fit in a device's memory pool, before they are read. An unknown pool holds anything."""
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
    """Return the bytes of all weights on one device."""
    return sum(device_bytes(step.abstract_parameters()).values())


def beside_the_cache(
    step: ModelStep,
    params: Mapping[str, Any],
    limits: ExecutorLimits,
    buckets: Buckets,
    num_drafts: int,
    experts: Worker | None = None,
) -> int:
    """Return the bytes per device that the largest batch needs besides weights and cache, as reported by the compiler.

    Includes temporaries, two results (of two steps in flight), and state outside the cache. ``limits`` may have any number of pages.
    """
    state = device_state.describe(step, limits, num_drafts)
    programs = LoweredPrograms(step, params, state, limits, experts=experts)
    shapes = [programs.shape(decode, prefill) for decode, prefill, _ in buckets.shapes()]
    largest = max(shapes, key=lambda shape: shape.tokens)
    stats = programs.lower_step(largest).compile().memory_analysis()
    arrays = {str(index): array for index, array in enumerate(jax.tree.leaves(replace(state, cache={})))}
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.temp_size_in_bytes + 2 * results + sum(device_bytes(arrays).values())
