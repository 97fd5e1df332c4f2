"""A layer's products with its matrices on a mesh: where they lie in the stack of layers, and in FP8.

XLA copies what a scan over layers slices out of a stack before its own products read it. Where a kernel reads the stack itself, the
matrix stays whole, and the layer's number goes to the kernel. Products in FP8 are written out for each device, too: a device has whole
blocks of 128 (``MeshSpec.check_fits``), so that it quantises its part of the activations by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from dsjax.config import ModelConfig
from dsjax.kernels.pallas import activations, products, tpu_products
from dsjax.kernels.pallas.heads import takes as takes_by_head
from dsjax.kernels.table import Kernels
from dsjax.model.forms import Form, Layout
from dsjax.model.fp8_product import ActivationScheme, block_product
from dsjax.model.parameters import Matrix, Multiply, ParameterInfo, reinterpret
from sharding import MeshSpec, Rules


@dataclass(frozen=True, eq=False)
class MatricesInPlace:
    """Which of a model's matrices stay in their stacks, and the products with them.

    infos: of all parameters, by path. scheme: whether activations are quantised for products with FP8 weights.
    """

    config: ModelConfig
    infos: Mapping[str, ParameterInfo]
    spec: MeshSpec
    mesh: Mesh
    rules: Rules
    layout: Layout
    kernels: Kernels
    scheme: ActivationScheme

    def names(self, forms: Sequence[Form]) -> frozenset[str]:
        """Names of the matrices that the scan over layers need not slice, because ``multiply``, or attention, reads them in the stack.

        forms: MLA forms of the step's row groups.
        """
        if self.kernels.name("other products") != "pallas":
            return frozenset()
        on_tpu = self.kernels.pallas.platform == "tpu"
        names = {"q_a", "kv_a", "gate_up", "down"}
        # With materialised products, parts of these are multiplied with, by head.
        if "AM_CC_ME" not in forms:
            names |= {"q", "q_b", "o"}
        if self.layout != "decompressed" and not on_tpu:
            names |= {"kv_b"}
        paths = [(path, path.split(".")[-2]) for path in self.infos if path.endswith(".weight")]
        if on_tpu:  # the routed experts' matrices, whose names are the same, have kernels of their own
            paths = [(path, name) for path, name in paths if ".experts." not in path]
        refused = {name for path, name in paths if name in names and not self._takes(path)}
        return frozenset(names - refused)

    def _local(self, info: ParameterInfo | None) -> jax.ShapeDtypeStruct | None:
        """The part of a stacked parameter that a device has."""
        return info and jax.ShapeDtypeStruct(
            self.rules.sharding(self.mesh, info.logical_axes, info.shape).shard_shape(info.shape), info.storage_dtype
        )

    def _takes_slice(self, *infos: ParameterInfo) -> bool:
        """Whether the dense kernel can multiply with one layer of a matrix, of which a scale is given too."""
        return self._dense_takes(
            *(jax.ShapeDtypeStruct((1, *stored.shape[1:]), stored.dtype) for stored in map(self._local, infos))
        )

    @property
    def _dense_takes(self):
        return tpu_products.takes_dense if self.kernels.pallas.platform == "tpu" else products.takes

    def _takes(self, path: str) -> bool:
        """Whether the dense kernel can multiply with the part of a stacked matrix that a device has."""
        weight, scale = (
            self._local(self.infos.get(f"{path.removesuffix('weight')}{part}")) for part in ("weight", "scale")
        )
        if path.endswith(".kv_b.weight"):
            return takes_by_head(weight, scale, self.config.qk_nope_head_dim, self.config.v_head_dim)
        return self._dense_takes(weight, scale)

    def multiply(self, index: Int[Array, ""], *, split_tokens: bool = False) -> Multiply:
        """Products with the matrices of layer ``index`` of a stack, in the stack where they were left there.

        split_tokens: leave a replica's tokens split over its ``tp`` devices where the product is summed over them and ``tp`` divides
        them. The shared experts' sum is then added to the routed experts', which come so, and both are gathered at once.
        """

        def in_stack(matrix: Matrix, x: Array) -> Array:
            info, weight, kept_fp8 = matrix.weight.info, matrix.weight[...], hasattr(matrix, "scale")
            sliced = weight.ndim < len(info.shape)
            quantise = kept_fp8 and self.scheme.dynamic
            # A kernel reads an FP8 slice where the stack is too large for it: the copy is a fourth of what a dequantised one moves.
            pallas = self.kernels.name("other products") == "pallas"
            pallas = pallas and (not sliced or (kept_fp8 and self._takes_slice(info, matrix.scale.info)))
            if not (pallas or quantise):
                return matrix.product(x)
            spec, batch = self.rules.spec(info.logical_axes), self.spec.batch_axes
            depth, columns = spec[1], spec[2:]
            arrays = {"weight": weight} | ({"scale": matrix.scale[...]} if kept_fp8 else {})
            if sliced:
                arrays, layer = {name: array[None] for name, array in arrays.items()}, jnp.int32(0)
            else:
                layer = index

            split = split_tokens and depth and x.ndim == 3 and x.shape[1] % self.spec.tp_size == 0

            def local(arrays, layer, x):
                rows = x[0]
                if pallas and self.kernels.pallas.platform == "tpu":
                    stack = tpu_products.Stack(arrays["weight"], arrays["scale"], info.dtype)
                    out = tpu_products.dense(stack, layer, rows, interpret=self.kernels.pallas.interpret)
                elif pallas:
                    interpret = self.kernels.pallas.interpret
                    if quantise:
                        rows = activations.quantise(rows, powers=self.scheme.powers, interpret=interpret)
                    parts = arrays["weight"], arrays.get("scale"), info.dtype, layer
                    out = products.dense(
                        *parts, rows, dtype=x.dtype, interpret=interpret, tiles=self.kernels.pallas.tiles
                    )
                else:
                    matrix, scale = (
                        jax.lax.dynamic_index_in_dim(arrays[name], layer, keepdims=False)
                        for name in ("weight", "scale")
                    )
                    rows = self.scheme.quantise(rows)
                    out = block_product(rows, reinterpret(matrix, info.dtype), scale, x.dtype).astype(x.dtype)
                if split:
                    out = jax.lax.psum_scatter(out, depth, scatter_dimension=0, tiled=True)
                elif depth:
                    out = jax.lax.psum(out, depth)
                return out[None]

            specs = (dict.fromkeys(arrays, spec), P(), P(batch, None, depth))
            out_specs = P(batch, depth if split else None, *columns)
            run = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
            out = run(arrays, layer, x.reshape(self.spec.dp_size, -1, x.shape[-1]))
            return out.reshape(*x.shape[:-1], *out.shape[2:])

        return in_stack
