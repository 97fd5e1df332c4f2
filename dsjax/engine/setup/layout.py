"""``EngineLayout``: what an engine's programs are made of, before there is any weight: step, shapes of launches, and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from dsjax.checkpoint.source import Checkpoint
from dsjax.config import ModelConfig
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import cache as device_cache
from dsjax.engine.device import expert_programs
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.device.cache import Pool
from dsjax.engine.device.program_library import ProgramLibrary
from dsjax.engine.schedule.landing_area import MOST_LANDED
from dsjax.engine.schedule.page_loads import MOST_LOADED
from dsjax.engine.setup import tier_sizes
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import experts_per_exchange, make_step
from dsjax.engine.setup.memory import beside_the_cache
from dsjax.engine.transfer.messages import CHUNK_PAGES, MOST_KEPT
from dsjax.errors import UserError
from dsjax.model.step import ModelStep
from sharding import MeshSpec

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
    def of(cls, args: EngineArgs, checkpoint: Checkpoint, mesh: Mesh) -> EngineLayout:
        """Lay out the model that ``args`` describe, on a mesh that ``args.mesh`` is the shape of.

        Raises:
            UserError, MeshError: options, model and mesh that do not go together.
        """
        config, spec, speculation = checkpoint.config, MeshSpec.parse(args.mesh), args.speculation
        mtp = speculation is not None
        step = make_step(args, config, spec, mesh, bf16_experts=checkpoint.bf16_experts, mtp=mtp)
        per_exchange = experts_per_exchange(args, step)
        sizes = _sizes(args, step, _max_model_len(args, config))
        mixed = mesh.devices.flat[0].platform != "cpu"
        buckets = Buckets.covering(sizes.max_rows_decode, sizes.max_chunk, mixed=mixed, speculation=speculation)
        return cls(step, sizes, buckets, speculation.num_speculative_tokens if mtp else 0, per_exchange)

    def limits(
        self, args: EngineArgs, library: ProgramLibrary, params: Mapping[str, Any], used: int | None
    ) -> ExecutorLimits:
        """``sizes`` with as many pages as are wanted and fit.

        params: or descriptions of them. used: bytes of a device's pool that are taken; None: ask the device.
        """
        if self.step.mesh.devices.flat[0].platform == "cpu":
            return _limits(args, self.step, self.sizes, None)
        mesh, known = str(self.step.spec), library.beside_the_cache
        if mesh not in known:
            known[mesh] = beside_the_cache(self.step, params, self.sizes, self.buckets, self.num_drafts)
        moving = expert_programs.exchange_bytes(self.step, self.per_exchange) if self.per_exchange else 0
        pool = Pool.of(self.step, known[mesh] + moving + chunk_bytes(args, self.step))
        return _limits(args, self.step, self.sizes, pool if pool is None or used is None else replace(pool, used=used))


def _max_model_len(args: EngineArgs, config: ModelConfig) -> int:
    if args.max_model_len is not None and args.max_model_len > config.max_position_embeddings:
        raise UserError(
            f"--max-model-len is {args.max_model_len}, but the model has {config.max_position_embeddings} positions; lower it"
        )
    return args.max_model_len or config.max_position_embeddings


def chunk_bytes(args: EngineArgs, step: ModelStep) -> int:
    """Bytes of a device for pages on their way to another engine, or from one, where there is such an engine: the most that are there
    at once if chunks are full."""
    landing = MOST_LANDED + MOST_LOADED  # what has come, and what is staged
    pages = {"agg": 0, "prefill": MOST_KEPT + CHUNK_PAGES, "decode": landing}[args.disaggregation_mode]
    return pages * device_cache.bytes_per_page(step)


def _sizes(args: EngineArgs, step: ModelStep, max_model_len: int) -> ExecutorLimits:
    """The executor's sizes but for the cache's, which has the fewest pages that can be."""
    sequences = args.max_num_seqs or min(
        max(LEAST_SEQUENCES, TOTAL_SEQUENCES // step.spec.dp_size), args.max_num_batched_tokens
    )
    return ExecutorLimits(
        max_rows_decode=sequences,
        max_rows_prefill=sequences,
        max_chunk=min(args.prefill_chunk, args.max_num_batched_tokens, max_model_len),
        page_size=args.page_size,
        pages_per_rank=2,
        num_ranks=step.spec.dp_size,
        max_model_len=max_model_len,
        vocab_size=step.config.vocab_size,
        transfers=args.is_side,
    )


def _limits(args: EngineArgs, step: ModelStep, sizes: ExecutorLimits, pool: Pool | None) -> ExecutorLimits:
    """``sizes`` with as many pages as are wanted and fit."""
    wanted = -(-args.cache_tokens // args.page_size) if args.cache_tokens else sizes.max_rows_decode * sizes.max_pages
    pages = device_cache.pages_that_fit(step, wanted + 1, pool)
    room = (pages - 1) * args.page_size
    if args.cache_tokens and room < args.cache_tokens:
        raise UserError(
            f"--cache-tokens is {args.cache_tokens:,}, but the memory of a device has room for {room:,} tokens; lower it to {room}, "
            "or leave it out to take what fits"
        )
    if args.max_model_len and room < args.max_model_len:
        raise UserError(
            f"--max-model-len is {args.max_model_len:,}, but the cache of a DP rank holds {room:,} tokens, so a request of that length "
            "could never run; lower it"
            + (
                f", or raise --cache-tokens from {args.cache_tokens:,}"
                if args.cache_tokens
                else " or use a mesh of more devices"
            )
        )
    tiers = tier_sizes.below(args, step)
    moves = sizes.transfers or args.page_source is not None or any(tiers.values())
    return replace(sizes, pages_per_rank=pages, moves_pages=moves, **tiers)
