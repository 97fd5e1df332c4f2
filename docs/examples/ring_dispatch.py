"""A dispatch method of one's own: tokens go round a ring of ranks, and each rank adds what its experts give them.

    LLM(model="demo", mesh="dp=8", dispatch=Ring)
    dispatch(spec, mesh, DispatchConfig(method=Ring), ...)

As many steps as there are ranks, each with a neighbour alone: what suits links that form a ring, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sharding import MeshError
from sharding.dispatch import Collective, ExpertGroup, Method, Transit, WireFormat, over_width, sent_to_experts


@dataclass(frozen=True)
class Ring(Method):
    """Packed tokens and their float32 sums travel together, until they are back where they began."""

    group: ExpertGroup
    wire: WireFormat

    name = "ring"

    @classmethod
    def of(cls, group, wire, plan, fused_shared):
        if fused_shared:
            raise MeshError("ring has no expert for a rank's own tokens; leave out --enable-shared-experts-fusion")
        return cls(group, wire)

    @classmethod
    def collectives(cls, group, wire, plan, rounds):
        steps, rows = plan.chunks * group.size, plan.rows * group.width
        sizes = (("dispatch", wire.row_bytes), ("combine", 4 * wire.width))
        ring = [
            Collective("collective_permute", purpose, group.axes, group.size, rows * size, rows * size, steps)
            for purpose, size in sizes
        ]
        pooled = over_width(group, plan.rows, wire.row_bytes, 4 * wire.width, plan.chunks)
        return (ring if group.size > 1 else []) + pooled

    def prepare(self, x_TD, slots_TK, weights_TK):
        return Transit(self.wire.pack(x_TD, slots_TK, weights_TK, jnp.int32(0)), slots_TK)

    def compute(self, transit, experts):
        ring = [(rank, (rank + 1) % self.group.size) for rank in range(self.group.size)]
        packed_NW = self.group.pool_width(transit.rows)  # of all ranks that hold a part of the same experts

        def step(_, carry):
            packed_NW, sums_ND, seen = carry
            rows, slots_NK, weights_NK, _ = self.wire.unpack(packed_NW)
            more_ND, more_seen = experts(rows, slots_NK, weights_NK)
            sums_ND = sums_ND + more_ND.astype(jnp.float32)
            if self.group.size > 1:
                packed_NW, sums_ND = (lax.ppermute(a, self.group.axes, ring) for a in (packed_NW, sums_ND))
            return packed_NW, sums_ND, jax.tree.map(jnp.add, seen, more_seen)

        nothing = jnp.zeros((packed_NW.shape[0], self.wire.width), jnp.float32)
        seen = {"tokens_per_expert": jnp.zeros(self.group.experts, jnp.int32), "rows_received": jnp.int32(0)}
        start = (packed_NW, nothing, seen if experts.count else {})
        _, sums_ND, seen = lax.fori_loop(0, self.group.size, step, start)
        return Transit(self.group.share_width(sums_ND), (transit.kept, seen))

    def add(self, transit, experts):
        slots_TK, seen = transit.kept
        return transit.rows.astype(self.wire.dtype), sent_to_experts(self.group, seen, slots_TK, 1)
