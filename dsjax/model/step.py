"""The step: the one program that serving runs, the dry run compiles and the planner measures.

A step takes row groups (see ``docs/architecture.md``), runs all layers against the paged cache, and returns the
logits of each row's last token. It is traced under ``jax.jit`` with shardings; only cache access and expert dispatch
are ``shard_map``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig
from dsjax.model.attention import Cache, PagedAttention, Rows
from dsjax.model.experts import ExpertProduct
from dsjax.model.forms import Form, common_layout
from dsjax.model.mla import Projections
from dsjax.model.moe import RoutedExperts
from dsjax.model.parameters import ParameterTable
from dsjax.model.rope import Rotation
from dsjax.model.router import Routing
from dsjax.model.transformer import DecoderLayer, Transformer
from sharding import MeshSpec, Rules
from sharding.dispatch import DispatchConfig, dispatch
from sharding.placement import Placement, assign_copies


@dataclass(frozen=True)
class GroupShape:
    """Static shape of a row group on one DP rank: ``rows`` requests, ``chunk`` tokens each, ``pages`` of context."""

    rows: int
    chunk: int
    pages: int
    form: Form

    @property
    def tokens(self) -> int:
        """Token slots of the group on one DP rank."""
        return self.rows * self.chunk

    @property
    def packed_width(self) -> int:
        """Integers that describe the group on one DP rank: tokens, start, length, page table."""
        return self.rows * (self.chunk + 2 + self.pages)


@jax.tree_util.register_dataclass
@dataclass
class RowGroup:
    """What a row group computes: ``length`` tokens of each row from position ``start`` on; ``length`` 0 is padding."""

    tokens: Int[Array, "B R C"]
    start: Int[Array, "B R"]
    length: Int[Array, "B R"]
    tables: Int[Array, "B R Pr"]
    shape: GroupShape = field(metadata={"static": True})

    @classmethod
    def unpack(cls, packed: Int[Array, "B W"], shape: GroupShape) -> RowGroup:
        """Read a group from its integers, laid out as ``pack`` does."""
        R, C = shape.rows, shape.chunk
        ends = np.cumsum([R * C, R, R])
        tokens, start, length, tables = jnp.split(packed, ends, axis=1)
        return cls(tokens.reshape(-1, R, C), start, length, tables.reshape(-1, R, shape.pages), shape)

    @staticmethod
    def pack(tokens: np.ndarray, start: np.ndarray, length: np.ndarray, tables: np.ndarray) -> np.ndarray:
        """``[B, W]`` int32 from NumPy arrays of the fields' shapes: one transfer carries a step's inputs."""
        ranks = tokens.shape[0]
        return np.concatenate([a.reshape(ranks, -1) for a in (tokens, start, length, tables)], axis=1, dtype=np.int32)

    @property
    def positions(self) -> Int[Array, "B R C"]:
        """Position of each token; padding continues the count and is masked by ``active``."""
        return self.start[..., None] + jnp.arange(self.shape.chunk)

    @property
    def active(self) -> Array:
        """Which token slots hold a token: ``[B, R, C]`` bool."""
        return jnp.arange(self.shape.chunk) < self.length[..., None]

    def slots(self, page_size: int) -> Int[Array, "B R C"]:
        """Cache slot of each token on its rank, −1 for padding."""
        pages = jnp.minimum(self.positions // page_size, self.shape.pages - 1)
        page = jnp.take_along_axis(self.tables, pages, axis=2)
        return jnp.where(self.active, page * page_size + self.positions % page_size, -1)


@dataclass(frozen=True, eq=False)
class Step:
    """A model on a mesh, ready to be traced: everything static about a step but its row groups' shapes."""

    config: ModelConfig
    table: ParameterTable
    spec: MeshSpec
    mesh: Mesh
    rules: Rules
    placement: Placement
    dispatch: DispatchConfig
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    prefill_form: Form = "CC"
    decode_form: Form = "A_CC_ME"
    page_size: int = 16
    block_tokens: int = 128

    @property
    def attention(self) -> PagedAttention:
        """Attention against this step's cache."""
        layout = common_layout(self.prefill_form, self.decode_form)
        return PagedAttention(self.mesh, self.spec, self.config, layout, self.cache_dtype, self.block_tokens)

    def __call__(
        self,
        params: Mapping[str, Array],
        cache: Cache,
        packed: Int[Array, "B W"],
        shapes: tuple[GroupShape, ...],
        *,
        every_token: bool = False,
    ) -> tuple[Float[Array, "B R V"], Cache, dict[str, Array]]:
        """Run all groups through all layers.

        packed: the groups' integers, concatenated in the order of ``shapes``.
        every_token: logits of every token slot (``[B, T, V]``) instead of each row's last token.

        Returns float32 logits, vocabulary spread over ``tp`` where it divides; the updated cache; and dispatch reports
        stacked over MoE layers (empty unless ``dispatch.report``).
        """
        groups = self._unpack(packed, shapes)
        model: Transformer = self.table.bind(params)
        tokens = _flatten([g.tokens for g in groups])
        positions = _flatten([g.positions for g in groups])
        active = _flatten([g.active for g in groups])
        slots = _flatten([g.slots(self.page_size) for g in groups])
        rotation = Rotation.at(positions, self.config.rope, self.config.qk_rope_head_dim)

        x = self._constrain(model.embed(tokens, self.dtype), self.spec.batch_axes)
        layer, reports = jnp.int32(0), {}
        for stack in model.stacks:
            x, cache, layer, report = self._run_stack(stack, x, cache, layer, groups, slots, active, rotation)
            reports |= report

        x = model.final_norm(x)
        if not every_token:
            x = _last_tokens(x, groups)
        with jax.named_scope("head"):
            logits = jnp.einsum("btd,dv->btv", x, model.head_weight(self.dtype), preferred_element_type=jnp.float32)
        vocab_axes = self.rules.spec(("vocab",))[0]
        return self._constrain(logits, self.spec.batch_axes, None, vocab_axes), cache, reports

    def _unpack(self, packed, shapes) -> list[RowGroup]:
        ends = np.cumsum([shape.packed_width for shape in shapes])[:-1]
        return [
            RowGroup.unpack(part, shape) for part, shape in zip(jnp.split(packed, ends, axis=1), shapes, strict=True)
        ]

    def _run_stack(self, stack: DecoderLayer, x, cache, layer, groups, slots, active, rotation):
        graph, weights = nnx.split(stack)

        def body(carry, weights):
            x, cache, layer = carry
            block: DecoderLayer = nnx.merge(graph, weights)
            attended, cache = self._attend(block, block.attn_norm(x), cache, layer, groups, slots, rotation)
            x = x + attended
            y, report = self._feed_forward(block, block.mlp_norm(x), active)
            return (self._constrain(x + y, self.spec.batch_axes), cache, layer + 1), report

        (x, cache, layer), reports = jax.lax.scan(body, (x, cache, layer), weights)
        return x, cache, layer, reports

    def _attend(self, block: DecoderLayer, x, cache: Cache, layer, groups: list[RowGroup], slots, rotation):
        attention, mla = self.attention, block.attn
        query_heads = any(group.shape.form != "AM_CC_ME" for group in groups)
        p = self._spread_heads(mla.project(x, rotation, query_heads=query_heads))
        cache = attention.write(mla, cache, layer, slots, p)
        outs, start = [], 0
        for group in groups:
            B, R, C = group.tokens.shape
            part = jax.tree.map(lambda a: a[:, start : start + R * C].reshape(B, R, C, *a.shape[2:]), p)  # noqa: B023
            heads = attention.attend(mla, group.shape.form, cache, layer, Rows(group.positions, group.tables), part)
            out = mla.add_output_bias(heads) if group.shape.form == "AM_CC_ME" else mla.output(heads)
            outs.append(out.reshape(B, R * C, -1))
            start += R * C
        return self._constrain(jnp.concatenate(outs, axis=1), self.spec.batch_axes), cache

    def _feed_forward(self, block: DecoderLayer, x: Float[Array, "B T D"], active):
        if hasattr(block, "mlp"):
            return block.mlp(x), {}
        apply = lambda experts, x, routing: self._dispatch(experts, x, routing, active)  # noqa: E731
        y, _, report = block.moe(x, apply, self._on_each_rank)
        return y, report or {}

    def _on_each_rank(self, choose: Callable) -> Callable:
        """``choose(logits, bias)`` for each DP rank's tokens by itself."""
        tokens = P(self.spec.batch_axes)
        return jax.shard_map(choose, mesh=self.mesh, in_specs=(tokens, P()), out_specs=tokens, check_vma=False)

    def _dispatch(self, experts: RoutedExperts, x: Float[Array, "B T D"], routing: Routing, active):
        """Send active tokens to the physical copies of their experts and bring the weighted sums back."""
        B, T, D = x.shape
        K = routing.ids.shape[-1]
        logical = routing.ids.reshape(B * T, K)
        slots = assign_copies(self.placement.tables, logical, active.reshape(B * T), ranks=B)
        stored = experts.stored()
        specs = {name: self._expert_spec(experts, name) for name in stored}
        product = ExpertProduct(weight_dtype=experts.down.weight.info.dtype, platform=self._platform)
        y, report = dispatch(
            self.spec,
            self.mesh,
            self.dispatch,
            x.reshape(B * T, D),
            slots,
            routing.weights.reshape(B * T, K),
            stored,
            product,
            specs,
        )
        return self._constrain(y.reshape(B, T, D), self.spec.batch_axes), report

    def _spread_heads(self, p: Projections) -> Projections:
        batch, heads = self.spec.batch_axes, self.rules.spec(("heads",))[0]
        return Projections(
            self._constrain(p.q_nope, batch, None, heads),
            self._constrain(p.q_rope, batch, None, heads),
            *(self._constrain(a, batch) for a in (p.q_latent, p.latent, p.k_rope)),
        )

    def _expert_spec(self, experts: RoutedExperts, name: str):
        matrix, part = name.split(".")
        axes = getattr(getattr(experts, matrix), part).info.logical_axes
        return self.rules.spec(axes[1:])  # without the layers axis, which the scan has taken off

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def _constrain(self, array: Array, *axes) -> Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, P(*axes)))


def _flatten(parts: list[Array]) -> Array:
    """``[B, R, C]`` of each group → ``[B, T]`` of all: the tokens of a rank, group after group."""
    return jnp.concatenate([part.reshape(part.shape[0], -1) for part in parts], axis=1)


def _last_tokens(x: Float[Array, "B T D"], groups: list[RowGroup]) -> Float[Array, "B R D"]:
    """Each row's last active token; its first slot where the row is padding."""
    indices, start = [], 0
    for group in groups:
        first = start + jnp.arange(group.shape.rows) * group.shape.chunk
        indices.append(first + jnp.maximum(group.length - 1, 0))
        start += group.shape.tokens
    return jnp.take_along_axis(x, jnp.concatenate(indices, axis=1)[..., None], axis=1)
