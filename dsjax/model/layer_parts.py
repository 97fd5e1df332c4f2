"""The four parts of a decoder layer: ``attend``, ``send`` (dispatch to experts), ``compute`` (experts), ``receive`` (combine).

Each part takes one value of ``dsjax/model/layer_values.py`` and returns the next. The caller runs the parts one after the other, or
interleaves them with other work (``docs/architecture.md``). ``dispatch_stages`` and ``combine_stages`` are the exchanges of ``send``
and ``receive``; they only move tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from dsjax.model.attention import AttentionFamily
from dsjax.model.expert_dispatch import ExpertDispatch
from dsjax.model.forms import Form
from dsjax.model.in_place import MatricesInPlace
from dsjax.model.layer_values import Computed, Layer, Projected, Sent
from dsjax.model.native_router import native_choice
from dsjax.model.paging import Cache, Rows
from dsjax.model.router import Routing
from dsjax.model.rows import RowGroup
from dsjax.model.token_sharding import TokenSharding
from dsjax.model.transformer import Projections
from sharding.dispatch import Transit
from sharding.dispatch.transit import in_turn


@dataclass(frozen=True, eq=False)
class LayerParts:
    """The parts of any layer, for use while a step is traced."""

    attention: AttentionFamily
    forms: tuple[Form, Form]  # of prefill and of decode
    products: MatricesInPlace
    experts: ExpertDispatch
    sharding: TokenSharding
    apart: bool  # whether routed experts are on separate devices (AFD), so that tokens leave this mesh

    def splits_tokens(self, layer: Layer, x: Float[Array, "B T *n D"]) -> bool:
        """Whether to split the layer's tokens over ``tp`` after attention, because no later weight of the layer is sharded over ``tp``.

        Attention then ends in a reduce-scatter and the layer in an all-gather. Together they send as much as one all-reduce.
        """
        tp = self.sharding.spec.tp_size
        is_sharded = self.products.rules.table
        if tp == 1 or x.shape[1] % tp:
            return False
        if hasattr(layer.block, "mlp"):
            return not is_sharded["mlp_width"]
        if self.apart:  # tokens leave this mesh whole
            return False
        return not (hasattr(layer.block.moe, "shared") and is_sharded["shared_width"])

    # First part: attention. In a dense layer the MLP follows it.

    def attend(self, layer: Layer, x: Float[Array, "B T *n D"], cache: Cache) -> tuple[Float[Array, "B T *n D"], Cache]:
        """Run attention. Return the tokens after it, and the cache with their entries."""
        projected, cache = self.project(layer, x, cache)
        return self.attend_projected(layer, projected, cache), cache

    def project(self, layer: Layer, x: Float[Array, "B T *n D"], cache: Cache) -> tuple[Projected, Cache]:
        """Run attention up to its heads. Return its projections, and the cache with the tokens' entries."""
        x = self.sharding.whole(x)
        project = partial(self._project, layer, x)
        mix, p = self.sharding.if_any(layer.tokens.active, project, lambda: _zeros(jax.eval_shape(project)))
        return Projected(x, mix, p), self.attention.cache_entries(
            layer.block.attn, cache, layer.cache_layer, layer.tokens, p
        )

    def attend_projected(self, layer: Layer, projected: Projected, cache: Cache) -> Float[Array, "B T *n D"]:
        """Run the rest of ``attend``: the heads and the output projection."""
        x, mix, p = projected.x, projected.mix, projected.projections
        return self.sharding.if_any(
            layer.tokens.active, lambda: self.add_heads(layer, x, mix, self.heads(layer, p, cache)), lambda: x
        )

    def _project(self, layer: Layer, x: Float[Array, "B T *n D"]) -> tuple[Any, Projections]:
        layer = layer.rebind()
        tokens = layer.tokens
        normalise = self.products.normalise
        block_input, mix = self.products.residual(layer.block.attn_residual).pre(x)
        normed = self.sharding.whole(normalise(layer.block.attn_norm, block_input))
        products = {"multiply": self.products.multiply(layer.index), "normalise": normalise}
        forms = [group.shape.form for group in tokens.groups]
        return mix, self.attention.project(layer.block.attn, normed, tokens.rotation, forms, **products)

    def heads(self, layer: Layer, p: Projections, cache: Cache) -> list[Array]:
        """Return attention's result for each row group, before its output projection."""
        layer = layer.rebind()
        tokens = layer.tokens
        results = []
        start = 0
        for group in tokens.groups:
            _, R, C = group.tokens.shape
            part = jax.tree.map(lambda a: rearrange(a[:, start : start + R * C], "b (r c) ... -> b r c ...", c=C), p)  # noqa: B023

            def attend(form: Form, length: Int[Array, "B R"], group=group, part=part) -> Array:
                tables = group.tables
                windows = None
                if group.shape.windows:
                    tables, windows = jnp.split(tables, [group.shape.pages], axis=-1)
                rows = Rows(group.positions, tables, length, tokens.filled, windows)
                return self.attention.attend(layer.block.attn, form, cache, layer.cache_layer, layer.index, rows, part)

            results.append(self._attend_by_kind(group, attend))
            start += R * C
        return results

    def _attend_by_kind(self, group: RowGroup, attend: Callable[[Form, Int[Array, "B R"]], Array]) -> Array:
        """Return ``attend(form, length)`` of a row group: prompt tokens in the prefill form, output tokens in the decode form.

        length: how many tokens of each row to compute, from its first one. A group with only one kind of tokens runs ``attend`` once.
        """
        form = group.shape.form
        length = group.length
        if group.prompt_length is None:
            return attend(form, length)
        prompts = jnp.clip(group.prompt_length - group.start, 0, length)
        outputs = jnp.where(prompts < length, length, 0)  # kernels start at a row's first token
        prefill, decode = self.forms

        def attend_both_kinds() -> Array:
            is_prompt = group.positions < group.prompt_length[..., None]
            return jnp.where(is_prompt[..., None, None], attend(prefill, prompts), attend(decode, outputs))

        other_kind = outputs if form == prefill else prompts
        return jax.lax.cond(jnp.any(other_kind > 0), attend_both_kinds, lambda: attend(form, length))

    def add_heads(
        self, layer: Layer, x: Float[Array, "B T *n D"], mix: Any, results: Sequence[Array]
    ) -> Float[Array, "B T *n D"]:
        """Project the results of ``heads`` (``results``), and add them to the tokens through the residual connection."""
        layer = layer.rebind()
        groups = layer.tokens.groups
        tokens_split = self.splits_tokens(layer, x)
        scatter = tokens_split and len(groups) == 1
        multiply = self.products.multiply(layer.index, scatter_result=scatter, scatter_xla=scatter)
        outputs = []
        for group, heads in zip(groups, results, strict=True):
            B, R, C = group.tokens.shape
            if scatter:
                heads = rearrange(heads, "b r c ... -> b (r c) ...")
            out = self.attention.output(layer.block.attn, group.shape.form, heads, multiply)
            outputs.append(out.reshape(B, R * C, -1))
        attended = jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]
        attended = (self.sharding.split if tokens_split else self.sharding.whole)(attended)
        x = self.products.residual(layer.block.attn_residual, tokens_split=tokens_split).post(x, mix, attended)
        return self.sharding.split(x) if tokens_split else x

    def multiply_dense(self, layer: Layer, x: Float[Array, "B T *n D"]) -> Float[Array, "B T *n D"]:
        """Return the tokens after a dense layer's MLP, which replaces the other three parts."""

        def run_mlp() -> Float[Array, "B T *n D"]:
            rebound = layer.rebind()
            tokens_split = self.splits_tokens(layer, x)
            normed, mix = self._normed(rebound, x)
            y = rebound.block.mlp(normed, self.products.multiply(layer.index, tokens_split=tokens_split))
            return self.sharding.whole(
                self.products.residual(rebound.block.mlp_residual, tokens_split=tokens_split).post(x, mix, y)
            )

        return self.sharding.if_any(layer.tokens.active, run_mlp, lambda: x)

    def _normed(self, layer: Layer, x: Float[Array, "B T *n D"]) -> tuple[Float[Array, "B T D"], Any]:
        """Normalise the tokens after attention for the MLP or the experts. Also return the ``mix`` for ``Residual.post``."""
        tokens_split = self.splits_tokens(layer, x)
        block_input, mix = self.products.residual(layer.block.mlp_residual, tokens_split=tokens_split).pre(x)
        normed = self.products.normalise(layer.block.mlp_norm, block_input, tokens_split=tokens_split)
        return (self.sharding.split(normed) if tokens_split else self.sharding.whole(normed)), mix

    # Second part: dispatch.

    def send(self, layer: Layer, x: Float[Array, "B T *n D"]) -> Sent:
        """Choose each token's experts and send the token to them."""
        return in_turn(self.dispatch_stages(layer, x), self.route(layer, x))

    def route(self, layer: Layer, x: Float[Array, "B T *n D"]) -> Sent:
        """Run ``send`` without its exchanges: choose experts, and pack the active tokens for the experts' physical copies."""
        B, T, *_, D = x.shape
        tokens_split = self.splits_tokens(layer, x)
        spec = self.sharding.spec
        exchange, _ = self.experts.exchange(layer, x)

        def routed() -> Sent:
            rebound = layer.rebind()
            normed, mix, routing = self.choose(rebound, x)
            with jax.named_scope("experts"):
                axes = spec.token_axes if tokens_split else spec.batch_axes
                rows = self.sharding.constrain(rearrange(normed, "b t d -> (b t) d"), axes)
                transit = exchange.prepare(rows, *self.experts.assign(rebound, routing, tokens_split=tokens_split))
                return Sent(x, mix, normed, transit)

        def inactive() -> Sent:
            shape = (B * T, self.products.config.num_experts_per_tok)
            zeros = jnp.zeros((B, T, D), x.dtype)
            transit = exchange.prepare(rearrange(zeros, "b t d -> (b t) d"), jnp.full(shape, -1), jnp.zeros(shape))
            mix = _zeros(jax.eval_shape(lambda: layer.block.mlp_residual.pre(x)[1]))
            return Sent(x, mix, zeros, transit)

        return self.sharding.if_any(layer.tokens.active, routed, inactive)

    def choose(self, layer: Layer, x: Float[Array, "B T *n D"]) -> tuple[Float[Array, "B T D"], Any, Routing]:
        """Return the normalised tokens, the ``mix`` for ``Residual.post``, and each token's experts."""
        normed, mix = self._normed(layer, x)
        tokens_split = self.splits_tokens(layer, x)
        multiply = self.products.multiply(layer.index, scatter_result=True, tokens_split=tokens_split)
        router = layer.block.moe.router
        with jax.named_scope("router"):
            logits = multiply(router, normed.astype(jnp.float32))
            # Each DP rank chooses for its own tokens: XLA cannot partition ``top_k``, and would gather all tokens' scores on each device.
            # Only ``others`` (bias, table) are read there; ``weight``, which may be sharded, only completes the module.
            graph, weight, others = nnx.split(router, lambda path, _: path[-1] == "weight", ...)

            def choose_on_rank(others: nnx.State, logits: Array, tokens: Array) -> Routing:
                local = nnx.merge(graph, weight, others)
                return (native_choice(self.products.kernels, local) or local.choose)(logits, tokens)

            routing = self.sharding.on_each_rank(choose_on_rank, tokens_split=tokens_split)(
                others, logits, layer.tokens.ids
            )
        return normed, mix, routing

    def dispatch_stages(self, layer: Layer, x: Float[Array, "B T *n D"]) -> Sequence[Callable[[Sent], Sent]]:
        """Return the exchanges of ``send``: one, or two if another rank forwards the rows."""
        exchange, _ = self.experts.exchange(layer, x)
        return [*map(_exchange_transit, exchange.dispatch_stages)]

    # Third part: experts.

    def compute(self, layer: Layer, sent: Sent) -> Computed:
        """Run the routed experts on the tokens received, and the shared experts on this rank's own tokens."""
        return replace(self.compute_routed(layer, sent), shared=self.share(layer, sent.normed))

    def compute_routed(self, layer: Layer, sent: Sent) -> Computed:
        """Run ``compute`` without the shared experts."""
        exchange, experts = self.experts.exchange(layer, sent.normed)
        with jax.named_scope("experts"):
            transit = exchange.compute(sent.transit, experts)
        return Computed(sent.x, sent.mix, transit, None)

    def share(self, layer: Layer, normed: Float[Array, "B T D"]) -> Float[Array, "B T D"] | None:
        """Return the shared experts' output; None if there are none, or they run among the routed experts."""
        if not hasattr(layer.block.moe, "shared"):
            return None
        multiply = self.products.multiply(
            layer.index, scatter_result=True, tokens_split=self.splits_tokens(layer, normed)
        )

        def run_shared() -> Float[Array, "B T D"]:
            return layer.rebind().block.moe.shared(normed, multiply)

        if layer.tokens is None:  # with AFD the shared experts are a program of their own, without tokens
            return run_shared()
        return self.sharding.if_any(layer.tokens.active, run_shared, lambda: jnp.zeros_like(normed))

    # Fourth part: combine.

    def receive(self, layer: Layer, computed: Computed) -> tuple[Float[Array, "B T *n D"], dict[str, Array]]:
        """Return the experts' results to their tokens and add them. Also return the exchange's counts."""
        return self.add(layer, in_turn(self.combine_stages(layer, computed.x), computed))

    def combine_stages(self, layer: Layer, x: Float[Array, "B T *n D"]) -> Sequence[Callable[[Computed], Computed]]:
        """Return the exchanges of ``receive``, like ``dispatch_stages``."""
        exchange, _ = self.experts.exchange(layer, x)
        return [*map(_exchange_transit, exchange.combine_stages)]

    def add(self, layer: Layer, computed: Computed) -> tuple[Float[Array, "B T *n D"], dict[str, Array]]:
        """Run the rest of ``receive``: sum the returned results of each token, and add the sum and the shared experts' output."""
        exchange, experts = self.experts.exchange(layer, computed.x)
        with jax.named_scope("experts"):
            y, report = exchange.add(computed.transit, experts)
        x = computed.x
        tokens_split = self.splits_tokens(layer, x)
        y = self.add_shared(rearrange(y, "(b t) d -> b t d", b=len(x)), computed.shared, tokens_split=tokens_split)
        residual = self.products.residual(layer.block.mlp_residual, tokens_split=tokens_split)
        return self.sharding.whole(residual.post(x, computed.mix, y)), report or {}

    def add_shared(
        self, y: Float[Array, "B T D"], shared: Float[Array, "B T D"] | None, *, tokens_split: bool = False
    ) -> Float[Array, "B T D"]:
        """Add the shared experts' output to the routed experts'. tokens_split: both are split over ``tp``."""
        is_shared_split = tokens_split or self.products.kernels.name("other products") == "pallas"
        if not is_shared_split:  # else add the two before the gather
            y = self.sharding.whole(y)
        return y if shared is None else y + shared


def _exchange_transit(exchange: Callable[[Transit], Transit]) -> Callable[[Any], Any]:
    """Apply an exchange to the ``transit`` of a ``Sent`` or ``Computed``."""

    def run(value: Any) -> Any:
        with jax.named_scope("experts"):
            return replace(value, transit=exchange(value.transit))

    return run


def _zeros(shapes: Any) -> Any:
    """Return zeros with the shapes and dtypes of ``jax.eval_shape``'s result."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
