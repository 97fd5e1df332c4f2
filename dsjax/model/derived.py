"""Parameters derived from the checkpoint's: the products of a materialised MLA form."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from dsjax.model.parameters import store
from dsjax.model.step import ModelStep
from dsjax.model.transformer import MLA


def materialise(step: ModelStep, params: Mapping[str, Array]) -> dict[str, Array]:
    """Add the products of a materialised MLA form to ``params`` if the step's table declares them."""
    derived = {path: info for path, info in step.table.infos.items() if info.init == "derived"}
    if not derived:
        return dict(params)
    shardings = {path: step.rules.sharding(step.mesh, info.logical_axes, info.shape) for path, info in derived.items()}

    def products(params):
        # Placeholders for the derived entries, which are not read, so that the module can be bound.
        stand_in = {path: params.get(path, 0) for path in step.table.infos}
        model, made = step.table.bind(stand_in), {}
        for name in {path.rpartition(".")[0] for path in derived}:
            attention = operator.attrgetter(name)(model)
            graph, absent, weights = nnx.split(attention, lambda path, _: f"{name}.{path[-1]}" in derived, ...)  # noqa: B023
            query_key, value_output = jax.lax.map(
                lambda w, graph=graph, absent=absent: _products_of(nnx.merge(graph, absent, w), step.dtype), weights
            )
            made |= {f"{name}.query_key": query_key, f"{name}.value_output": value_output}
        return {path: store(value, derived[path].dtype, derived[path].storage_dtype) for path, value in made.items()}

    return {**params, **jax.jit(products, out_shardings=shardings)(params)}


def _products_of(mla: MLA, dtype: jnp.dtype) -> tuple[Float[Array, "Q H M"], Float[Array, "H M D"]]:
    """Return ``W^UQ·W^UK`` and ``W^UV·W^O`` by head."""
    up_key, up_value = mla.key_value_weight(jnp.float32)
    query = mla.query_weight(jnp.float32)[..., : mla.config.mla.qk_nope_head_dim]
    output = rearrange(mla.o.value(jnp.float32), "(h u) d -> h u d", h=mla.config.num_attention_heads)
    query_key = jnp.einsum("qhn,mhn->qhm", query, up_key)
    return query_key.astype(dtype), jnp.einsum("mhu,hud->hmd", up_value, output).astype(dtype)
