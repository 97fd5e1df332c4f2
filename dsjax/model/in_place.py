"""A layer's matrices multiplied with where they lie in the stack of layers, on a mesh.

XLA copies what a scan over layers slices out of a stack before its own products read it. Where a kernel reads the stack itself, the
matrix stays whole, and the layer's number goes to the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from dsjax.config import ModelConfig
from dsjax.kernels.pallas import products
from dsjax.kernels.pallas.heads import takes as takes_by_head
from dsjax.kernels.table import Kernels
from dsjax.model.forms import Form, Layout
from dsjax.model.parameters import Matrix, Multiply, ParameterInfo
from sharding import MeshSpec, Rules


@dataclass(frozen=True, eq=False)
class MatricesInPlace:
    """Which of a model's matrices stay in their stacks, and the products with them. infos: of all parameters, by path."""

    config: ModelConfig
    infos: Mapping[str, ParameterInfo]
    spec: MeshSpec
    mesh: Mesh
    rules: Rules
    layout: Layout
    kernels: Kernels

    def names(self, forms: Sequence[Form]) -> frozenset[str]:
        """Names of the matrices that the scan over layers need not slice, because ``multiply``, or attention, reads them in the stack.

        forms: MLA forms of the step's row groups.
        """
        if self.kernels.name("other products") != "pallas":
            return frozenset()
        names = {"q_a", "kv_a", "gate_up", "down"}
        # With materialised products, parts of these are multiplied with, by head.
        if "AM_CC_ME" not in forms:
            names |= {"q", "q_b", "o"}
        if self.layout != "decompressed":
            names |= {"kv_b"}
        paths = [(path, path.split(".")[-2]) for path in self.infos if path.endswith(".weight")]
        refused = {name for path, name in paths if name in names and not self._takes(path)}
        return frozenset(names - refused)

    def _takes(self, path: str) -> bool:
        """Whether the dense kernel can multiply with the part of a stacked matrix that a device has."""

        def local(path):
            info = self.infos.get(path)
            return info and jax.ShapeDtypeStruct(
                self.rules.sharding(self.mesh, info.logical_axes, info.shape).shard_shape(info.shape),
                info.storage_dtype,
            )

        weight, scale = local(path), local(f"{path.removesuffix('weight')}scale")
        if path.endswith(".kv_b.weight"):
            return takes_by_head(weight, scale, self.config.qk_nope_head_dim, self.config.v_head_dim)
        return products.takes(weight, scale)

    def multiply(self, index: Int[Array, ""], *, split_tokens: bool = False) -> Multiply:
        """Products with the matrices of layer ``index`` of a stack: in the stack where they were left there.

        split_tokens: leave a replica's tokens split over its ``tp`` devices where the product is summed over them and ``tp`` divides
        them. The shared experts' sum is then added to the routed experts', which come so, and both are gathered at once.
        """

        def in_stack(matrix: Matrix, x: Array) -> Array:
            info = matrix.weight.info
            if matrix.weight[...].ndim < len(info.shape):
                return matrix.product(x)
            spec, batch = self.rules.spec(info.logical_axes), self.spec.batch_axes
            depth, columns = spec[1], spec[2:]
            arrays = {"weight": matrix.weight[...]} | ({"scale": matrix.scale[...]} if hasattr(matrix, "scale") else {})

            split = split_tokens and depth and x.ndim == 3 and x.shape[1] % self.spec.tp_size == 0

            def local(arrays, index, x):
                out = products.dense(
                    arrays["weight"],
                    arrays.get("scale"),
                    info.dtype,
                    index,
                    x[0],
                    interpret=self.kernels.pallas.interpret,
                )
                if split:
                    out = jax.lax.psum_scatter(out, depth, scatter_dimension=0, tiled=True)
                elif depth:
                    out = jax.lax.psum(out, depth)
                return out[None]

            specs = (dict.fromkeys(arrays, spec), P(), P(batch, None, depth))
            out_specs = P(batch, depth if split else None, *columns)
            run = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
            out = run(arrays, index, x.reshape(x.shape[0], -1, x.shape[-1]))
            return out.reshape(*x.shape[:-1], *out.shape[2:])

        return in_stack
