"""Declaration of a parameter in one place: shape, dtype, logical axes and initialiser.

A module's constructor calls a ``Declaration``, whose parameters hold ``jax.ShapeDtypeStruct`` values, so a
671 B model is built in milliseconds without allocating memory. Abstract values, shardings, random values and the
checkpoint reader are all derived from the model's flat table ``{path: ParameterInfo}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from einops import rearrange
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dsjax.config.weights import WEIGHT_FORMATS, WeightFormat
from sharding import Rules
from sharding.host_memory import on_device

Weights = Literal[tuple(WEIGHT_FORMATS)]
"""Weight format of matrices: a key of ``WEIGHT_FORMATS``."""
WEIGHT_DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
BLOCK = 128
"""Side of the square blocks that share one FP8 scale (DeepSeek-V3's ``weight_block_size``)."""

DEPTH_LAST = ("gpu",)
"""Platforms that store FP8 matrices with ``in`` last, the only order that Hopper's FP8 tensor cores read."""

_BIT_PATTERNS = {"bfloat16": np.dtype(np.uint16), "float8_e4m3fn": np.dtype(np.uint8)}


@dataclass(frozen=True)
class ParameterInfo:
    """Metadata of a parameter: everything except its values."""

    shape: tuple[int, ...]
    dtype: np.dtype
    """Logical dtype of the values."""
    storage_dtype: np.dtype
    """Dtype in memory: ``dtype``, or the unsigned integer of the same width (see ``storage_dtype``)."""
    logical_axes: tuple[str | None, ...]
    init: str = "normal"
    """``normal`` (standard deviation 1/√fan-in), ``ones``, ``zeros`` or ``scale`` (FP8 block scales)."""
    quantised: bool = False
    """Whether the parameter has an associated ``scale``."""
    packed: int = 1
    """Values per element: 2 in a byte of a packed format."""
    depth_last: bool = False
    """Whether a matrix is stored ``[..., out, in]``, not ``[..., in, out]``; ``shape`` and ``logical_axes`` are as stored."""

    @property
    def count(self) -> int:
        """Number of model parameters; 0 for derived parameters and scales."""
        return 0 if self.init in ("derived", "scale") else math.prod(self.shape) * self.packed

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, unsharded parameter."""
        return math.prod(self.shape) * self.dtype.itemsize


def storage_dtype(dtype: np.dtype, platform: str) -> np.dtype:
    """Return the dtype in which ``platform`` stores values of ``dtype``.

    XLA's CPU backend computes in float32, and hoists the conversion of a whole scanned stack of bf16 or FP8 weights out
    of the loop: 13.9 GB of temporaries for a V3 stack's share. Integers with the same bits, reinterpreted inside the loop
    body, are converted one layer at a time (0.24 GB).
    """
    return _BIT_PATTERNS.get(dtype.name, dtype) if platform == "cpu" else dtype


def depth_from_end(array: Array, fused: bool) -> Array:
    """Return a matrix ``[..., out, in]`` as ``[..., in, out]``; fused: ``[..., 2, out, in]`` as ``[..., in, 2, out]``."""
    return jnp.moveaxis(array, -1, -3 if fused else -2)


def reinterpret(array: Array, dtype: np.dtype) -> Array:
    """Reinterpret stored bits as ``dtype``. An array of that dtype is returned unchanged."""
    if array.dtype == dtype:
        return array
    return jax.lax.bitcast_convert_type(array, jnp.dtype(dtype))


def store(values: Array, dtype: np.dtype, stored: np.dtype) -> Array:
    """Round to ``dtype`` and return the bits as ``stored``, the inverse of ``reinterpret``."""
    rounded = values.astype(dtype)
    return rounded if stored == dtype else jax.lax.bitcast_convert_type(rounded, stored)


def dequantise(weight: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """Return ``weight × scale`` with one scale per 128 × 128 block of the last two matrix dimensions.

    weight: ``[..., I, J]`` float8_e4m3fn, or ``[..., I, 2, J]`` for a fused gate and up; scale: the same with I and J
    divided by 128, rounded up. Source: DeepSeek-V3 technical report §3.3.2, ``weight_scale_inv`` of its checkpoint.
    """
    fused = weight.ndim >= 3 and scale.shape[-2] == 2 and weight.shape[-2] == 2
    rows = weight.ndim - (3 if fused else 2)
    expanded = expand_blocks(expand_blocks(scale, rows, weight.shape[rows]), weight.ndim - 1, weight.shape[-1])
    return (weight.astype(jnp.float32) * expanded).astype(dtype)


def expand_blocks(scale: Array, axis: int, size: int) -> Array:
    """Repeat each scale along ``axis`` for the (up to) 128 positions of its block."""
    return jax.lax.slice_in_dim(jnp.repeat(scale, BLOCK, axis=axis), 0, size, axis=axis)


def blocks(size: int) -> int:
    """Return the number of quantisation blocks of a dimension, including a partial last one."""
    return -(-size // BLOCK)


@dataclass(frozen=True)
class Declaration:
    """Factory of one model's parameters, with their weight format, platform and number of stacked layers."""

    weights: Weights
    platform: str
    stack: int | None = None  # length of the leading ``layers`` axis of each parameter; None: no such axis
    num_physical: int = 0  # physical experts of a layer
    # whether to declare the products of a materialised MLA form, which are derived from other parameters
    materialise: bool = False
    # dtype of derived parameters; None: ``plain_dtype``. FP8 weights times their scales do not fit bfloat16, so a model that computes in
    # float32 keeps derived parameters in float32
    derived_dtype: np.dtype | None = None

    def stacked(self, depth: int) -> Declaration:
        """Return a copy whose parameters get a leading ``layers`` axis of size ``depth``."""
        return replace(self, stack=depth)

    @property
    def plain_dtype(self) -> np.dtype:
        """Dtype of parameters that are never quantised: norms, router, embedding, head."""
        return WEIGHT_DTYPES[self.format.plain]

    @property
    def keeps_fp8(self) -> bool:
        """Whether matrices outside the routed experts are FP8."""
        return self.format.keeps_fp8

    @property
    def format(self) -> WeightFormat:
        """Entry of the table of weight formats."""
        return WEIGHT_FORMATS[self.weights]

    @property
    def for_experts(self) -> Declaration:
        """Declaration for the matrices of routed experts, which ``mixed`` keeps in bf16."""
        return replace(self, weights="bf16") if self.weights == "mixed" else self

    def parameter(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        init: str = "normal",
        dtype: np.dtype | None = None,
        quantised: bool = False,
        packed: int = 1,
        depth_last: bool = False,
    ) -> nnx.Param:
        """Return a parameter that holds a ``jax.ShapeDtypeStruct`` instead of values."""
        if self.stack is not None:
            shape, axes = (self.stack, *shape), ("layers", *axes)
        dtype = dtype or self.plain_dtype
        stored = storage_dtype(dtype, self.platform)
        info = ParameterInfo(shape, dtype, stored, axes, init, quantised, packed, depth_last)
        return nnx.Param(jax.ShapeDtypeStruct(shape, stored), info=info)


class Matrix(nnx.Module):
    """A weight matrix. In FP8 it has a ``scale`` in addition to ``weight``.

    ``shape`` is ``[..., in, out]``, or ``[..., in, 2, out]`` for a fused gate and up, whose middle axis is called
    ``stack``. Platforms of ``DEPTH_LAST`` store the ``weight`` of an FP8 matrix with ``in`` last.

    by_head: products are by head (``kernels/pallas/heads.py``) or by group, from ``[in, out]`` on every platform.
    """

    def __init__(
        self,
        declare: Declaration,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        quantise: bool = True,
        by_head: bool = False,
    ):
        fp8 = quantise and declare.keeps_fp8
        dtype = WEIGHT_DTYPES["fp8"] if fp8 else None
        rows = len(shape) - (3 if axes[-2] == "stack" else 2)
        depth_last = fp8 and declare.platform in DEPTH_LAST and not by_head
        as_stored = shape, axes
        if depth_last:  # ``[..., in, *out]`` is stored as ``[..., *out, in]``
            as_stored = [(*each[:rows], *each[rows + 1 :], each[rows]) for each in as_stored]
        self.weight = declare.parameter(*as_stored, dtype=dtype, quantised=fp8, depth_last=depth_last)
        if fp8:
            scale_shape = tuple(
                blocks(size) if axis in (rows, len(shape) - 1) else size for axis, size in enumerate(shape)
            )
            self.scale = declare.parameter(scale_shape, axes, init="scale", dtype=WEIGHT_DTYPES["f32"])

    def value(self, dtype: jnp.dtype) -> Array:
        """Return the matrix in ``dtype``, dequantised if necessary."""
        weight, info = value_of(self.weight), self.weight.info
        if info.depth_last:
            weight = depth_from_end(weight, "stack" in info.logical_axes)
        if not hasattr(self, "scale"):
            return weight.astype(dtype)
        return dequantise(weight, self.scale[...], dtype)

    def product(self, x: Array) -> Array:
        """Multiply ``x [..., in]`` by the matrix. Returns ``[..., out]``, or ``[..., 2, out]``."""
        weight = self.value(x.dtype)
        return x @ weight if weight.ndim == 2 else jnp.einsum("...d,dgf->...gf", x, weight)


class GroupedMatrix(Matrix):
    """A matrix ``[in, groups × out]``. Each group of columns multiplies a separate input."""

    def __init__(self, declare: Declaration, groups: int, depth: int, width: int, axes: tuple[str | None, str | None]):
        # From [out, in], XLA would copy the whole stack into its own order before the scan.
        super().__init__(declare, (depth, groups * width), axes, by_head=True)
        self.width = width

    def product(self, x: Float[Array, "*b G K"]) -> Float[Array, "*b G W"]:
        """Multiply each group's input by the group's columns."""
        weight = rearrange(self.value(x.dtype), "k (g w) -> g k w", w=self.width)
        return jnp.einsum("...gk,gkw->...gw", x, weight)


Multiply = Callable[[Matrix, Array], Array]
"""``Matrix.product``, or a faster equivalent."""


def multiply(matrix: Matrix, x: Array) -> Array:
    """Compute ``Matrix.product``."""
    return matrix.product(x)


def value_of(parameter: nnx.Param) -> Array:
    """Return a parameter's values: its stored bits, reinterpreted as its logical dtype."""
    return reinterpret(parameter[...], parameter.info.dtype)


@dataclass(frozen=True, eq=False)
class ParameterTable:
    """A model's structure and the flat table of its parameters."""

    graph: nnx.GraphDef
    tree: jax.tree_util.PyTreeDef
    infos: Mapping[str, ParameterInfo]
    # of all parameters, in the order of ``tree``. Parameters that are not in ``infos`` are on other devices and have no value here
    paths: tuple[str, ...]

    @classmethod
    def of(cls, module: nnx.Module) -> ParameterTable:
        """Flatten an abstract module; paths are attribute names joined by dots."""
        graph, state = nnx.split(module)
        flat = nnx.to_flat_state(state)
        infos = {".".join(map(str, path)): leaf.info for path, leaf in flat}
        return cls(graph, jax.tree.structure(state), infos, tuple(infos))

    def without(self, paths: Container[str]) -> ParameterTable:
        """Return the table for devices that do not have these parameters."""
        return replace(self, infos={path: info for path, info in self.infos.items() if path not in paths})

    def bind(self, params: Mapping[str, Array]) -> nnx.Module:
        """Return the module with these values, callable inside ``jax.jit``."""
        return nnx.merge(
            self.graph,
            jax.tree.unflatten(self.tree, [params[path] if path in self.infos else 0 for path in self.paths]),
        )


def describe(parameters: Mapping[str, ParameterInfo], rules: Rules, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return each parameter's shape, storage dtype and sharding."""
    return {
        path: jax.ShapeDtypeStruct(
            info.shape, info.storage_dtype, sharding=rules.sharding(mesh, info.logical_axes, info.shape)
        )
        for path, info in parameters.items()
    }


def component(path: str) -> str:
    """Return the component of the model that a parameter belongs to, for reports of memory."""
    for part, name in ((".experts.", "routed experts"), (".shared.", "shared experts"), (".router.", "router")):
        if part in path:
            return name
    if "residual." in path:
        return "hyper-connections"
    if ".attn." in path:
        return "attention"
    if "_proj." in path:
        return "MTP projection"
    if ".mlp." in path:
        return "dense MLP"
    return {"embed": "embedding", "head": "head"}.get(path.split(".")[0], "norms")


def device_bytes(params: Mapping[str, Array | jax.ShapeDtypeStruct]) -> dict[str, int]:
    """Return one device's bytes of ``params`` by component. params: arrays or abstract arrays with shardings; host arrays count 0."""
    sizes: dict[str, int] = {}
    for path, array in params.items():
        if not on_device(array.sharding):
            sizes.setdefault(component(path), 0)
            continue
        local = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        sizes[component(path)] = sizes.get(component(path), 0) + local
    return sizes
