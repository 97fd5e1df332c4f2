"""``Between``: an exchange between two meshes, of which one has tokens and the other experts. The host carries it from program to program.

What the ranks of one mesh do by a collective is here three programs and two moves:

    | where         | what                                                                                      |
    |---------------|-------------------------------------------------------------------------------------------|
    | tokens' mesh  | ``Between.pack``: of each device's tokens, for each expert device those that it has experts for |
    | host          | ``to_experts``: the rows to these devices, or by other means where they are not of this process |
    | experts' mesh | ``ExpertHalf.compute``: what each device's experts give for the rows that came            |
    | host          | ``to_tokens``: each expert device's answers to the tokens' devices                        |
    | tokens' mesh  | ``Between.add``: each token's sum, in the order of its choices or of the expert devices   |

Shapes are static: a token device has room for ``capacity`` rows to each expert device. Rows beyond it go in further rounds: ``pack`` again
with the round's number, ``keep`` for what comes back, and ``add_kept`` in the end. How many rounds there are ``pack`` counts.

The experts' mesh computes without any collective and keeps nothing, so another one can take its place between two calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

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
from sharding.sums import add_in_order


def columns(wire: WireFormat, experts: int, apart: bool) -> int:
    """Answers to one row: one sum, or a term for each choice of a token, or for each expert of the device where it has fewer."""
    return min(wire.top_k, experts) if apart else 1


@dataclass(frozen=True, eq=False)
class Between:
    """The tokens' half of one exchange.

    spec, mesh: of the devices with tokens. expert_spec: of those with experts, each of which has whole ones. parts: into how many equal
    runs of devices they are divided, to each of which one array of rows goes: all devices, or the processes that have them.
    tokens: of the whole step, a multiple of ``spec.dp_size``. experts: physical ones in all. wire: what a packed row is.
    by_choice: as of ``DispatchConfig``. room: the capacity; None: that of ``default_capacity``.
    """

    spec: MeshSpec
    mesh: Mesh
    expert_spec: MeshSpec
    parts: int
    tokens: int
    experts: int
    wire: WireFormat
    by_choice: bool
    room: int | None = None

    @cached_property
    def group(self) -> ExpertGroup:
        """The devices of the experts."""
        return ExpertGroup.of(self.expert_spec, self.experts, self.mesh.devices.flat[0].platform, self.by_choice)

    @property
    def senders(self) -> int:
        """Devices that have tokens."""
        return self.spec.num_devices

    @property
    def rows(self) -> int:
        """Tokens of one of them, padding included."""
        return -(-self.tokens // self.spec.dp_size // self.spec.tp_size)

    @cached_property
    def capacity(self) -> int:
        """Rows that one of them can send to one expert device in a round."""
        return self.room or default_capacity(self.rows, self.wire.top_k, self.group.size, overlapped=True)

    @property
    def part_devices(self) -> int:
        """Expert devices of one part."""
        return self.group.size // self.parts

    @property
    def is_apart(self) -> bool:
        """Whether what a token's experts give comes back apart."""
        return self.by_choice and self.group.size > 1

    @property
    def columns(self) -> int:
        """Answers of an expert device to one row."""
        return columns(self.wire, self.group.experts, self.is_apart)

    @property
    def bytes_there(self) -> int:
        """Bytes that travel to the experts in one round, those of empty rows included."""
        return self.senders * self.group.size * self.capacity * self.wire.row_bytes

    @property
    def bytes_back(self) -> int:
        """Bytes that travel back."""
        cell = self.wire.width * jnp.dtype(self.wire.dtype).itemsize
        return self.senders * self.group.size * self.capacity * self.columns * cell

    @property
    def described_returns(self) -> list[jax.ShapeDtypeStruct]:
        """What ``add`` takes: the answers of each part, of every token device's rows its own, one expert device after the other."""
        shape = self.senders * self.part_devices * self.capacity * self.columns, self.wire.width
        return [jax.ShapeDtypeStruct(shape, self.wire.dtype, sharding=self._over_tokens)] * self.parts

    @property
    def described_kept(self) -> jax.ShapeDtypeStruct:
        """What ``keep`` takes and gives: a term of each choice of every token."""
        shape = self.senders * self.rows, self.wire.top_k, self.wire.width
        return jax.ShapeDtypeStruct(shape, self.wire.dtype, sharding=self._over_tokens)

    @property
    def _over_tokens(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(self.spec.token_axes))

    def rounds(self, counts: Int[Array, "S E"]) -> int:
        """On the host: how many rounds rows of such numbers need. Where one is always enough, it waits for nothing."""
        return 1 if self.capacity >= self.rows else max(1, -(-int(np.asarray(counts).max()) // self.capacity))

    def pack(
        self,
        x_TD: Float[Array, "T D"],
        slots_TK: Int[Array, "T K"],
        weights_TK: Float[Array, "T K"],
        r: Array | int = 0,
    ) -> tuple[list[UInt[Array, "N W"]], Int[Array, "S E"]]:
        """Inside ``jit`` on the tokens' mesh: the rows of round ``r`` to each part, and how many rows in all each device has for each.

        Arguments are ``dispatch``'s. A part's rows are sorted by token device, expert device and place in the queue; where a queue has no
        row, there is one that uses no expert.
        """

        def on_device(x_TD, slots_TK, weights_TK, r):
            route = plan_route(self.group, slots_TK)
            nothing = jnp.int32(0)
            packed = jnp.concatenate(
                [self.wire.pack(x_TD, slots_TK, weights_TK, nothing), self.wire.empty_row(nothing)]
            )
            cell_TK, _ = cells_of(route, self.capacity, r)
            rows = packed.take(fill_cells(cell_TK, self.group.size * self.capacity), axis=0, mode="clip")
            return jnp.split(rows, self.parts), route.counts_G[None]

        pad = partial(pad_per_dp_rank, dp=self.spec.dp_size, multiple=self.spec.tp_size)
        inputs = pad(x_TD, fill=0), pad(slots_TK, fill=-1), pad(weights_TK.astype(jnp.float32), fill=0)
        return self._on_tokens(on_device, *inputs, r)

    def loads(self, slots_TK: Int[Array, "T K"]) -> Int[Array, "S X"]:
        """Likewise: how many (token, expert) pairs of each token device every physical expert has. slots_TK: as ``pack`` has it."""

        def on_device(slots_TK, _):
            return counted(slots_TK, self.experts)[None]

        return self._on_tokens(on_device, self._padded(slots_TK), 0)

    def add(self, returned: Sequence[Float[Array, "M D"]], slots_TK: Int[Array, "T K"]) -> Float[Array, "T D"]:
        """Inside ``jit`` on the tokens' mesh: each token's sum of what came back in the one round. slots_TK: as ``pack`` had it."""

        def on_device(slots_TK, returned, _):
            return self._sum(self._terms(slots_TK, returned, 0, 0), slots_TK)

        y_TD = self._on_tokens(on_device, self._padded(slots_TK), list(returned), 0)
        return unpad_per_dp_rank(y_TD, self.tokens, self.spec.dp_size)

    def keep(
        self,
        kept: Float[Array, "N K D"],
        returned: Sequence[Float[Array, "M D"]],
        slots_TK: Int[Array, "T K"],
        r: Array,
    ) -> Float[Array, "N K D"]:
        """Likewise: the terms that came before round ``r``, and those that came back in it."""

        def on_device(slots_TK, kept, returned, r):
            return self._terms(slots_TK, returned, r, kept)

        return self._on_tokens(on_device, self._padded(slots_TK), kept, list(returned), r)

    def add_kept(self, kept: Float[Array, "N K D"], slots_TK: Int[Array, "T K"]) -> Float[Array, "T D"]:
        """Likewise: each token's sum of the terms of all rounds."""

        def on_device(slots_TK, kept, _):
            return self._sum(kept, slots_TK)

        y_TD = self._on_tokens(on_device, self._padded(slots_TK), kept, 0)
        return unpad_per_dp_rank(y_TD, self.tokens, self.spec.dp_size)

    def statistics(self, counts: Mapping[str, np.ndarray], *, padded: bool) -> DispatchStatistics:
        """On the host: what the passes of layers counted, as figures for people.

        counts: each ``[layers, S, ...]``. padded: whether all cells of a round travel, and not those alone that are filled.
        """
        arrays = {name: np.asarray(value).astype(np.int64) for name, value in counts.items()}
        per_expert = arrays["tokens_per_expert"].sum(axis=1)
        rows, rounds = arrays["rows_sent"], int(arrays["rounds"].max(axis=1).sum())
        back = self.columns * self.wire.width * jnp.dtype(self.wire.dtype).itemsize
        payload = int(rows.sum()) * (self.wire.row_bytes + back)
        return DispatchStatistics(
            tokens_per_expert=per_expert,
            tokens_per_rank=per_expert.reshape(len(per_expert), self.group.size, -1).sum(axis=2),
            rows_sent_per_rank=rows.sum(axis=0),
            rows_received_per_rank=np.zeros(self.group.size, np.int64),
            rounds=rounds,
            payload_bytes=payload,
            wire_bytes=rounds * (self.bytes_there + self.bytes_back) if padded else payload,
        )

    def _terms(self, slots_TK, returned, r: Array | int, before) -> Float[Array, "T K D"]:
        """What came back in round ``r`` of each choice of a device's tokens; ``before`` where nothing did."""
        route, K = plan_route(self.group, slots_TK), slots_TK.shape[1]
        place_TK = route.place_TK - r * self.capacity
        comes_TK = (slots_TK >= 0) & (place_TK >= 0) & (place_TK < self.capacity)
        column_TK = jnp.int32(0)
        if not self.is_apart:
            comes_TK &= route.sends_TK
        elif self.columns < K:
            column_TK = slots_TK % self.group.experts
        else:
            column_TK = jnp.arange(K)
        cell_TK = (route.rank_TK * self.capacity + place_TK) * self.columns + column_TK
        answers = jnp.concatenate(returned) if len(returned) > 1 else returned[0]
        terms_TKD = answers.take(jnp.where(comes_TK, cell_TK, 0), axis=0, mode="clip")
        return jnp.where(comes_TK[:, :, None], terms_TKD, jnp.asarray(before, answers.dtype))

    def _sum(self, terms_TKD: Float[Array, "T K D"], slots_TK) -> Float[Array, "T D"]:
        """A device's tokens: terms in the order of choices, or sums in the order of the expert devices."""
        if not self.is_apart:
            rank_TK = jnp.where(slots_TK >= 0, slots_TK // self.group.experts, self.group.size)
            terms_TKD = jnp.take_along_axis(terms_TKD, jnp.argsort(rank_TK, axis=1)[:, :, None], axis=1)
        return add_in_order(terms_TKD.astype(jnp.float32), axis=1).astype(self.wire.dtype)

    def _padded(self, slots_TK: Int[Array, "T K"]) -> Array:
        return pad_per_dp_rank(slots_TK, dp=self.spec.dp_size, multiple=self.spec.tp_size, fill=-1)

    def _on_tokens(self, part, *inputs):
        """Run ``part`` on each device's share of all inputs but the last, a round's number."""
        over_tokens = P(self.spec.token_axes)
        specs = (*[over_tokens] * (len(inputs) - 1), P())
        run = jax.shard_map(part, mesh=self.mesh, in_specs=specs, out_specs=over_tokens, check_vma=False)
        return jax.named_scope("dispatch")(run)(*inputs[:-1], jnp.int32(inputs[-1]))


@dataclass(frozen=True, eq=False)
class ExpertHalf:
    """The experts' half, on all of their devices or on a run of them.

    spec, mesh: of these devices. first: the number of their first expert device among all; experts: physical ones of one device.
    wire: what a packed row is. apart: as of ``Between.is_apart``.
    """

    spec: MeshSpec
    mesh: Mesh
    first: int
    experts: int
    wire: WireFormat
    apart: bool

    @property
    def size(self) -> int:
        """Devices."""
        return self.spec.num_devices

    @property
    def columns(self) -> int:
        """Answers of a device to one row."""
        return columns(self.wire, self.experts, self.apart)

    def described_arrivals(self, senders: int, cells: int) -> list[jax.ShapeDtypeStruct]:
        """What ``compute`` takes: of each sender, ``cells`` rows for each device."""
        shape = self.size * cells, self.wire.row_words
        over_experts = NamedSharding(self.mesh, P(self.spec.token_axes))
        return [jax.ShapeDtypeStruct(shape, self.wire.word, sharding=over_experts)] * senders

    def compute(self, arrivals: Sequence[UInt[Array, "n W"]], experts: ExpertsOfMesh) -> list[Float[Array, "m D"]]:
        """Inside ``jit``: for each sender an array over the devices, of their answers to its rows."""
        group = ExpertGroup.of(self.spec, self.experts * self.size, self.mesh.devices.flat[0].platform, self.apart)

        def on_device(arrivals, params):
            rows, slots_NK, weights_NK, _ = self.wire.unpack(jnp.concatenate(arrivals))
            here = RankExperts(group, experts.local_experts, params, count=False)
            give = here.terms if self.apart else here
            answers, _ = give(rows, slots_NK - self.first * self.experts, weights_NK)
            return list(answers.reshape(len(arrivals), -1, self.wire.width))

        over_experts = P(self.spec.token_axes)
        run = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=([over_experts] * len(arrivals), experts.param_specs),
            out_specs=[over_experts] * len(arrivals),
            check_vma=False,
        )
        return jax.named_scope("dispatch")(run)(list(arrivals), experts.params)


def to_experts(between: Between, half: ExpertHalf, rows: Sequence[UInt[Array, "N W"]]) -> list[UInt[Array, "n W"]]:
    """On the host: begin to copy what ``pack`` gave to the expert devices of this process, and give what will have arrived."""
    targets, S = list(half.mesh.devices.flat), between.senders
    sources = [shard for of_device in rows for shard in _shards(of_device, between.mesh)]
    copies = jax.device_put(sources, [device for device in targets for _ in range(S)])
    return [
        jax.make_array_from_single_device_arrays(one.shape, one.sharding, copies[sender::S])
        for sender, one in enumerate(half.described_arrivals(S, between.capacity))
    ]


def to_tokens(between: Between, half: ExpertHalf, answers: Sequence[Float[Array, "m D"]]) -> list[Float[Array, "M D"]]:
    """On the host: begin to copy each expert device's answers to the devices whose rows they are for."""
    by_sender = [_shards(answer, half.mesh) for answer in answers]
    targets, E = list(between.mesh.devices.flat), half.size
    sources = [by_sender[place][expert] for expert in range(E) for place in range(len(targets))]
    copies, S = jax.device_put(sources, targets * E), len(targets)
    return [
        jax.make_array_from_single_device_arrays(one.shape, one.sharding, copies[expert * S : (expert + 1) * S])
        for expert, one in enumerate(between.described_returns)
    ]


def _shards(array: Array, mesh: Mesh) -> list[Array]:
    """The parts of an array on its devices, in the order of the mesh."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[device] for device in mesh.devices.flat]
