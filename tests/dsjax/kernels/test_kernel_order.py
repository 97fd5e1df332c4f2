"""Every Pallas kernel says in its call in what chunks it adds, and what chose them."""

import importlib
import pkgutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import dsjax.kernels.pallas as kernels
from dsjax.kernels.pallas import attention, experts, products, tpu_products

BF16, LAYER = jnp.dtype(jnp.bfloat16), jnp.zeros((), jnp.int32)


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def kernel_call(function, *arguments):
    def calls(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from calls(inner)

    (call,) = calls(jax.make_jaxpr(function)(*arguments).jaxpr)
    return call


def kernel_arrays(function, *arguments):
    return [value.aval for value in kernel_call(function, *arguments).invars]


def stated(function, *arguments):
    """The fields of the one kernel's metadata that speak of its order."""
    metadata = dict(kernel_call(function, *arguments).params["metadata"])
    return {name: value for name, value in metadata.items() if name.startswith("order_")}


def dense(rows):
    """What the call of a dense product states; and so on for the other kernels."""
    return stated(lambda w, x: products.dense(w, None, BF16, LAYER, x), shape(2, 7168, 1536), shape(rows, 7168))


def attend(rows):
    cache = {"latent": shape(2, 64, 16, 512), "rope": shape(2, 64, 16, 64)}
    return stated(
        lambda q, r, c, s, t: attention.latent_attention(q, r, c, BF16, LAYER, s, s, t, scale=1.0),
        shape(rows, 1, 128, 512), shape(rows, 1, 128, 64), cache, shape(rows, dtype=jnp.int32),
        shape(rows, 64, dtype=jnp.int32),
    )  # fmt: skip


def test_products_and_attention_of_few_rows_split_their_sums_by_their_shape():
    assert dense(1) == {
        "order_depth": "128", "order_splits": "5", "order_rows": "16", "order_depends": "rows.mesh",
    }  # fmt: skip
    assert (dense(2048)["order_splits"], dense(2048)["order_depth"]) == ("1", "64")
    few, many = attend(1), attend(128)
    assert (few["order_splits"], many["order_splits"]) == ("4", "1")
    assert few["order_positions"] == many["order_positions"] == "64"
    assert few["order_depends"] == "rows.mesh"


def test_the_sum_of_a_tokens_experts_depends_on_where_they_are_and_a_tpus_product_takes_the_whole_depth():
    found = stated(
        lambda y, place, weight: experts.combine(y, place, weight, 8.0),
        shape(64, 256), shape(8, 8, dtype=jnp.int32), shape(8, 8, dtype=jnp.float32),
    )  # fmt: skip
    assert found == {"order_terms": "8", "order_depends": "mesh"}

    def of(x, weight, scale):
        return tpu_products.dense(tpu_products.Stack(weight, scale, np.dtype(jnp.float8_e4m3fn)), LAYER, x)

    found = stated(of, shape(8, 256), shape(2, 256, 128, dtype=jnp.float8_e4m3fn), shape(2, 2, 1, dtype=jnp.float32))
    assert found == {"order_depth": "256", "order_rows": "16", "order_depends": "rows.mesh"}


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(kernels.__path__)])
def test_no_kernel_leaves_its_order_out(name):
    module = importlib.import_module(f"{kernels.__name__}.{name}")
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count("pl.pallas_call(") == source.count("metadata=cost.metadata | ")
