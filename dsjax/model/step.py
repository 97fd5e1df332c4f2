"""The step: the one program that serving runs, the dry run compiles and the planner measures.

A step takes row groups (see ``docs/architecture.md``), runs all layers against the paged cache, and returns the
logits of each row's last token. It is traced under ``jax.jit`` with shardings; only cache access and expert dispatch
are ``shard_map``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig
from dsjax.kernels.table import Kernels
from dsjax.model.attention import Cache, PagedAttention, Rows
from dsjax.model.experts import ExpertProduct
from dsjax.model.forms import Form, common_layout
from dsjax.model.mla import Projections
from dsjax.model.moe import RoutedExperts
from dsjax.model.parameters import ParameterTable
from dsjax.model.rope import Rotation
from dsjax.model.router import Routing
from dsjax.model.rows import GroupShape, RowGroup, flatten, last_tokens
from dsjax.model.transformer import DecoderLayer, Transformer
from sharding import MeshSpec, Rules
from sharding.dispatch import DispatchConfig, dispatch
from sharding.placement import Placement, assign_copies


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
    block_tokens: int | None = None
    kernels: Kernels = Kernels()

    @property
    def attention(self) -> PagedAttention:
        """Attention against this step's cache."""
        layout = common_layout(self.prefill_form, self.decode_form)
        return PagedAttention(
            self.mesh, self.spec, self.config, layout, self.cache_dtype, self.block_tokens, self.kernels
        )

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
        # float32 means float32: XLA would use TF32 on GPUs and bf16 passes on TPUs. Other dtypes have one meaning.
        with jax.default_matmul_precision("highest"):
            return self._run(self.table.bind(params), cache, self._unpack(packed, shapes), every_token)

    def _run(self, model: Transformer, cache: Cache, groups: list[RowGroup], every_token: bool):
        tokens, positions, active, slots = (
            self._whole(flatten(parts))
            for parts in (
                [g.tokens for g in groups],
                [g.positions for g in groups],
                [g.active for g in groups],
                [g.slots(self.page_size) for g in groups],
            )
        )
        rotation = Rotation.at(positions, self.config.rope, self.config.qk_rope_head_dim)

        x = self._constrain(model.embed(tokens, self.dtype), self.spec.batch_axes)
        layer, reports = jnp.int32(0), {}
        for stack in model.stacks:
            x, cache, layer, report = self._run_stack(stack, x, cache, layer, groups, slots, active, rotation)
            reports |= report

        x = model.final_norm(x)
        if not every_token:
            x = last_tokens(x, groups)
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
        # Experts are not sliced by the scan: the product reads single experts out of the whole stack. A scan would
        # first copy a layer's experts on CPU, all of them, for the few that have tokens.
        graph, experts, weights = nnx.split(stack, lambda path, _: "experts" in path, ...)
        first = layer

        def body(carry, weights):
            x, cache, layer = carry
            block: DecoderLayer = nnx.merge(graph, experts, weights)
            attended, cache = self._attend(
                block, self._whole(block.attn_norm(x)), cache, layer, groups, slots, rotation
            )
            x = x + attended
            y, report = self._feed_forward(block, layer - first, self._whole(block.mlp_norm(x)), active)
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
            rows = Rows(group.positions, group.tables, group.length)
            heads = attention.attend(mla, group.shape.form, cache, layer, rows, part)
            out = mla.add_output_bias(heads) if group.shape.form == "AM_CC_ME" else mla.output(heads)
            outs.append(out.reshape(B, R * C, -1))
            start += R * C
        return self._constrain(jnp.concatenate(outs, axis=1), self.spec.batch_axes), cache

    def _feed_forward(self, block: DecoderLayer, index: Int[Array, ""], x: Float[Array, "B T D"], active):
        """The dense MLP, or the experts of layer ``index`` of the stack."""
        if hasattr(block, "mlp"):
            return block.mlp(x), {}
        apply = lambda experts, x, routing: self._dispatch(experts, index, x, routing, active)  # noqa: E731
        y, _, report = block.moe(x, apply, self._on_each_rank)
        return y, report or {}

    def _on_each_rank(self, choose: Callable) -> Callable:
        """``choose(logits, bias)`` for each DP rank's tokens by itself."""
        tokens = P(self.spec.batch_axes)
        return jax.shard_map(choose, mesh=self.mesh, in_specs=(tokens, P()), out_specs=tokens, check_vma=False)

    def _dispatch(self, experts: RoutedExperts, index, x: Float[Array, "B T D"], routing: Routing, active):
        """Send active tokens to the physical copies of their experts and bring the weighted sums back."""
        B, T, D = x.shape
        K = routing.ids.shape[-1]
        logical = self._whole(routing.ids).reshape(B * T, K)
        slots = assign_copies(self.placement.tables, logical, active.reshape(B * T), ranks=B)
        stack = experts.stored()
        specs = {name: self._expert_spec(experts, name) for name in stack}
        product = ExpertProduct(
            weight_dtype=experts.down.weight.info.dtype,
            platform=self._platform,
            mean_load=self.mean_load(B * T, K),
            kernels=self.kernels,
        )
        y, report = dispatch(
            self.spec,
            self.mesh,
            self.dispatch,
            self._whole(x.reshape(B * T, D)),
            self._whole(slots),
            self._whole(self._whole(routing.weights).reshape(B * T, K)),
            stack | {"layer": index},
            product,
            specs | {"layer": P()},
            experts=self.placement.n_physical,
        )
        return self._constrain(y.reshape(B, T, D), self.spec.batch_axes), report

    def mean_load(self, tokens: int, top_k: int) -> float:
        """Pairs of one physical expert in one product, if all ``tokens`` of the mesh are routed evenly."""
        devices = self.spec.num_devices
        own = (
            tokens / devices
            if self.dispatch.chunk_tokens is None
            else min(tokens / devices, self.dispatch.chunk_tokens)
        )
        return own * self.spec.ep_size * top_k / self.placement.n_physical

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
        return self.rules.spec(axes)

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def _whole(self, array: Array) -> Array:
        """Each DP rank's tokens, whole on each of its ``tp`` devices: dispatch splits them, and XLA would everything before it."""
        return self._constrain(array, self.spec.batch_axes)

    def _constrain(self, array: Array, *axes) -> Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, P(*axes)))
