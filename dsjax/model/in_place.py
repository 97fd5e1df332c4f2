"""Products of a layer with its matrices on a mesh: in place in the stack of layers, and in FP8.

In a scan over layers, XLA copies each slice of a stack before it multiplies with it. If a kernel can read the stack itself, the matrix
stays unsliced and the kernel gets the layer's number. FP8 products use ``shard_map``, too: each device has whole blocks of 128
(``MeshSpec.check_fits``), so it quantises its shard of the activations locally.
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
from dsjax.model.parameters import GroupedMatrix, Matrix, Multiply, ParameterInfo, depth_from_end, reinterpret, value_of
from dsjax.model.residual import Residual
from dsjax.model.transformer import Transformer
from sharding import MeshSpec, Rules, fp8
from sharding.on_ranks import OneRank, on_ranks
from sharding.sums import pieces_here, tree_sum

SHARED_DEPTHS = ("heads", "mlp_width", "shared_width", "expert_width")
"""Contracted logical axes that a mesh may shard. Sums over them are trees on every mesh."""


@dataclass(frozen=True, eq=False)
class MatricesInPlace:
    """Products with a model's matrices, and the names of those that stay in their stacks."""

    config: ModelConfig
    infos: Mapping[str, ParameterInfo]  # all parameters by path
    spec: MeshSpec
    mesh: Mesh | OneRank
    rules: Rules
    kernels: Kernels
    scheme: ActivationScheme  # whether activations are quantised for products with FP8 weights

    @property
    def native(self) -> bool:
        """Whether native kernels compute products and norms; their rows have the same bits on every mesh (``docs/exactness.md``)."""
        return self.kernels.name("other products") == "native"

    def names(self, attention: Collection[str]) -> frozenset[str]:
        """Return names of the matrices that the scan over layers leaves unsliced, because ``multiply`` or attention reads the stack.

        attention: names of attention matrices that may stay in the stack (``AttentionFamily.in_stack``).
        """
        if self.kernels.name("other products") == "plain":
            return frozenset()
        names = {"gate_up", "down", *attention}
        if self.native:
            return frozenset({*names, "router"})
        on_tpu = self.kernels.pallas.platform == "tpu"
        paths = [(path, path.split(".")[-2]) for path in self.infos if path.endswith(".weight")]
        if on_tpu:  # the routed experts' matrices have the same names but separate kernels
            paths = [(path, name) for path, name in paths if ".experts." not in path]
        refused = {name for path, name in paths if name in names and not self._takes(path)}
        return frozenset(names - refused)

    def _local(self, info: ParameterInfo | None) -> jax.ShapeDtypeStruct | None:
        """Return a device's shard of a stacked parameter, of a matrix as ``[L, in, *out]``."""
        if info is None:
            return None
        shape = self.rules.sharding(self.mesh, info.logical_axes, info.shape).shard_shape(info.shape)
        shape = (shape[0], shape[-1], *shape[1:-1]) if info.depth_last else shape
        return jax.ShapeDtypeStruct(shape, info.storage_dtype)

    def _takes_slice(self, weight: ParameterInfo, scale: ParameterInfo | None = None) -> bool:
        """Return whether the dense kernel can multiply with one layer of a matrix."""
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
        """Return whether the dense kernel can multiply with a device's shard of a stacked matrix."""
        weight, scale = (
            self._local(self.infos.get(f"{path.removesuffix('weight')}{part}")) for part in ("weight", "scale")
        )
        if path.endswith(".kv_b.weight"):
            return takes_by_head(weight, scale, self.config.mla.qk_nope_head_dim, self.config.mla.v_head_dim)
        return self._dense_takes(weight, scale)

    def multiply(
        self,
        index: Int[Array, ""],
        *,
        scatter_result: bool = False,
        scatter_xla: bool = False,
        tokens_split: bool = False,
    ) -> Multiply:
        """Return the product with a matrix of layer ``index``. It reads matrices that were left unsliced in their stack.

        tokens_split: whether the tokens are already split over ``tp``, and the matrices are replicated.
        scatter_result: leave a replica's tokens split over its ``tp`` devices if the product is summed over ``tp`` and ``tp`` divides the
            tokens. The shared experts' sum is then added to the routed experts', which is split in the same way, before one all-gather.
        scatter_xla: apply ``scatter_result`` to XLA's products, too, with an explicit reduce-scatter instead of the compiler's choice.
        """

        def in_stack(matrix: Matrix, x: Array) -> Array:
            info, weight, kept_fp8 = matrix.weight.info, matrix.weight[...], hasattr(matrix, "scale")
            if isinstance(matrix, GroupedMatrix):
                return self._grouped(matrix, x) if self.native else matrix.product(x)
            if self.native:
                return self._ordered(matrix, index, x, scatter_result=scatter_result, tokens_split=tokens_split)
            sliced = weight.ndim < len(info.shape)
            quantise = kept_fp8 and self.scheme.dynamic
            # If the stack is too large for a kernel, it reads an FP8 slice: copying that moves a fourth of a dequantised slice's bytes.
            pallas = self.kernels.name("other products") == "pallas"
            pallas = pallas and (not sliced or (kept_fp8 and self._takes_slice(info, matrix.scale.info)))
            stored_spec, batch = self.rules.spec(info.logical_axes), self.spec.batch_axes
            layers, *rest = stored_spec
            depth, *columns = (rest[-1], *rest[:-1]) if info.depth_last else rest
            spec = P(layers, depth, *columns)
            split = scatter_result and depth and x.ndim == 3 and x.shape[1] % self.spec.tp_size == 0
            if not (pallas or quantise):
                return self._scattered(matrix, spec, x) if split and scatter_xla else matrix.product(x)
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
                    options = {"tiles": self.kernels.pallas.tiles, "cores": self.kernels.pallas.cores}
                    options |= {"interpret": interpret, "depth_last": info.depth_last}
                    out = products.dense(*parts, rows, dtype=x.dtype, **options)
                else:
                    matrix, scale = (
                        jax.lax.dynamic_index_in_dim(arrays[name], layer, keepdims=False)
                        for name in ("weight", "scale")
                    )
                    if info.depth_last:
                        matrix = depth_from_end(matrix, "stack" in info.logical_axes)
                    rows = self.scheme.quantise(rows)
                    out = block_product(rows, reinterpret(matrix, info.dtype), scale, x.dtype).astype(x.dtype)
                if split:
                    out = jax.lax.psum_scatter(out, depth, scatter_dimension=0, tiled=True)
                elif depth:
                    out = jax.lax.psum(out, depth)
                return out[None]

            tokens = self.spec.head_axes if tokens_split else None
            specs = (dict.fromkeys(arrays, spec) | {"weight": stored_spec}, P(), P(batch, tokens, depth))
            out_specs = P(batch, depth if split else tokens, *columns)
            run = on_ranks(local, self.mesh, specs, out_specs)
            out = run(arrays, layer, rearrange(x, "b ... k -> b (...) k"))
            return out.reshape(*x.shape[:-1], *out.shape[2:])

        return in_stack

    def _grouped(self, matrix: GroupedMatrix, x: Array) -> Array:
        """Compute ``GroupedMatrix.product`` of one layer's matrix with the native kernel. Each group is whole on one device."""
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
        """Compute ``Matrix.product`` with one layer's matrix, and reduce-scatter the sum over ``tp`` along the tokens."""

        def local(weight: Array, x: Array) -> Array:
            return jax.lax.psum_scatter((x[0] @ weight)[None], spec[1], scatter_dimension=1, tiled=True)

        by_rank = self.spec.batch_axes
        in_specs, out_specs = (P(*spec[1:]), P(by_rank, None, spec[1])), P(by_rank, spec[1])
        return on_ranks(local, self.mesh, in_specs, out_specs)(matrix.value(x.dtype), x)

    def _ordered(self, matrix: Matrix, index: Int[Array, ""] | None, x: Array, **tokens: bool) -> Array:
        """Compute ``Matrix.product`` with ``ordered_product``. index: of the layer if ``matrix`` is a stack. tokens: see ``multiply``."""
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
        scatter_result: bool = False,
        tokens_split: bool = False,
        transposed: bool = False,
    ) -> Array:
        """Multiply ``x [B, ..., K]`` by layer ``layer`` of ``weight [L, K, *columns]``, or ``[L, J, K]`` if transposed.

        If a mesh may shard K, its sum is the tree of ``sharding.sums`` on every mesh, and devices that share it add its branches. Rows are
        first quantised if the scheme says so, in blocks of 128 along K.

        Args:
            axes: of the weight.
            dtype: of the result; None: of ``x``.
            scatter_result, tokens_split: see ``multiply``.
        """
        dtype = dtype or x.dtype
        spec, batch = self.rules.spec(axes), self.spec.batch_axes
        depth, columns = spec[1], spec[2:]
        shares = self.rules.ways(self.mesh, axes[1]) if depth else 1
        quantised = "scale" in arrays and self.scheme.dynamic
        pieces = pieces_here(x.shape[-1], shares) if axes[1] in SHARED_DEPTHS else 1
        split = scatter_result and shares > 1 and x.ndim == 3 and x.shape[1] % self.spec.tp_size == 0

        def local(arrays, layer, x):
            rows = fp8.dequantise(*self.scheme.quantise(x[0])) if quantised else x[0]
            where = arrays["weight"], arrays.get("scale"), layer
            out = self.kernels.native.dense(*where, rows, pieces=pieces, transposed=transposed)
            return tree_sum(out, depth, shares, split=split, dtype=dtype)[None] if depth else out[None]

        own = P(spec[0], *columns, depth) if transposed else spec  # as the weight is stored
        rows = self.spec.head_axes if tokens_split else None
        out_specs = P(batch, depth if split else rows, *columns)
        run = on_ranks(local, self.mesh, (dict.fromkeys(arrays, own), P(), P(batch, rows, depth)), out_specs)
        out = run(dict(arrays), layer, rearrange(x, "b ... k -> b (...) k"))
        return out.reshape(*x.shape[:-1], *out.shape[2:])

    def project(self, model: Transformer, hidden: Array, dtype: np.dtype, *, tokens_split: bool) -> Array:
        """Return float32 logits ``[B, J, V]`` of hidden states ``[B, J, D]``. tokens_split: see ``multiply``."""
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
            tokens_split=tokens_split,
            transposed=transposed,
        )

    def residual(self, residual: Residual, *, tokens_split: bool = False) -> Residual:
        """Return the residual connection, with native kernels if available. tokens_split: see ``normalise``."""
        if self.kernels.name("hyper-connections") != "native":
            return residual
        tokens = P(self.spec.batch_axes, self.spec.head_axes if tokens_split else None)
        return residual.with_kernels(self.kernels.native, self.mesh, tokens)

    def normalise(self, norm: RMSNorm | LayerNorm | HeadNorm, x: Array, *, tokens_split: bool = False) -> Array:
        """Apply the norm, with the native kernel if products are native. tokens_split: tokens are split over ``tp``."""
        if self.native and isinstance(norm, HeadNorm):
            return self._normalise_heads(norm, x)
        if not self.native:
            return norm(x)

        def local(x, scale, bias):
            return self.kernels.native.norm(x[0], scale, norm.eps, bias)[None]

        by_rank = P(self.spec.batch_axes, self.spec.head_axes if tokens_split else None)
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
    """Return the stored LM head, and whether it is transposed: with tied embeddings it is the embedding ``[V, D]``."""
    tied = model.config.tie_word_embeddings
    return (model.embed if tied else model.head).weight[...], tied
