"""``W^UK`` into the queries and ``W^UV`` onto the results, by head, on TPUs (Mosaic, by Pallas): in tiles that every number of rows has.

XLA's own product by head is as fast, but its order of the depth follows the rows. This one is used with ``--batch-invariant``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dsjax.kernels.pallas import pl
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype
from dsjax.kernels.pallas.order import KernelOrder
from dsjax.kernels.pallas.tpu_products import FIXED_ROWS


def by_head(
    weight_HKN: Float[Array, "H K N"], x_THK: Float[Array, "T H K"], name: str, *, interpret: bool = False
) -> Float[Array, "T H N"]:
    """Each head's part of a row times that head's matrix, added in float32, in the dtype of ``x_THK``. name: of the call in a program."""
    (H, K, N), T = weight_HKN.shape, x_THK.shape[0]
    tiles = -(-T // FIXED_ROWS)
    x_HTK = jnp.pad(jnp.swapaxes(x_THK, 0, 1), ((0, 0), (0, tiles * FIXED_ROWS - T), (0, 0)))
    precision = lax.Precision.HIGHEST if x_THK.dtype == jnp.float32 else lax.Precision.DEFAULT
    moved = weight_HKN.size * weight_HKN.dtype.itemsize + T * H * (K + N) * x_THK.dtype.itemsize
    cost = KernelCost(2.0 * tiles * FIXED_ROWS * H * K * N, moved, hlo_dtype(x_THK.dtype))
    order = KernelOrder({"depth": K, "rows": FIXED_ROWS}, sums="f32")

    def kernel(x_ref, weight_ref, out_ref):
        product = jnp.dot(x_ref[0], weight_ref[0], precision=precision, preferred_element_type=jnp.float32)
        out_ref[0] = product.astype(out_ref.dtype)

    out_HTN = pl.pallas_call(
        kernel,
        grid=(H, tiles),
        in_specs=[
            pl.BlockSpec((1, FIXED_ROWS, K), lambda h, t: (h, t, 0)),
            pl.BlockSpec((1, K, N), lambda h, t: (h, 0, 0)),
        ],
        out_specs=pl.BlockSpec((1, FIXED_ROWS, N), lambda h, t: (h, t, 0)),
        out_shape=jax.ShapeDtypeStruct((H, tiles * FIXED_ROWS, N), x_THK.dtype),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=interpret,
        name=name,
    )(x_HTK, weight_HKN)
    return jnp.swapaxes(out_HTN[:, :T], 0, 1)
