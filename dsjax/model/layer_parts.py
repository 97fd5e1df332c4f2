"""The four parts of a decoder layer: attention, the way of its tokens to their experts, these, and the way back.

Each part takes one value of ``dsjax/model/layer_values.py`` and gives the next; whoever runs a layer calls them one after the other, or
something else between them (``docs/architecture.md``). What travels in ``send`` and ``receive`` are ``ways_there`` and ``ways_back``,
which compute nothing.
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
    """The parts of every layer of a step, traced.

    forms: of prompts and of decodes. apart: whether routed experts are on devices of their own, so that tokens leave this mesh.
    """

    attention: AttentionFamily
    forms: tuple[Form, Form]
    products: MatricesInPlace
    experts: ExpertDispatch
    sharding: TokenSharding
    apart: bool

    def by_data(self, of: Layer, x: Float[Array, "B T *n D"]) -> bool:
        """Whether the layer's tokens are split over ``tp`` behind attention, since nothing that follows in it is cut over ``tp``.

        Attention's sum is then scattered, and the layer's result gathered: together what one all-reduce sends.
        """
        tp, cut = self.sharding.spec.tp_size, self.products.rules.table
        if tp == 1 or x.shape[1] % tp:
            return False
        if hasattr(of.block, "mlp"):
            return not cut["mlp_width"]
        if self.apart:
            return False
        return not (hasattr(of.block.moe, "shared") and cut["shared_width"])

    # The first part, and what stands behind it in a layer without routed experts.

    def attend(self, of: Layer, x: Float[Array, "B T *n D"], cache: Cache) -> tuple[Float[Array, "B T *n D"], Cache]:
        """Attention, and the entries that it writes to the cache."""
        projected, cache = self.project(of, x, cache)
        return self.attend_projected(of, projected, cache), cache

    def project(self, of: Layer, x: Float[Array, "B T *n D"], cache: Cache) -> tuple[Projected, Cache]:
        """What stands before attention's heads: its projections, and the entries that it writes to the cache."""
        x = self.sharding.whole(x)
        project = partial(self._project, of, x)
        mix, p = self.sharding.if_any(of.tokens.active, project, lambda: _zeros(jax.eval_shape(project)))
        return Projected(x, mix, p), self.attention.cache_entries(of.block.attn, cache, of.layer, of.tokens, p)

    def attend_projected(self, of: Layer, projected: Projected, cache: Cache) -> Float[Array, "B T *n D"]:
        """The rest of ``attend``."""
        x, mix, p = projected.x, projected.mix, projected.projections
        return self.sharding.if_any(
            of.tokens.active, lambda: self.add_heads(of, x, mix, self.heads(of, p, cache)), lambda: x
        )

    def _project(self, of: Layer, x: Float[Array, "B T *n D"]) -> tuple[Any, Projections]:
        of, tokens, normalise = of.here(), of.tokens, self.products.normalise
        read, mix = self.products.residual(of.block.attn_residual).pre(x)
        normed = self.sharding.whole(normalise(of.block.attn_norm, read))
        products = {"multiply": self.products.multiply(of.index), "normalise": normalise}
        forms = [group.shape.form for group in tokens.groups]
        return mix, self.attention.project(of.block.attn, normed, tokens.rotation, forms, **products)

    def heads(self, of: Layer, p: Projections, cache: Cache) -> list[Array]:
        """What attention gives of each row group, before its output projection."""
        of = of.here()
        tokens, found, start = of.tokens, [], 0
        for group in tokens.groups:
            _, R, C = group.tokens.shape
            part = jax.tree.map(lambda a: rearrange(a[:, start : start + R * C], "b (r c) ... -> b r c ...", c=C), p)  # noqa: B023

            def attend(form: Form, length: Int[Array, "B R"], group=group, part=part) -> Array:
                tables, windows = group.tables, None
                if group.shape.windows:
                    tables, windows = jnp.split(tables, [group.shape.pages], axis=-1)
                rows = Rows(group.positions, tables, length, tokens.filled, windows)
                return self.attention.attend(of.block.attn, form, cache, of.layer, of.index, rows, part)

            found.append(self._attend_by_kind(group, attend))
            start += R * C
        return found

    def _attend_by_kind(self, group: RowGroup, attend: Callable[[Form, Int[Array, "B R"]], Array]) -> Array:
        """``attend(form, length)`` of a row group: its prompt tokens in the prompts' form, its answer tokens in the decodes'.

        length: number of each row's first tokens to compute. A group of one kind runs ``attend`` once.
        """
        form, length = group.shape.form, group.length
        if group.prompt_length is None:
            return attend(form, length)
        prompts = jnp.clip(group.prompt_length - group.start, 0, length)
        answers = jnp.where(prompts < length, length, 0)  # from the row's first token on, as kernels take rows
        prefill, decode = self.forms

        def both() -> Array:
            is_prompt = group.positions < group.prompt_length[..., None]
            return jnp.where(is_prompt[..., None, None], attend(prefill, prompts), attend(decode, answers))

        others = answers if form == prefill else prompts
        return jax.lax.cond(jnp.any(others > 0), both, lambda: attend(form, length))

    def add_heads(
        self, of: Layer, x: Float[Array, "B T *n D"], mix: Any, found: Sequence[Array]
    ) -> Float[Array, "B T *n D"]:
        """The output projection of what ``heads`` gave, added to the tokens."""
        of = of.here()
        index, tokens, by_data = of.index, of.tokens, self.by_data(of, x)
        multiply, outs = self.products.multiply(index), []
        for group, heads in zip(tokens.groups, found, strict=True):
            B, R, C = group.tokens.shape
            if by_data and len(tokens.groups) == 1:
                heads, multiply = (
                    rearrange(heads, "b r c ... -> b (r c) ..."),
                    self.products.multiply(index, split_tokens=True, scatter=True),
                )
            out = self.attention.output(of.block.attn, group.shape.form, heads, multiply)
            outs.append(out.reshape(B, R * C, -1))
        attended = jnp.concatenate(outs, axis=1) if len(outs) > 1 else outs[0]
        attended = (self.sharding.split if by_data else self.sharding.whole)(attended)
        x = self.products.residual(of.block.attn_residual, by_data=by_data).post(x, mix, attended)
        return self.sharding.split(x) if by_data else x

    def multiply_dense(self, of: Layer, x: Float[Array, "B T *n D"]) -> Float[Array, "B T *n D"]:
        """The tokens after a dense layer's MLP: what follows attention there in place of the other three parts."""

        def multiplied() -> Float[Array, "B T *n D"]:
            here, by_data = of.here(), self.by_data(of, x)
            normed, mix = self._normed(here, x)
            y = here.block.mlp(normed, self.products.multiply(of.index, by_data=by_data))
            return self.sharding.whole(self.products.residual(here.block.mlp_residual, by_data=by_data).post(x, mix, y))

        return self.sharding.if_any(of.tokens.active, multiplied, lambda: x)

    def _normed(self, of: Layer, x: Float[Array, "B T *n D"]) -> tuple[Float[Array, "B T D"], Any]:
        """What attention left, normalised for the MLP or the experts; and what ``Residual.post`` is given."""
        by_data = self.by_data(of, x)
        read, mix = self.products.residual(of.block.mlp_residual, by_data=by_data).pre(x)
        normed = self.products.normalise(of.block.mlp_norm, read, by_data=by_data)
        return (self.sharding.split(normed) if by_data else self.sharding.whole(normed)), mix

    # The second part.

    def send(self, of: Layer, x: Float[Array, "B T *n D"]) -> Sent:
        """Choose the experts of each token, and send it to them."""
        return in_turn(self.ways_there(of, x), self.route(of, x))

    def route(self, of: Layer, x: Float[Array, "B T *n D"]) -> Sent:
        """``send`` without the exchange: active tokens are packed for the physical copies of their experts."""
        (B, T, *_, D), by_data, spec = x.shape, self.by_data(of, x), self.sharding.spec
        exchange, _ = self.experts.exchange(of, x)

        def routed() -> Sent:
            here = of.here()
            normed, mix, routing = self.choose(here, x)
            with jax.named_scope("experts"):
                axes = spec.token_axes if by_data else spec.batch_axes
                rows = self.sharding.constrain(rearrange(normed, "b t d -> (b t) d"), axes)
                transit = exchange.prepare(rows, *self.experts.assign(here, routing, by_data=by_data))
                return Sent(x, mix, normed, transit)

        def nowhere() -> Sent:
            choices, zeros = (B * T, self.products.config.num_experts_per_tok), jnp.zeros((B, T, D), x.dtype)
            transit = exchange.prepare(rearrange(zeros, "b t d -> (b t) d"), jnp.full(choices, -1), jnp.zeros(choices))
            mix = _zeros(jax.eval_shape(lambda: of.block.mlp_residual.pre(x)[1]))
            return Sent(x, mix, zeros, transit)

        return self.sharding.if_any(of.tokens.active, routed, nowhere)

    def choose(self, of: Layer, x: Float[Array, "B T *n D"]) -> tuple[Float[Array, "B T D"], Any, Routing]:
        """The tokens as experts read them, what ``Residual.post`` is given, and the experts of each."""
        (normed, mix), by_data = self._normed(of, x), self.by_data(of, x)
        multiply, router = self.products.multiply(of.index, split_tokens=True, by_data=by_data), of.block.moe.router
        with jax.named_scope("router"):
            logits = multiply(router, normed.astype(jnp.float32))
            # Each DP rank chooses for its own tokens: XLA cannot partition ``top_k``, and would gather all tokens' scores on every device.
            graph, weight, beside = nnx.split(router, lambda path, _: path[-1] == "weight", ...)

            def choose_here(beside: nnx.State, logits: Array, tokens: Array) -> Routing:
                own = nnx.merge(graph, weight, beside)
                return (native_choice(self.products.kernels, own) or own.choose)(logits, tokens)

            routing = self.sharding.on_each_rank(choose_here, by_data=by_data)(beside, logits, of.tokens.ids)
        return normed, mix, routing

    def ways_there(self, of: Layer, x: Float[Array, "B T *n D"]) -> Sequence[Callable[[Sent], Sent]]:
        """The rest of ``send``, the exchanges alone: one, or two where rows go by way of another rank."""
        exchange, _ = self.experts.exchange(of, x)
        return [*map(_travelling, exchange.there)]

    # The third part.

    def compute(self, of: Layer, sent: Sent) -> Computed:
        """The routed experts of the tokens that arrived here, and the shared experts of this rank's own."""
        return replace(self.compute_routed(of, sent), shared=self.share(of, sent.normed))

    def compute_routed(self, of: Layer, sent: Sent) -> Computed:
        """``compute`` without the shared experts."""
        exchange, experts = self.experts.exchange(of, sent.normed)
        with jax.named_scope("experts"):
            transit = exchange.compute(sent.transit, experts)
        return Computed(sent.x, sent.mix, transit, None)

    def share(self, of: Layer, normed: Float[Array, "B T D"]) -> Float[Array, "B T D"] | None:
        """What the shared experts add, where they are not among the routed ones."""
        if not hasattr(of.block.moe, "shared"):
            return None
        multiply = self.products.multiply(of.index, split_tokens=True, by_data=self.by_data(of, normed))
        share = lambda: of.here().block.moe.shared(normed, multiply)  # noqa: E731
        return (
            self.sharding.if_any(of.tokens.active, share, lambda: jnp.zeros_like(normed))
            if of.tokens is not None
            else share()
        )

    # The fourth part.

    def receive(self, of: Layer, computed: Computed) -> tuple[Float[Array, "B T *n D"], dict[str, Array]]:
        """Bring the experts' sums back, and add them; and the exchange's counts."""
        return self.add(of, in_turn(self.ways_back(of, computed.x), computed))

    def ways_back(self, of: Layer, x: Float[Array, "B T *n D"]) -> Sequence[Callable[[Computed], Computed]]:
        """The exchanges of ``receive`` alone, as ``ways_there``."""
        exchange, _ = self.experts.exchange(of, x)
        return [*map(_travelling, exchange.back)]

    def add(self, of: Layer, computed: Computed) -> tuple[Float[Array, "B T *n D"], dict[str, Array]]:
        """The rest of ``receive``: each token's sum of what came back."""
        exchange, experts = self.experts.exchange(of, computed.x)
        with jax.named_scope("experts"):
            y, report = exchange.add(computed.transit, experts)
        x, by_data = computed.x, self.by_data(of, computed.x)
        y = self.add_shared(rearrange(y, "(b t) d -> b t d", b=len(x)), computed.shared, by_data=by_data)
        residual = self.products.residual(of.block.mlp_residual, by_data=by_data)
        return self.sharding.whole(residual.post(x, computed.mix, y)), report or {}

    def add_shared(
        self, y: Float[Array, "B T D"], shared: Float[Array, "B T D"] | None, *, by_data: bool = False
    ) -> Float[Array, "B T D"]:
        """The sums of the routed and of the shared experts. by_data: both are split over ``tp``."""
        # Where the shared experts' sum comes split, too, the two are added before they are gathered.
        if self.products.kernels.name("other products") != "pallas" and not by_data:
            y = self.sharding.whole(y)
        return y if shared is None else y + shared


def _travelling(exchange: Callable[[Transit], Transit]) -> Callable[[Any], Any]:
    """An exchange as a step of ``Sent`` or ``Computed``."""

    def travel(value: Any) -> Any:
        with jax.named_scope("experts"):
            return replace(value, transit=exchange(value.transit))

    return travel


def _zeros(described: Any) -> Any:
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), described)
