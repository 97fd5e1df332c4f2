"""How a parameter is declared, once: shape, dtype, logical axes, initialiser; and what follows from it.

A module's constructor calls a ``Declaration``; the parameters it makes hold ``jax.ShapeDtypeStruct`` values, so a
671 B model is built in milliseconds and owns no memory. Abstract values, shardings, random values and the
checkpoint reader are all derived from the flat table ``{path: ParameterInfo}`` of such a model.
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
"""How matrices are kept: a name of the table of weight formats."""
WEIGHT_DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
BLOCK = 128
"""Side of the square blocks that share one FP8 scale (DeepSeek-V3's ``weight_block_size``)."""

_BIT_PATTERNS = {"bfloat16": np.dtype(np.uint16), "float8_e4m3fn": np.dtype(np.uint8)}


@dataclass(frozen=True)
class ParameterInfo:
    """All there is to know of a parameter but its values."""

    shape: tuple[int, ...]
    dtype: np.dtype
    """What the bits mean."""
    storage_dtype: np.dtype
    """What lies in memory: ``dtype``, or the unsigned integer of its width (see ``storage_dtype``)."""
    logical_axes: tuple[str | None, ...]
    init: str = "normal"
    """``normal`` (standard deviation 1/√fan-in), ``ones``, ``zeros`` or ``scale`` (FP8 block scales)."""
    quantised: bool = False
    """Whether a ``scale`` parameter stands beside it."""
    packed: int = 1
    """Numbers in an element: 2 in a byte of a packed format."""

    @property
    def count(self) -> int:
        """The model's own numbers in it: none in what is derived or is a scale of others."""
        return 0 if self.init in ("derived", "scale") else math.prod(self.shape) * self.packed

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter, over all devices once."""
        return math.prod(self.shape) * self.dtype.itemsize


def storage_dtype(dtype: np.dtype, platform: str) -> np.dtype:
    """The dtype in which values of ``dtype`` are kept on ``platform``.

    XLA's CPU backend computes in float32, and hoists the conversion of a whole scanned stack of bf16 or FP8 weights out
    of the loop: 13.9 GB of temporaries for a V3 stack's share. Integers of the same bits, reinterpreted inside the loop
    body, convert one layer at a time (0.24 GB).
    """
    return _BIT_PATTERNS.get(dtype.name, dtype) if platform == "cpu" else dtype


def reinterpret(array: Array, dtype: np.dtype) -> Array:
    """Read stored bits as ``dtype``; an array that has it already comes back as it is."""
    if array.dtype == dtype:
        return array
    return jax.lax.bitcast_convert_type(array, jnp.dtype(dtype))


def store(values: Array, dtype: np.dtype, stored: np.dtype) -> Array:
    """Round to ``dtype``, then to the bits that lie in memory: what ``reinterpret`` reads."""
    rounded = values.astype(dtype)
    return rounded if stored == dtype else jax.lax.bitcast_convert_type(rounded, stored)


def dequantise(weight: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """``weight × scale`` with one scale per 128 × 128 block of the last two matrix dimensions.

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
    """How many quantisation blocks a dimension has, the last one possibly short."""
    return -(-size // BLOCK)


@dataclass(frozen=True)
class Declaration:
    """Makes the parameters of one model: it knows how matrices are kept, for which platform, and how many layers are stacked.

    stack: length of the leading ``layers`` axis of each parameter; None: no such axis. num_physical: physical experts of a layer.
    materialise: whether to declare the products of a materialised MLA form, which are derived from other parameters.
    derived_dtype: of what is computed from parameters once; None: as of parameters that are never quantised. FP8 weights times their
        scales do not fit bfloat16, so that where float32 is computed in, what is derived from them is kept in float32.
    """

    weights: Weights
    platform: str
    stack: int | None = None
    num_physical: int = 0
    materialise: bool = False
    derived_dtype: np.dtype | None = None

    def stacked(self, depth: int) -> Declaration:
        """A declaration like this one, whose parameters get a leading ``layers`` axis of size ``depth``."""
        return replace(self, stack=depth)

    @property
    def plain_dtype(self) -> np.dtype:
        """Dtype of parameters that are never quantised: norms, router, embedding, head."""
        return WEIGHT_DTYPES[self.format.plain]

    @property
    def keeps_fp8(self) -> bool:
        """Whether matrices other than the routed experts' are FP8."""
        return self.format.keeps_fp8

    @property
    def format(self) -> WeightFormat:
        """The row of the table of weight formats."""
        return WEIGHT_FORMATS[self.weights]

    @property
    def for_experts(self) -> Declaration:
        """The declaration for the matrices of routed experts, which ``mixed`` keeps in bf16."""
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
    ) -> nnx.Param:
        """One parameter, which holds a ``jax.ShapeDtypeStruct`` where a loaded one has values."""
        if self.stack is not None:
            shape, axes = (self.stack, *shape), ("layers", *axes)
        dtype = dtype or self.plain_dtype
        stored = storage_dtype(dtype, self.platform)
        info = ParameterInfo(shape, dtype, stored, axes, init, quantised, packed)
        return nnx.Param(jax.ShapeDtypeStruct(shape, stored), info=info)


class Matrix(nnx.Module):
    """A weight matrix that may be kept in FP8; ``scale`` then stands beside ``weight``.

    ``shape`` is ``[..., in, out]``, or ``[..., in, 2, out]`` for a fused gate and up, whose middle axis is called
    ``stack``.
    """

    def __init__(
        self, declare: Declaration, shape: tuple[int, ...], axes: tuple[str | None, ...], *, quantise: bool = True
    ):
        fp8 = quantise and declare.keeps_fp8
        dtype = WEIGHT_DTYPES["fp8"] if fp8 else None
        self.weight = declare.parameter(shape, axes, dtype=dtype, quantised=fp8)
        if fp8:
            rows = len(shape) - (3 if axes[-2] == "stack" else 2)
            scale_shape = tuple(
                blocks(size) if axis in (rows, len(shape) - 1) else size for axis, size in enumerate(shape)
            )
            self.scale = declare.parameter(scale_shape, axes, init="scale", dtype=WEIGHT_DTYPES["f32"])

    def value(self, dtype: jnp.dtype) -> Array:
        """The matrix in ``dtype``, dequantised if need be."""
        weight = value_of(self.weight)
        if not hasattr(self, "scale"):
            return weight.astype(dtype)
        return dequantise(weight, self.scale[...], dtype)

    def product(self, x: Array) -> Array:
        """``x [..., in]`` times the matrix: ``[..., out]``, or ``[..., 2, out]``."""
        weight = self.value(x.dtype)
        return x @ weight if weight.ndim == 2 else jnp.einsum("...d,dgf->...gf", x, weight)


class GroupedMatrix(Matrix):
    """A matrix ``[in, groups × out]``, of which each group of columns multiplies values of its own."""

    def __init__(self, declare: Declaration, groups: int, depth: int, width: int, axes: tuple[str | None, str | None]):
        super().__init__(declare, (depth, groups * width), axes)
        self.width = width

    def product(self, x: Float[Array, "*b G K"]) -> Float[Array, "*b G W"]:
        """Each group's values times its columns."""
        weight = rearrange(self.value(x.dtype), "k (g w) -> g k w", w=self.width)
        return jnp.einsum("...gk,gkw->...gw", x, weight)


Multiply = Callable[[Matrix, Array], Array]
"""``Matrix.product``, or a faster way to the same."""


def multiply(matrix: Matrix, x: Array) -> Array:
    """``Matrix.product``."""
    return matrix.product(x)


def value_of(parameter: nnx.Param) -> Array:
    """A parameter's values: its stored bits, read as the dtype that they mean."""
    return reinterpret(parameter[...], parameter.info.dtype)


@dataclass(frozen=True, eq=False)
class ParameterTable:
    """A model's structure and the flat table of its parameters.

    paths: of all of them, in the order of ``tree``. Those that are not in ``infos`` are on other devices, and stay without a value.
    """

    graph: nnx.GraphDef
    tree: jax.tree_util.PyTreeDef
    infos: Mapping[str, ParameterInfo]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, module: nnx.Module) -> ParameterTable:
        """Flatten an abstract module; paths are attribute names joined by dots."""
        graph, state = nnx.split(module)
        flat = nnx.to_flat_state(state)
        infos = {".".join(map(str, path)): leaf.info for path, leaf in flat}
        return cls(graph, jax.tree.structure(state), infos, tuple(infos))

    def without(self, paths: Container[str]) -> ParameterTable:
        """The table for devices that do not have these parameters."""
        return replace(self, infos={path: info for path, info in self.infos.items() if path not in paths})

    def bind(self, params: Mapping[str, Array]) -> nnx.Module:
        """The module with these values, ready to be called (inside ``jax.jit``)."""
        return nnx.merge(
            self.graph,
            jax.tree.unflatten(self.tree, [params[path] if path in self.infos else 0 for path in self.paths]),
        )


def describe(parameters: Mapping[str, ParameterInfo], rules: Rules, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Every parameter as a shape, its storage dtype and its sharding."""
    return {
        path: jax.ShapeDtypeStruct(
            info.shape, info.storage_dtype, sharding=rules.sharding(mesh, info.logical_axes, info.shape)
        )
        for path, info in parameters.items()
    }


def component(path: str) -> str:
    """The part of the model that a parameter's path belongs to, under which its bytes are shown."""
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
    """Bytes by component that one device holds of ``params``: arrays, or their descriptions with shardings. Those on its host are none."""
    sizes: dict[str, int] = {}
    for path, array in params.items():
        if not on_device(array.sharding):
            sizes.setdefault(component(path), 0)
            continue
        local = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        sizes[component(path)] = sizes.get(component(path), 0) + local
    return sizes
