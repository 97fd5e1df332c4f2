"""A layer's products with its matrices on a mesh: where they lie in the stack of layers, and in FP8.

XLA copies what a scan over layers slices out of a stack before its own products read it. Where a kernel reads the stack itself, the
matrix stays whole, and the layer's number goes to the kernel. Products in FP8 are written out for each device, too: a device has whole
blocks of 128 (``MeshSpec.check_fits``), so that it quantises its part of the activations by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig
from dsjax.kernels.pallas import activations, products, tpu_products
from dsjax.kernels.pallas.heads import takes as takes_by_head
from dsjax.kernels.table import Kernels
from dsjax.model.fp8_product import ActivationScheme, block_product
from dsjax.model.norm import HeadNorm, LayerNorm, RMSNorm
from dsjax.model.parameters import GroupedMatrix, Matrix, Multiply, ParameterInfo, reinterpret, value_of
from dsjax.model.residual import Residual
from dsjax.model.transformer import Transformer
from sharding import MeshSpec, Rules, fp8
from sharding.on_ranks import OneRank, on_ranks
from sharding.sums import pieces_here, tree_sum

SHARED_DEPTHS = ("heads", "mlp_width", "shared_width", "expert_width")
"""Logical axes over which products are summed and which some mesh cuts: their sums are trees on every mesh."""


@dataclass(frozen=True, eq=False)
class MatricesInPlace:
    """Which of a model's matrices stay in their stacks, and the products with them.

    infos: of all parameters, by path. scheme: whether activations are quantised for products with FP8 weights.
    """

    config: ModelConfig
    infos: Mapping[str, ParameterInfo]
    spec: MeshSpec
    mesh: Mesh | OneRank
    rules: Rules
    kernels: Kernels
    scheme: ActivationScheme

    @property
    def native(self) -> bool:
        """Whether products and norms are the native kernels', whose rows have the same bits on every mesh (``docs/exactness.md``)."""
        return self.kernels.name("other products") == "native"

    def names(self, attention: Collection[str]) -> frozenset[str]:
        """Names of the matrices that the scan over layers need not slice, because ``multiply``, or attention, reads them in the stack.

        attention: names of attention's matrices that may be among them (``AttentionFamily.in_stack``).
        """
        if self.kernels.name("other products") == "plain":
            return frozenset()
        names = {"gate_up", "down", *attention}
        if self.native:
            return frozenset({*names, "router"})
        on_tpu = self.kernels.pallas.platform == "tpu"
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

    def _takes_slice(self, weight: ParameterInfo, scale: ParameterInfo | None = None) -> bool:
        """Whether the dense kernel can multiply with one layer of a matrix."""
        return self._dense_takes(
            *(
                stored and jax.ShapeDtypeStruct((1, *stored.shape[1:]), stored.dtype)
                for stored in map(self._local, (weight, scale))
            )
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
            return takes_by_head(weight, scale, self.config.mla.qk_nope_head_dim, self.config.mla.v_head_dim)
        return self._dense_takes(weight, scale)

    def multiply(
        self, index: Int[Array, ""], *, split_tokens: bool = False, scatter: bool = False, by_data: bool = False
    ) -> Multiply:
        """Products with the matrices of layer ``index`` of a stack, in the stack where they were left there.

        scatter: ``split_tokens`` where XLA multiplies, too: a reduce-scatter of the program's own, and not what the compiler makes of it.
        by_data: the tokens are split over ``tp`` already, and the matrices are whole on each device.

        split_tokens: leave a replica's tokens split over its ``tp`` devices where the product is summed over them and ``tp`` divides
        them. The shared experts' sum is then added to the routed experts', which come so, and both are gathered at once.
        """

        def in_stack(matrix: Matrix, x: Array) -> Array:
            info, weight, kept_fp8 = matrix.weight.info, matrix.weight[...], hasattr(matrix, "scale")
            if isinstance(matrix, GroupedMatrix):
                return self._grouped(matrix, x) if self.native else matrix.product(x)
            if self.native:
                return self._ordered(matrix, index, x, split_tokens=split_tokens, by_data=by_data)
            sliced = weight.ndim < len(info.shape)
            quantise = kept_fp8 and self.scheme.dynamic
            # A kernel reads an FP8 slice where the stack is too large for it: the copy is a fourth of what a dequantised one moves.
            pallas = self.kernels.name("other products") == "pallas"
            pallas = pallas and (not sliced or (kept_fp8 and self._takes_slice(info, matrix.scale.info)))
            spec, batch = self.rules.spec(info.logical_axes), self.spec.batch_axes
            depth, columns = spec[1], spec[2:]
            split = split_tokens and depth and x.ndim == 3 and x.shape[1] % self.spec.tp_size == 0
            if not (pallas or quantise):
                return self._scattered(matrix, spec, x) if split and scatter else matrix.product(x)
            arrays = {"weight": weight} | ({"scale": matrix.scale[...]} if kept_fp8 else {})
            if sliced:
                arrays, layer = {name: array[None] for name, array in arrays.items()}, jnp.int32(0)
            else:
                layer = index

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
                    sizes = {"tiles": self.kernels.pallas.tiles, "cores": self.kernels.pallas.cores}
                    out = products.dense(*parts, rows, dtype=x.dtype, interpret=interpret, **sizes)
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

            tokens = self.spec.head_axes if by_data else None
            specs = (dict.fromkeys(arrays, spec), P(), P(batch, tokens, depth))
            out_specs = P(batch, depth if split else tokens, *columns)
            run = on_ranks(local, self.mesh, specs, out_specs)
            out = run(arrays, layer, rearrange(x, "b ... k -> b (...) k"))
            return out.reshape(*x.shape[:-1], *out.shape[2:])

        return in_stack

    def _grouped(self, matrix: GroupedMatrix, x: Array) -> Array:
        """``GroupedMatrix.product`` of one layer's matrix by the native kernel. A group is whole on its device."""
        weight = matrix.value(x.dtype) if hasattr(matrix, "scale") else matrix.weight[...]
        columns, batch = self.rules.spec(matrix.weight.info.logical_axes)[-1], self.spec.batch_axes

        def local(weight, x):
            grouped = rearrange(weight, "k (g w) -> 1 k g w", w=matrix.width)
            return self.kernels.native.dense(grouped, None, jnp.int32(0), x[0], grouped=True)[None]

        by_group = P(batch, None, columns)
        run = on_ranks(local, self.mesh, (P(None, columns), by_group), by_group)
        out = run(weight, rearrange(x, "b ... g k -> b (...) g k"))
        return out.reshape(*x.shape[:-1], matrix.width)

    def _scattered(self, matrix: Matrix, spec: P, x: Array) -> Array:
        """``Matrix.product`` with one layer's matrix, whose sum over ``tp`` is scattered over the tokens."""

        def local(weight: Array, x: Array) -> Array:
            return jax.lax.psum_scatter((x[0] @ weight)[None], spec[1], scatter_dimension=1, tiled=True)

        by_rank = self.spec.batch_axes
        in_specs, out_specs = (P(*spec[1:]), P(by_rank, None, spec[1])), P(by_rank, spec[1])
        return on_ranks(local, self.mesh, in_specs, out_specs)(matrix.value(x.dtype), x)

    def _ordered(self, matrix: Matrix, index: Int[Array, ""] | None, x: Array, **tokens: bool) -> Array:
        """``Matrix.product`` by ``ordered_product``; index: of the layer, where ``matrix`` is the stack's; tokens: as of ``multiply``."""
        info, weight = matrix.weight.info, matrix.weight[...]
        axes = info.logical_axes[1:] if info.logical_axes[0] == "layers" else info.logical_axes
        arrays = {"weight": weight} | ({"scale": matrix.scale[...]} if hasattr(matrix, "scale") else {})
        if weight.ndim == len(axes):  # one layer's
            arrays, index = {name: array[None] for name, array in arrays.items()}, jnp.int32(0)
        return self.ordered_product(arrays, index, x, ("layers", *axes), **tokens)

    def ordered_product(
        self,
        arrays: Mapping[str, Array],
        layer: Int[Array, ""],
        x: Array,
        axes: tuple[str | None, ...],
        *,
        dtype: np.dtype | None = None,
        split_tokens: bool = False,
        by_data: bool = False,
        transposed: bool = False,
    ) -> Array:
        """``x [B, ..., K]`` times layer ``layer`` of ``weight [L, K, *columns]`` with logical ``axes``; transposed it is ``[L, J, K]``.

        Where K can be cut over devices, its sum is the tree of ``sharding.sums`` on every mesh, and devices that share it add its branches.
        split_tokens, by_data: as of ``multiply``. dtype: of the result; None: that of ``x``. Rows are quantised first where the scheme
        says so, in blocks of 128 of K.
        """
        dtype = dtype or x.dtype
        spec, batch = self.rules.spec(axes), self.spec.batch_axes
        depth, columns = spec[1], spec[2:]
        shares = self.rules.ways(self.mesh, axes[1]) if depth else 1
        quantised = "scale" in arrays and self.scheme.dynamic
        pieces = pieces_here(x.shape[-1], shares) if axes[1] in SHARED_DEPTHS else 1
        split = split_tokens and shares > 1 and x.ndim == 3 and x.shape[1] % self.spec.tp_size == 0

        def local(arrays, layer, x):
            rows = fp8.dequantise(*self.scheme.quantise(x[0])) if quantised else x[0]
            where = arrays["weight"], arrays.get("scale"), layer
            out = self.kernels.native.dense(*where, rows, pieces=pieces, transposed=transposed)
            return tree_sum(out, depth, shares, split=split, dtype=dtype)[None] if depth else out[None]

        own = P(spec[0], *columns, depth) if transposed else spec  # as the weight lies
        rows = self.spec.head_axes if by_data else None
        out_specs = P(batch, depth if split else rows, *columns)
        run = on_ranks(local, self.mesh, (dict.fromkeys(arrays, own), P(), P(batch, rows, depth)), out_specs)
        out = run(dict(arrays), layer, rearrange(x, "b ... k -> b (...) k"))
        return out.reshape(*x.shape[:-1], *out.shape[2:])

    def project(self, model: Transformer, hidden: Array, dtype: np.dtype, *, by_data: bool) -> Array:
        """Float32 logits ``[B, J, V]`` of hidden states ``[B, J, D]``. by_data: as of ``multiply``."""
        if not self.native:
            weight = model.head_weight(dtype)
            return jnp.einsum("bnd,dv->bnv", hidden, weight, preferred_element_type=jnp.float32)
        weight, transposed = _stored_head(model)
        return self.ordered_product(
            {"weight": weight[None]},
            jnp.int32(0),
            hidden,
            ("layers", "embed", "vocab"),
            dtype=jnp.dtype("float32"),
            by_data=by_data,
            transposed=transposed,
        )

    def residual(self, residual: Residual, *, by_data: bool = False) -> Residual:
        """The residual connection, by kernels where it has some. by_data: as of ``normalise``."""
        if self.kernels.name("hyper-connections") != "native":
            return residual
        tokens = P(self.spec.batch_axes, self.spec.head_axes if by_data else None)
        return residual.with_kernels(self.kernels.native, self.mesh, tokens)

    def normalise(self, norm: RMSNorm | LayerNorm | HeadNorm, x: Array, *, by_data: bool = False) -> Array:
        """The norm, by the native kernel where products are native. by_data: tokens are split over ``tp``."""
        if self.native and isinstance(norm, HeadNorm):
            return self._normalise_heads(norm, x)
        if not self.native:
            return norm(x)

        def local(x, scale, bias):
            return self.kernels.native.norm(x[0], scale, norm.eps, bias)[None]

        by_rank = P(self.spec.batch_axes, self.spec.head_axes if by_data else None)
        run = on_ranks(local, self.mesh, (by_rank, P(), P()), by_rank)
        scale = value_of(norm.scale).astype(x.dtype)
        bias = value_of(norm.bias).astype(x.dtype) if isinstance(norm, LayerNorm) else None
        return run(rearrange(x, "b ... k -> b (...) k"), scale, bias).reshape(x.shape)

    def _normalise_heads(self, norm: HeadNorm, x: Float[Array, "B T H W"]) -> Float[Array, "B T H W"]:
        ones = jnp.ones(x.shape[-1:], x.dtype)
        by_head = P(self.spec.batch_axes, None, self.rules.spec(("heads",))[0])
        local = lambda x: self.kernels.native.norm(x.reshape(-1, x.shape[-1]), ones, norm.eps).reshape(x.shape)  # noqa: E731
        return on_ranks(local, self.mesh, (by_head,), by_head)(x)


def _stored_head(model: Transformer) -> tuple[Array, bool]:
    """The output projection as it lies in memory, and whether that is transposed: ``[V, D]``, the embedding, where the two are tied."""
    tied = model.config.tie_word_embeddings
    return (model.embed if tied else model.head).weight[...], tied
