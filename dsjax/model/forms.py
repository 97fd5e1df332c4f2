"""MLA's forms: the ways to compute its attention over a cache, one object each.

``CD`` caches keys and values decompressed, per head. ``CC`` caches the latent and expands it to keys and values for all context tokens,
anew each step. ``A_CC`` absorbs ``W^UK`` into the query and ``W^UV`` into the output, and so attends in latent space, on one array
``[latent ‖ rotary key]``. ``A_CC_ME`` does the same with the two parts kept and multiplied apart, so that nothing is concatenated or
moved. ``AM_CC_ME`` has the products ``W^UQ·W^UK`` and ``W^UV·W^O`` computed ahead. All five give the same result.

Forms with ``kernels`` are what engines run; the others are plain JAX, to compare with and to read. Nothing here imports JAX before it
computes: the planner and the command line read the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.model.cache_groups import Layout

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from dsjax.model.transformer import MLA, Projections


_NONE = MappingProxyType({})


class Prepared(NamedTuple):
    """What a form attends with, of one row group.

    queries: ``[B, R, C, H, _]``. weights: matrices by head that multiply the context, ``[M, H, _]``. finish: makes the heads' values
    ``[B, R, C, H, U]`` of what ``weigh`` gave.
    """

    queries: Sequence[Array]
    weights: Sequence[Array] = ()
    finish: Callable[[Array], Array] = lambda heads: heads


@dataclass(frozen=True)
class Form:
    """One way to compute MLA's attention. For a form of your own, inherit it and give the class: ``LLM(mla_prefill=…, mla_decode=…)``.

    name: in options and reports. layouts: cache layouts that it reads. kernels: backend → name of the kernel that computes it from a cache
    in the layout ``split``; another backend leaves it to plain JAX. heads_first: scores are ``[R, H, C, S]``, not ``[R, C, H, S]``.
    materialised: it multiplies with ``W^UQ·W^UK`` and ``W^UV·W^O``, computed ahead, and ``finish`` gives the layer's output
    ``[B, R, C, D]``. masks: where queries choose what they attend to, it masks the rest; other forms gather what was chosen.
    """

    name: ClassVar[str]
    layouts: ClassVar[tuple[Layout, ...]] = ("split",)
    kernels: ClassVar[Mapping[str, str]] = _NONE
    heads_first: ClassVar[bool] = False
    materialised: ClassVar[bool] = False
    masks: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    def prepare(self, mla: MLA, p: Projections) -> Prepared:
        """Queries and weights, from a layer's matrices and the projections of its tokens ``[B, R, C, …]``."""
        raise NotImplementedError

    def score(self, queries: Sequence[Array], weights: Sequence[Array], context: Mapping[str, Array]) -> Array:
        """Float32 scores of a block of context, before they are scaled, on one device.

        queries: without ``B``. context: the cache's arrays, ``[R, S, …]``, in the queries' dtype.
        """
        raise NotImplementedError

    def weigh(self, probs: Array, weights: Sequence[Array], context: Mapping[str, Array]) -> Array:
        """Float32 sums over a block of context. probs: as ``score`` lays them out, in the queries' dtype."""
        raise NotImplementedError

    # What it costs (``mla_costs.py``). By default as in latent space.

    def pair_values(self, config: ModelConfig) -> int:
        """Multiply-adds of a head for a query and a position."""
        return 2 * config.mla.kv_lora_rank + config.mla.qk_rope_head_dim

    def expansion_values(self, config: ModelConfig) -> int:
        """Multiply-adds of a head with ``W^UK`` and ``W^UV`` for a position of the context, instead of for a query."""
        return 0

    def head_values(self, config: ModelConfig) -> int:
        """Numbers of a head and a query that products hand to one another."""
        return config.mla.qk_head_dim + config.mla.v_head_dim + 2 * config.mla.kv_lora_rank


class _Decompressed(Form):
    name, layouts, heads_first = "CD", ("decompressed",), True

    def prepare(self, mla, p):
        return Prepared((_joined(p.q_nope, p.q_rope),))

    def score(self, queries, weights, context):
        return product("rchw,rshw->rhcs", queries[0], context["key"])

    def weigh(self, probs, weights, context):
        return product("rhcs,rshu->rhcu", probs, context["value"])

    def pair_values(self, config):
        return config.mla.qk_head_dim + config.mla.v_head_dim

    head_values = pair_values


class _Expanded(Form):
    name, layouts, heads_first, masks = "CC", ("split", "joined"), True, True
    kernels: ClassVar = {"native": "expanded_attention", "pallas": "latent_attention"}

    def prepare(self, mla, p):
        return Prepared((_joined(p.q_nope, p.q_rope),), mla.key_value_weight(p.latent.dtype))

    def score(self, queries, weights, context):
        latent, k_rope = _parts(context, weights[0].shape[0])
        k_nope = product("rsm,mhn->rhsn", latent, weights[0], dtype=None)
        return product("rchw,rhsw->rhcs", queries[0], _with_shared(k_nope, k_rope))

    def weigh(self, probs, weights, context):
        latent, _ = _parts(context, weights[1].shape[0])
        values = product("rsm,mhu->rhsu", latent, weights[1], dtype=None)
        return product("rhcs,rhsu->rhcu", probs, values)

    def expansion_values(self, config):
        return config.mla.kv_lora_rank * (config.mla.qk_nope_head_dim + config.mla.v_head_dim)

    pair_values = head_values = _Decompressed.pair_values


