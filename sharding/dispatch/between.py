"""``Between``: an exchange between two meshes, of which one has tokens and the other experts. The host carries it from program to program.

What the ranks of one mesh do by a collective is here three programs and two moves:

    | where          | what                                                             |
    |----------------|------------------------------------------------------------------|
    | tokens' mesh   | ``pack``: each device's tokens, as ``gather`` packs them          |
    | host           | ``to_experts``: each token device's rows to all expert devices    |
    | experts' mesh  | ``compute``: what each device's experts give for these            |
    | host           | ``to_tokens``: each expert device's answers to the tokens' device |
    | tokens' mesh   | ``add``: each token's sum, by choice or by expert device in order |

The experts' mesh computes without any collective and keeps nothing, so another one can take its place between two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt

from sharding.dispatch.entry import ExpertsOfMesh, pad_per_dp_rank, unpad_per_dp_rank
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import RankExperts
from sharding.dispatch.wire import WireFormat
from sharding.mesh import MeshSpec
from sharding.sums import add_in_order


@dataclass(frozen=True, eq=False)
class Between:
    """One exchange of so many tokens.

    spec, mesh: of the devices with tokens; expert_spec, expert_mesh: of those with experts, each of which has whole ones. Without the
    mesh, where these are another process's, there is no ``to_experts``, ``compute`` and ``to_tokens``.
    tokens: of the whole step, a multiple of ``spec.dp_size``. experts: physical ones in all. wire: what a packed row is.
    by_choice: as of ``DispatchConfig``.
    """

    spec: MeshSpec
    mesh: Mesh
    expert_spec: MeshSpec
    expert_mesh: Mesh | None
    tokens: int
    experts: int
    wire: WireFormat
    by_choice: bool

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

    @property
    def columns(self) -> int:
        """Answers of an expert device to one row: a term for each choice or expert, or one sum."""
        return min(self.wire.top_k, self.group.experts) if self._apart else 1

    @property
    def bytes_there(self) -> int:
        """Bytes that travel to the experts in one exchange."""
        return self.senders * self.group.size * self.rows * self.wire.row_bytes

    @property
    def bytes_back(self) -> int:
        """Bytes that travel back."""
        cell = self.wire.width * jnp.dtype(self.wire.dtype).itemsize
        return self.senders * self.group.size * self.rows * self.columns * cell

    @property
    def _apart(self) -> bool:
        return self.by_choice and self.group.size > 1

    @property
    def described_rows(self) -> jax.ShapeDtypeStruct:
        """What ``pack`` gives."""
        return self._over_tokens((self.senders * self.rows, self.wire.row_words), self.wire.word)

    @property
    def described_arrivals(self) -> list[jax.ShapeDtypeStruct]:
        """What ``compute`` takes: the rows of each token device, whole on every expert device."""
        whole = NamedSharding(self.expert_mesh, P())
        return [jax.ShapeDtypeStruct((self.rows, self.wire.row_words), self.wire.word, sharding=whole)] * self.senders

    @property
    def described_returns(self) -> list[jax.ShapeDtypeStruct]:
        """What ``add`` takes: the answers of each expert device, of every token device's rows its own."""
        shape = self.senders * self.rows * self.columns, self.wire.width
        return [self._over_tokens(shape, self.wire.dtype)] * self.group.size

    def _over_tokens(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P(self.spec.token_axes)))

    def pack(
        self, x_TD: Float[Array, "T D"], slots_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"]
    ) -> UInt[Array, "N W"]:
        """Inside ``jit`` on the tokens' mesh: the rows that travel. Arguments are ``dispatch``'s."""
        pad = partial(pad_per_dp_rank, dp=self.spec.dp_size, multiple=self.spec.tp_size)
        inputs = pad(x_TD, fill=0), pad(slots_TK, fill=-1), pad(weights_TK.astype(jnp.float32), fill=0)
        return self._on_tokens(lambda *inputs: self.wire.pack(*inputs, jnp.int32(0)))(*inputs)

    def to_experts(self, rows: UInt[Array, "N W"]) -> list[UInt[Array, "n W"]]:
        """On the host: begin to copy each token device's rows to every expert device, and give what will have arrived."""
        experts, shards = list(self.expert_mesh.devices.flat), _shards(rows, self.mesh)
        sources = [shard for shard in shards for _ in experts]
        copies = jax.device_put(sources, [device for _ in shards for device in experts])
        E = len(experts)
        return [
            jax.make_array_from_single_device_arrays(one.shape, one.sharding, copies[place * E : (place + 1) * E])
            for place, one in enumerate(self.described_arrivals)
        ]

    def compute(self, arrivals: Sequence[UInt[Array, "n W"]], experts: ExpertsOfMesh) -> list[Float[Array, "m D"]]:
        """Inside ``jit`` on the experts' mesh: for each token device an array over the expert devices, of their answers to its rows."""

        def on_device(arrivals, params):
            rows, slots_NK, weights_NK, _ = self.wire.unpack(jnp.concatenate(arrivals))
            here = RankExperts(self.group, experts.local_experts, params, count=False)
            give = here.terms if self._apart else here
            answers, _ = give(rows, slots_NK, weights_NK)
            return list(answers.reshape(self.senders, self.rows * self.columns, self.wire.width))

        over_experts = P(self.expert_spec.token_axes)
        run = jax.shard_map(
            on_device,
            mesh=self.expert_mesh,
            in_specs=([P()] * self.senders, experts.param_specs),
            out_specs=[over_experts] * self.senders,
            check_vma=False,
        )
        return jax.named_scope("dispatch")(run)(list(arrivals), experts.params)

    def to_tokens(self, answers: Sequence[Float[Array, "m D"]]) -> list[Float[Array, "M D"]]:
        """On the host: begin to copy each expert device's answers to the devices whose rows they are for."""
        by_sender = [_shards(answer, self.expert_mesh) for answer in answers]
        targets, E = list(self.mesh.devices.flat), self.group.size
        sources = [by_sender[place][expert] for expert in range(E) for place in range(len(targets))]
        copies, R = jax.device_put(sources, targets * E), len(targets)
        return [
            jax.make_array_from_single_device_arrays(one.shape, one.sharding, copies[expert * R : (expert + 1) * R])
            for expert, one in enumerate(self.described_returns)
        ]

    def add(self, returned: Sequence[Float[Array, "M D"]], slots_TK: Int[Array, "T K"]) -> Float[Array, "T D"]:
        """Inside ``jit`` on the tokens' mesh: each token's sum of what came back. slots_TK: as ``pack`` had it."""
        pad = partial(pad_per_dp_rank, dp=self.spec.dp_size, multiple=self.spec.tp_size)
        y_TD = self._on_tokens(self._add)(pad(slots_TK, fill=-1), *returned)
        return unpad_per_dp_rank(y_TD, self.tokens, self.spec.dp_size)

    def _add(self, slots_TK: Int[Array, "T K"], *returned: Float[Array, "M D"]) -> Float[Array, "T D"]:
        (T, K), J = slots_TK.shape, self.columns
        if not self._apart:
            return add_in_order(jnp.stack(returned).astype(jnp.float32), axis=0).astype(self.wire.dtype)
        rank_TK = slots_TK // self.group.experts
        column_TK = slots_TK % self.group.experts if J < K else jnp.arange(K)
        cell_TK = (rank_TK * T + jnp.arange(T)[:, None]) * J + column_TK
        terms_TKD = jnp.concatenate(returned).take(jnp.where(slots_TK >= 0, cell_TK, 0), axis=0, mode="clip")
        terms_TKD = jnp.where(slots_TK[:, :, None] >= 0, terms_TKD, 0).astype(jnp.float32)
        return add_in_order(terms_TKD, axis=1).astype(self.wire.dtype)

    def _on_tokens(self, part):
        over_tokens = P(self.spec.token_axes)
        run = jax.shard_map(part, mesh=self.mesh, in_specs=over_tokens, out_specs=over_tokens, check_vma=False)
        return jax.named_scope("dispatch")(run)


def _shards(array: Array, mesh: Mesh) -> list[Array]:
    """The parts of an array on its devices, in the order of the mesh."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[device] for device in mesh.devices.flat]
