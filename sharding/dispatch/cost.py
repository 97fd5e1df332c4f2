"""What a dispatch puts on the wire, as arithmetic on shapes: its collectives and their bytes, before anything is compiled.

``tests/sharding/test_dispatch_cost.py`` holds this against the lowered StableHLO, collective by collective.
"""

from __future__ import annotations

import jax.numpy as jnp

from sharding.dispatch.collectives import Collective
from sharding.dispatch.config import DispatchConfig
from sharding.dispatch.entry import exchange_plan, group_of
from sharding.dispatch.wire import WireFormat
from sharding.mesh import MeshSpec


def dispatch_collectives(
    spec: MeshSpec,
    config: DispatchConfig,
    *,
    tokens: int,
    width: int,
    top_k: int,
    experts: int,
    dtype: jnp.dtype,
    platform: str,
    rounds: int = 1,
) -> tuple[Collective, ...]:
    """The collectives of one MoE layer on one device, in program order; none for an EP group of one rank.

    tokens: tokens of one device, that is of a DP rank divided over its ``tp`` ranks, rounded up; width: D; experts: physical
    experts over all ranks; dtype: the compute dtype; rounds: of ``padded`` and
    ``hierarchical``, per chunk (1 unless routing overflows ``capacity``).
    """
    group = group_of(spec, config, experts, platform)
    plan = exchange_plan(config, tokens, top_k, group)
    wire = WireFormat(width, plan.choices, jnp.dtype(dtype), config.wire == "fp8")
    return tuple(plan.kind.collectives(group, wire, plan, rounds))
