"""Collectives of a dispatch and their bytes, computed from shapes without compiling anything.

``tests/sharding/test_dispatch_cost.py`` compares them with the lowered StableHLO, collective by collective.
"""

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
    """Return the collectives of one MoE layer on one device, in program order; none for an EP group of one rank.

    tokens: tokens per device (those of a DP rank divided by its ``tp`` ranks, rounded up). width: D. experts: physical
    experts over all ranks. dtype: compute dtype. rounds: rounds per chunk of ``padded`` and ``hierarchical`` (1 unless
    routing overflows ``capacity``).
    """
    group = group_of(spec, config, experts, platform)
    plan = exchange_plan(config, tokens, top_k, group)
    wire = WireFormat(width, plan.choices, jnp.dtype(dtype), config.wire == "fp8")
    return tuple(plan.kind.collectives(group, wire, plan, rounds))
