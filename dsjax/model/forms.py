"""MLA's forms: the ways to compute its attention over a cache, one object each.

``CD`` caches decompressed keys and values per head. ``CC`` caches the latent and expands it to keys and values for all context tokens
in each step. ``A_CC`` absorbs ``W^UK`` into the query and ``W^UV`` into the output, and so attends in latent space, on one array
``[latent ‖ rotary key]``. ``A_CC_ME`` does the same with two separate arrays, so that nothing is concatenated or copied.
``AM_CC_ME`` uses precomputed products ``W^UQ·W^UK`` and ``W^UV·W^O``. All five give the same result.

Engines run the forms with ``kernels``; the others are plain JAX, for comparison and for reading. JAX is imported only to compute, since
the planner and the command line read the table without it.
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
    """Inputs of a form's attention for one row group."""

    queries: Sequence[Array]  # ``[B, R, C, H, _]``
    weights: Sequence[Array] = ()  # matrices by head that multiply the context, ``[M, H, _]``
    # converts the result of ``weigh`` to the heads' values ``[B, R, C, H, U]``
    finish: Callable[[Array], Array] = lambda heads: heads


@dataclass(frozen=True)
class Form:
    """A way to compute MLA's attention. To add a form, subclass it and pass the class: ``LLM(mla_prefill=…, mla_decode=…)``."""

    name: ClassVar[str]  # in options and reports
    layouts: ClassVar[tuple[Layout, ...]] = ("split",)  # cache layouts that it reads
    # backend → name of the kernel that computes it from a cache in the layout ``split``; other backends fall back to plain JAX
    kernels: ClassVar[Mapping[str, str]] = _NONE
    heads_first: ClassVar[bool] = False  # scores are ``[R, H, C, S]``, not ``[R, C, H, S]``
    # it uses precomputed products ``W^UQ·W^UK`` and ``W^UV·W^O``, and ``finish`` returns the layer's output ``[B, R, C, D]``
    materialised: ClassVar[bool] = False
    # if queries choose positions, it masks the others; other forms gather the chosen ones
    masks: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    def prepare(self, mla: MLA, p: Projections) -> Prepared:
        """Return queries and weights from a layer's matrices and its tokens' projections ``[B, R, C, …]``."""
        raise NotImplementedError

    def score(self, queries: Sequence[Array], weights: Sequence[Array], context: Mapping[str, Array]) -> Array:
        """Return unscaled float32 scores of a block of context on one device.

        queries: without ``B``. context: the cache's arrays, ``[R, S, …]``, in the queries' dtype.
        """
        raise NotImplementedError

    def weigh(self, probs: Array, weights: Sequence[Array], context: Mapping[str, Array]) -> Array:
        """Return float32 weighted sums over a block of context. probs: laid out as by ``score``, in the queries' dtype."""
        raise NotImplementedError

    # Costs (``mla_costs.py``). The defaults are for attention in latent space.

    def pair_values(self, config: ModelConfig) -> int:
        """Return a head's multiply-adds for one query and one position."""
        return 2 * config.mla.kv_lora_rank + config.mla.qk_rope_head_dim

    def expansion_values(self, config: ModelConfig) -> int:
        """Return a head's multiply-adds with ``W^UK`` and ``W^UV`` per context position; 0 if they are per query."""
        return 0

    def head_values(self, config: ModelConfig) -> int:
        """Return the number of intermediate values between products, for one head and one query."""
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
        # Sum over the whole row; ``finish`` takes the latent's part. Slicing the context would copy it first.
        return product("rchs,rsw->rchw", probs, context["joined"])


FORMS: dict[str, Form] = {
    form.name: form for form in (_Decompressed(), _Expanded(), _AbsorbedJoined(), _Absorbed(), _Materialised())
}
WITH_KERNELS = tuple(name for name, form in FORMS.items() if form.kernels)
"""The forms that engines run. Each of their sums has a fixed order (``docs/exactness.md``)."""


def form_of(given: str | Form | type[Form]) -> Form:
    """Return the form given by a name, a class or an object.

    Raises:
        UserError: ``given`` is none of these.
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
    """Return a cache layout that the forms of both phases can read.

    Raises:
        UserError: The forms have no layout in common.
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
    """Compute ``einsum`` with sums and result in ``dtype``. None: the operands' dtype."""
    import jax.numpy as jnp

    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def shared_scores(context: Float[Array, "R S W"], q: Float[Array, "R C H W"]) -> Float[Array, "R C H S"]:
    """Return float32 scores of all heads against the latent, or rotary key, that they share.

    For ``queries × contextᵀ`` XLA's CPU backend transposes the context, which pays off only for several queries per row.
    With one query per row, ``context × queriesᵀ`` is faster (256 rows of 128 positions: 1.5 ms instead of 2.0 ms).
    """
    if q.shape[1] == 1:
        return product("rsw,rchw->rsch", context, q).transpose(0, 2, 3, 1)
    return product("rchw,rsw->rchs", q, context)


def _joined(*arrays: Array) -> Array:
    import jax.numpy as jnp

    return jnp.concatenate(arrays, axis=-1)


def _parts(context: Mapping[str, Array], width: int) -> tuple[Array, Array]:
    """Return latents of the given width and rotary keys, in either layout."""
    if "joined" in context:
        return context["joined"][..., :width], context["joined"][..., width:]
    return context["latent"], context["rope"]


def _with_shared(k_nope: Float[Array, "R H S N"], k_rope: Float[Array, "R S O"]) -> Float[Array, "R H S N+O"]:
    import jax.numpy as jnp

    shared = jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:-1], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1)
