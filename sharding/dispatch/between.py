"""``Between``: dispatch and combine between a mesh that holds the tokens and a mesh that holds the experts (AFD), driven by the host.

Within one mesh, a collective moves the rows. Here, three programs and two host copies replace it:

    | where         | step                                                                                      |
    |---------------|-------------------------------------------------------------------------------------------|
    | tokens' mesh  | ``Between.pack``: pack the rows of each token device for each expert device               |
    | host          | ``to_experts``: copy the rows to this process's expert devices (not to other processes')  |
    | experts' mesh | ``ExpertHalf.compute``: apply each device's experts to the rows that arrived              |
    | host          | ``to_tokens``: copy each expert device's results to the token devices                     |
    | tokens' mesh  | ``Between.add``: sum each token's results, in the order of choices or of expert devices   |

Shapes are static: in one round, a token device sends at most ``capacity`` rows to each expert device. Further rows need further rounds:
call ``pack`` with the round's number ``r``, ``store_terms`` with its results, and ``sum_terms`` at the end. The experts' mesh runs no
collective and keeps no state, so another mesh can replace it between two calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt

from sharding.dispatch.config import default_capacity
from sharding.dispatch.entry import ExpertsOfMesh, pad_per_dp_rank, unpad_per_dp_rank
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import RankExperts
from sharding.dispatch.route import cells_of, fill_cells, plan_route
from sharding.dispatch.statistics import DispatchStatistics
from sharding.dispatch.wire import WireFormat
from sharding.indices import counted
from sharding.mesh import MeshSpec
from sharding.on_ranks import on_ranks
from sharding.sums import add_in_order


def columns(wire: WireFormat, experts: int, returns_terms: bool) -> int:
    """Return the number of results per row: 1 for a sum, otherwise the number of choices or of local experts, whichever is smaller."""
    return min(wire.top_k, experts) if returns_terms else 1


@dataclass(frozen=True, eq=False)
class Between:
    """The tokens' half of one exchange.

    spec, mesh: of the token devices. expert_spec: of the expert devices, each of which holds whole experts (no width split).
    parts: number of equal runs of expert devices, each of which receives one array of rows: 1, or the number of processes that own them.
    tokens: number of tokens of the whole step, a multiple of ``spec.dp_size``. experts: total number of physical experts.
    wire: format of a packed row. by_choice: see ``DispatchConfig``. fixed_capacity: the capacity; None: use ``default_capacity``.
    """

    spec: MeshSpec
    mesh: Mesh
    expert_spec: MeshSpec
    parts: int
    tokens: int
    experts: int
    wire: WireFormat
    by_choice: bool
    fixed_capacity: int | None = None

    @cached_property
    def group(self) -> ExpertGroup:
        """The expert devices."""
        return ExpertGroup.of(self.expert_spec, self.experts, self.mesh.devices.flat[0].platform, self.by_choice)

    @property
    def senders(self) -> int:
        """Number of token devices."""
        return self.spec.num_devices

    @property
    def rows(self) -> int:
        """Tokens per token device, including padding."""
        return -(-self.tokens // self.spec.dp_size // self.spec.tp_size)

    @cached_property
    def capacity(self) -> int:
        """Rows that a token device can send to one expert device in a round."""
        return self.fixed_capacity or default_capacity(self.rows, self.wire.top_k, self.group.size, overlapped=True)

    @property
    def part_devices(self) -> int:
        """Expert devices per part."""
        return self.group.size // self.parts

    @property
    def returns_terms(self) -> bool:
        """Whether the results of a token's experts are returned separately instead of as a sum."""
        return self.by_choice and self.group.size > 1

    @property
    def columns(self) -> int:
        """Results that an expert device returns per row."""
        return columns(self.wire, self.group.experts, self.returns_terms)

    @property
    def round_rows(self) -> int:
        """Rows that all token devices send per round, including empty ones."""
        return self.senders * self.group.size * self.capacity

    @property
    def bytes_back(self) -> int:
        """Bytes returned per row; ``wire.row_bytes`` are sent."""
        return self.columns * self.wire.width * jnp.dtype(self.wire.dtype).itemsize

    @property
    def described_returns(self) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of the ``returned`` argument of ``add``: one array per part, each ordered by expert device."""
        shape = self.senders * self.part_devices * self.capacity * self.columns, self.wire.width
        return [jax.ShapeDtypeStruct(shape, self.wire.dtype, sharding=self._over_tokens)] * self.parts

    @property
    def described_terms(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of the ``terms_NKD`` argument of ``store_terms``: one term per choice of every token."""
        shape = self.senders * self.rows, self.wire.top_k, self.wire.width
        return jax.ShapeDtypeStruct(shape, self.wire.dtype, sharding=self._over_tokens)

    @property
    def _over_tokens(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(self.spec.token_axes))

    def rounds(self, counts: Int[Array, "S E"]) -> int:
        """Return the number of rounds for the ``counts`` of ``pack``, on the host. Does not block if one round is always enough."""
        return 1 if self.capacity >= self.rows else max(1, -(-int(np.asarray(counts).max()) // self.capacity))

    def pack(
        self,
        x_TD: Float[Array, "T D"],
        slots_TK: Int[Array, "T K"],
        weights_TK: Float[Array, "T K"],
        r: Array | int = 0,
    ) -> tuple[list[UInt[Array, "N W"]], Int[Array, "S E"]]:
        """Return the rows of round ``r`` for each part, and each token device's total rows per expert device. Inside ``jit``, tokens' mesh.

        Arguments are as in ``dispatch``. A part's rows are sorted by token device, expert device and position in the queue. Unused
        positions hold rows that use no expert.
        """

        def on_device(x_TD, slots_TK, weights_TK, r):
            route = plan_route(self.group, slots_TK)
            unused = jnp.int32(0)
            rows = [self.wire.pack(x_TD, slots_TK, weights_TK, unused), self.wire.empty_row(unused)]
            cell_TK, _ = cells_of(route, self.capacity, r)
            row_of_cell = fill_cells(cell_TK, self.group.size * self.capacity)
            packed = jnp.concatenate(rows).take(row_of_cell, axis=0, mode="clip")
            return jnp.split(packed, self.parts), route.counts_G[None]

        inputs = self._padded(x_TD, 0), self._padded(slots_TK), self._padded(weights_TK.astype(jnp.float32), 0)
        return self._on_tokens(on_device, *inputs, r)

    def loads(self, slots_TK: Int[Array, "T K"]) -> Int[Array, "S X"]:
        """Return the number of tokens per token device and physical expert. Inside ``jit``. slots_TK: as in ``pack``."""
        return self._on_tokens(lambda slots_TK, _: counted(slots_TK, self.experts)[None], self._padded(slots_TK), 0)

    def add(self, returned: Sequence[Float[Array, "M D"]], slots_TK: Int[Array, "T K"]) -> Float[Array, "T D"]:
        """Return each token's sum of the results of a single round. Inside ``jit`` on the tokens' mesh. slots_TK: as in ``pack``."""

        def on_device(slots_TK, returned, _):
            return self._sum(self._take_terms(returned, slots_TK, 0, otherwise=0), slots_TK)

        y_TD = self._on_tokens(on_device, self._padded(slots_TK), list(returned), 0)
        return unpad_per_dp_rank(y_TD, self.tokens, self.spec.dp_size)

    def store_terms(
        self,
        terms_NKD: Float[Array, "N K D"],
        returned: Sequence[Float[Array, "M D"]],
        slots_TK: Int[Array, "T K"],
        r: Array,
    ) -> Float[Array, "N K D"]:
        """Return the terms of the earlier rounds and of round ``r``. Inside ``jit`` on the tokens' mesh."""

        def on_device(slots_TK, terms_TKD, returned, r):
            return self._take_terms(returned, slots_TK, r, otherwise=terms_TKD)

        return self._on_tokens(on_device, self._padded(slots_TK), terms_NKD, list(returned), r)

    def sum_terms(self, terms_NKD: Float[Array, "N K D"], slots_TK: Int[Array, "T K"]) -> Float[Array, "T D"]:
        """Return each token's sum of the terms of all rounds. Inside ``jit`` on the tokens' mesh."""
        y_TD = self._on_tokens(
            lambda slots_TK, terms, _: self._sum(terms, slots_TK), self._padded(slots_TK), terms_NKD, 0
        )
        return unpad_per_dp_rank(y_TD, self.tokens, self.spec.dp_size)

    def statistics(self, counts: Mapping[str, np.ndarray], *, padded: bool) -> DispatchStatistics:
        """Return the statistics of the counts that the layers' passes collected, on the host.

        counts: each ``[layers, S, ...]``. padded: whether empty rows of a round are transferred too.
        """
        arrays = {name: np.asarray(value).astype(np.int64) for name, value in counts.items()}
        per_expert = arrays["tokens_per_expert"].sum(axis=1)
        rows, rounds = arrays["rows_sent"], int(arrays["rounds"].max(axis=1).sum())
        row_bytes = self.wire.row_bytes + self.bytes_back
        payload = int(rows.sum()) * row_bytes
        return DispatchStatistics(
            tokens_per_expert=per_expert,
            tokens_per_rank=per_expert.reshape(len(per_expert), self.group.size, -1).sum(axis=2),
            rows_sent_per_rank=rows.sum(axis=0),
            rows_received_per_rank=np.zeros(self.group.size, np.int64),
            rounds=rounds,
            payload_bytes=payload,
            wire_bytes=rounds * self.round_rows * row_bytes if padded else payload,
        )

    def _take_terms(self, returned, slots_TK, r: Array | int, otherwise) -> Float[Array, "T K D"]:
        """Return the result of each choice of a device's tokens in round ``r``, or ``otherwise`` for choices without a result in it."""
        route, K = plan_route(self.group, slots_TK), slots_TK.shape[1]
        place_TK = route.place_TK - r * self.capacity
        is_returned_TK = (slots_TK >= 0) & (place_TK >= 0) & (place_TK < self.capacity)
        if self.returns_terms:  # one column per local expert or per choice
            column_TK = slots_TK % self.group.experts if self.columns < K else jnp.arange(K)
        else:
            is_returned_TK &= route.sends_TK  # one choice of each row has the sum
            column_TK = jnp.int32(0)
        index_TK = (route.rank_TK * self.capacity + place_TK) * self.columns + column_TK
        results = jnp.concatenate(returned) if len(returned) > 1 else returned[0]
        terms_TKD = results.take(jnp.where(is_returned_TK, index_TK, 0), axis=0, mode="clip")
        return jnp.where(is_returned_TK[:, :, None], terms_TKD, jnp.asarray(otherwise, results.dtype))

    def _sum(self, terms_TKD: Float[Array, "T K D"], slots_TK) -> Float[Array, "T D"]:
        """Sum a device's terms per token, in the order of choices, or of expert devices if those return sums."""
        if not self.returns_terms:
            rank_TK = jnp.where(slots_TK >= 0, slots_TK // self.group.experts, self.group.size)
            terms_TKD = jnp.take_along_axis(terms_TKD, jnp.argsort(rank_TK, axis=1)[:, :, None], axis=1)
        return add_in_order(terms_TKD.astype(jnp.float32), axis=1).astype(self.wire.dtype)

    def _padded(self, array: Array, fill: int = -1) -> Array:
        return pad_per_dp_rank(array, dp=self.spec.dp_size, multiple=self.spec.tp_size, fill=fill)

    def _on_tokens(self, part, *inputs):
        """Run ``part`` on each device's shard of the inputs. The last input, the round's number, is replicated."""
        over_tokens = P(self.spec.token_axes)
        specs = (*[over_tokens] * (len(inputs) - 1), P())
        run = on_ranks(part, self.mesh, specs, over_tokens)
        return jax.named_scope("dispatch")(run)(*inputs[:-1], jnp.int32(inputs[-1]))


@dataclass(frozen=True, eq=False)
class ExpertHalf:
    """The experts' half of one exchange, on all expert devices or on one part of them.

    spec, mesh: of these devices. first: index of the first one among all expert devices. experts: physical experts per device.
    wire: format of a packed row. returns_terms: see ``Between.returns_terms``.
    """

    spec: MeshSpec
    mesh: Mesh
    first: int
    experts: int
    wire: WireFormat
    returns_terms: bool

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.spec.num_devices

    @property
    def columns(self) -> int:
        """Results that a device returns per row."""
        return columns(self.wire, self.experts, self.returns_terms)

    def described_arrivals(self, senders: int, cells: int) -> list[jax.ShapeDtypeStruct]:
        """Return shape, dtype and sharding of the ``arrivals`` of ``compute``: per sender, ``cells`` rows for each device."""
        shape = self.size * cells, self.wire.row_words
        over_experts = NamedSharding(self.mesh, P(self.spec.token_axes))
        return [jax.ShapeDtypeStruct(shape, self.wire.word, sharding=over_experts)] * senders

    def compute(self, arrivals: Sequence[UInt[Array, "n W"]], experts: ExpertsOfMesh) -> list[Float[Array, "m D"]]:
        """Return, for each sender, an array over the devices with the results of its rows. Inside ``jit``."""
        platform = self.mesh.devices.flat[0].platform
        group = ExpertGroup.of(self.spec, self.experts * self.size, platform, in_order=self.returns_terms)

        def on_device(arrivals, params):
            rows_ND, slots_NK, weights_NK, _ = self.wire.unpack(jnp.concatenate(arrivals))
            local_experts = RankExperts(group, experts.local_experts, params, count=False)
            compute = local_experts.terms if self.returns_terms else local_experts
            results, _ = compute(rows_ND, slots_NK - self.first * self.experts, weights_NK)
            return list(results.reshape(len(arrivals), -1, self.wire.width))

        over_experts = [P(self.spec.token_axes)] * len(arrivals)
        run = on_ranks(on_device, self.mesh, (over_experts, experts.param_specs), over_experts)
        return jax.named_scope("dispatch")(run)(list(arrivals), experts.params)


def to_experts(between: Between, half: ExpertHalf, rows: Sequence[UInt[Array, "N W"]]) -> list[UInt[Array, "n W"]]:
    """Start copying the rows of ``pack`` to this process's expert devices. Return the arrays that will arrive. Called on the host."""
    S = between.senders
    # Shards and copies are ordered by expert device, then by token device.
    shards = [shard for rows_of_device in rows for shard in _shards(rows_of_device, between.mesh)]
    copies = jax.device_put(shards, [device for device in half.mesh.devices.flat for _ in range(S)])
    return [
        jax.make_array_from_single_device_arrays(like.shape, like.sharding, copies[sender::S])
        for sender, like in enumerate(half.described_arrivals(S, between.capacity))
    ]


def to_tokens(between: Between, half: ExpertHalf, answers: Sequence[Float[Array, "m D"]]) -> list[Float[Array, "M D"]]:
    """Start copying each expert device's results to the token devices that sent the rows. Return the arrays. Called on the host."""
    S = between.senders
    by_sender = [_shards(answer, half.mesh) for answer in answers]
    # Shards and copies are ordered by expert device, then by token device.
    shards = [shard for shards_of_expert in zip(*by_sender, strict=True) for shard in shards_of_expert]
    copies = jax.device_put(shards, list(between.mesh.devices.flat) * half.size)
    return [
        jax.make_array_from_single_device_arrays(like.shape, like.sharding, copies[expert * S : (expert + 1) * S])
        for expert, like in enumerate(between.described_returns)
    ]


def _shards(array: Array, mesh: Mesh) -> list[Array]:
    """Return an array's shards in the order of the mesh's devices."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[device] for device in mesh.devices.flat]