class _Absorbed(Form):
    name = "A_CC_ME"
    kernels: ClassVar = {"native": "absorbed_attention", "pallas": "latent_attention"}

    def prepare(self, mla, p):
        up_key, up_value = mla.key_value_weight(p.latent.dtype)
        queries = product("brchn,mhn->brchm", p.q_nope, up_key, dtype=None), p.q_rope
        return Prepared(queries, finish=lambda heads: product("brchm,mhu->brchu", heads, up_value, dtype=None))

    def score(self, queries, weights, context):
        q_latent, q_rope = queries
        return shared_scores(context["latent"], q_latent) + shared_scores(context["rope"], q_rope)

    def weigh(self, probs, weights, context):
        return product("rchs,rsm->rchm", probs, context["latent"])


class _Materialised(_Absorbed):
    name, kernels, materialised = "AM_CC_ME", _NONE, True

    def prepare(self, mla, p):
        query_key, value_output = mla.materialised(p.latent.dtype)
        queries = product("brcq,qhm->brchm", p.q_latent, query_key, dtype=None), p.q_rope
        return Prepared(queries, finish=lambda heads: product("brchm,hmd->brcd", heads, value_output, dtype=None))

    def head_values(self, config):
        return config.mla.qk_rope_head_dim + 2 * config.mla.kv_lora_rank


class _AbsorbedJoined(_Absorbed):
    name, layouts, kernels = "A_CC", ("joined",), _NONE

    def prepare(self, mla, p):
        apart, M = super().prepare(mla, p), p.latent.shape[-1]
        return Prepared((_joined(*apart.queries),), finish=lambda heads: apart.finish(heads[..., :M]))

    def score(self, queries, weights, context):
        return shared_scores(context["joined"], queries[0])

    def weigh(self, probs, weights, context):
        # All of the row, of which ``finish`` takes the latent's part: a slice of the context would be copied first.
        return product("rchs,rsw->rchw", probs, context["joined"])


FORMS: dict[str, Form] = {
    form.name: form for form in (_Decompressed(), _Expanded(), _AbsorbedJoined(), _Absorbed(), _Materialised())
}
WITH_KERNELS = tuple(name for name, form in FORMS.items() if form.kernels)
"""The forms that engines run; they keep one order of each sum (``docs/exactness.md``)."""


def form_of(given: str | Form | type[Form]) -> Form:
    """The form of a name, a class or an object.

    Raises:
        UserError: it is neither.
    """
    if isinstance(given, type) and issubclass(given, Form):
        return given()
    if isinstance(given, Form):
        return given
    if given in FORMS:
        return FORMS[given]
    raise UserError(
        f"MLA form {given!r}: expected one of {', '.join(FORMS)}, or a class that inherits dsjax.model.forms.Form"
    )


def common_layout(prefill: Form, decode: Form) -> Layout:
    """The cache layout that both phases' forms can read.

    Raises:
        UserError: they have no layout in common.
    """
    for layout in prefill.layouts:
        if layout in decode.layouts:
            return layout
    partners = [name for name, form in FORMS.items() if set(form.layouts) & set(decode.layouts)]
    raise UserError(
        f"--mla-prefill {prefill} reads a cache that is {' or '.join(prefill.layouts)}, --mla-decode {decode} one that is "
        f"{' or '.join(decode.layouts)}; with --mla-decode {decode} choose --mla-prefill from {', '.join(partners)}"
    )


def product(equation: str, a: Array, b: Array, dtype: str | None = "float32") -> Array:
    """``einsum`` with sums and result in ``dtype``; None: in that of its operands."""
    import jax.numpy as jnp

    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def shared_scores(context: Float[Array, "R S W"], q: Float[Array, "R C H W"]) -> Float[Array, "R C H S"]:
    """Float32 scores of all heads against the one latent, or rotary key, that they share.

    ``queries × contextᵀ`` makes XLA's CPU backend transpose the context, which pays for many queries; for one query a row it
    is the other way round (256 rows of 128 positions: 1.5 against 2.0 ms).
    """
    if q.shape[1] == 1:
        return product("rsw,rchw->rsch", context, q).transpose(0, 2, 3, 1)
    return product("rchw,rsw->rchs", q, context)


def _joined(*arrays: Array) -> Array:
    import jax.numpy as jnp

    return jnp.concatenate(arrays, axis=-1)


def _parts(context: Mapping[str, Array], width: int) -> tuple[Array, Array]:
    """Latents, of that width, and rotary keys, of either layout."""
    if "joined" in context:
        return context["joined"][..., :width], context["joined"][..., width:]
    return context["latent"], context["rope"]


def _with_shared(k_nope: Float[Array, "R H S N"], k_rope: Float[Array, "R S O"]) -> Float[Array, "R H S N+O"]:
    import jax.numpy as jnp

    shared = jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:-1], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1)
