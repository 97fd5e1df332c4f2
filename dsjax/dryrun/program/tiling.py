"""The compiler's tiling of a fusion's sums, as far as the text of a compiled program shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dsjax.dryrun.program.text import Computation, Operation, Program, Shape

SEQUENCE = "in sequence"
"""Order of a sum that one thread computes term by term."""
_REGISTER = (128, 8)
"""Elements of a TPU register along the minor dimension and the next one; window sizes are in registers."""


@dataclass(frozen=True)
class Tiling:
    """Layout of a fusion's sums."""

    fusion: str = ""  # description of the whole fusion
    is_complete: bool = False  # whether equal descriptions imply equal orders
    sequence: bool = False  # whether one thread sums each element, in order
    windows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of a TPU fusion, in registers

    def words(self, computation: Computation, operation: Operation) -> str:
        """Describe how one operation in the fusion is tiled; empty if unknown."""
        if self.sequence:
            return SEQUENCE
        if self.windows:
            return _depth_of_window(computation, operation, self.windows, self.fusion)
        own = re.search(r'backend_config=\{"sizes":\[([^\]]*)\]\}', operation.attributes)
        depth = f", depth {_sizes(own.group(1))}" if own and own.group(1) else ""
        return self.fusion + depth

    def around(self, fusion: Operation) -> Tiling:
        """Return the tiling of the operations in a nested fusion."""
        inner = _triton_words(fusion)
        return replace(self, fusion=", ".join(part for part in (self.fusion, inner) if part))


NO_TILING = Tiling()


def tiling_of(program: Program, fusion: Operation, platform: str) -> Tiling:
    """Return the tiling of a scheduled fusion.

    GPU: a fusion of kind ``kLoop`` computes each element in one thread, and so does a fusion with a scatter; the text of a Triton
    fusion has its tiles and warps; a fusion of kind ``kInput`` is laid out during code generation. TPU: the text has the windows of
    the operands and the result.
    """
    kind = re.search(r"\bkind=(\w+)", fusion.attributes)
    kind = kind.group(1) if kind else ""
    if platform == "gpu":
        triton = _triton_words(fusion)
        if triton:
            return Tiling(triton, is_complete=True)
        inner = program.computations[fusion.called("calls")]
        scattered = any(operation.opcode == "scatter" for operation in inner.operations.values())
        return Tiling(sequence=kind == "kLoop" or scattered)
    if platform == "tpu":
        bounds_by_name = re.findall(r'"(kernel|output|input)_window_bounds": ?\[([^\]]+)\]', fusion.attributes)
        windows = {name: tuple(int(part) for part in re.findall(r"\d+", bounds)) for name, bounds in bounds_by_name}
        emitter = re.search(r'"emitter":"(\w+)"', fusion.attributes)
        return Tiling(emitter.group(1) if emitter else "", is_complete=bool(windows), windows=windows)
    return NO_TILING


def _triton_words(fusion: Operation) -> str:
    """Return the tiles and warps of a Triton fusion: ``tile 16×128, 4 warps``; for the older form of matrix products, all its sizes."""
    if '"kind":"__triton' not in fusion.attributes:
        return ""
    words = [
        f"tile {_sizes(sizes) or 'of one'}" for sizes in re.findall(r'\{"sizes":\[([^\]]*)\]\}', fusion.attributes)
    ]
    words += [
        f"{name.replace('_', ' ')} {size}"
        for name, size in re.findall(r'"(block_[mnk]|split_k)":"?(\d+)', fusion.attributes)
    ]
    warps = re.search(r'"num_warps":"?(\d+)', fusion.attributes)
    return ", ".join([*words, f"{warps.group(1)} warps"] if warps else words)


def _sizes(text: str) -> str:
    return text.replace('"', "").replace(",", "×")


def _depth_of_window(
    computation: Computation, operation: Operation, windows: Mapping[str, tuple[int, ...]], emitter: str
) -> str:
    """Return how much of the depth one window of a TPU fusion covers; a window's rows and columns do not affect the order."""
    source = computation.operations.get(operation.operands[0])
    if source is None or not source.shapes:
        return ""
    shape = source.shapes[0]
    if operation.opcode == "convolution":
        labels = re.search(r"dim_labels=(\w+)_", operation.attributes)
        window = windows.get("input", ())
        axes = (labels.group(1).index("f"),) if labels else ()
    else:
        window = windows.get("output", ())
        axes = tuple(axis for axis in operation.integers_attribute("dimensions") if shape.dims[axis] > 1)
    sizes = _in_elements(shape, window)
    if not sizes or not axes:
        return ""  # the windows belong to another operation
    depth = "×".join(str(sizes[axis]) for axis in axes)
    return f"depth {depth}" + (f", {emitter}" if emitter else "")


def _in_elements(shape: Shape, window: tuple[int, ...]) -> tuple[int, ...]:
    """Convert a window, with sizes in memory order, to elements per dimension; empty if it belongs to another array."""
    if len(window) != len(shape.dims) or len(shape.layout) != len(shape.dims):
        return ()
    sizes = [0] * len(window)
    for place, axis in enumerate(shape.layout):
        register = _REGISTER[place] if place < len(_REGISTER) else 1
        sizes[axis] = min(shape.dims[axis], window[len(window) - 1 - place] * register)
    return tuple(sizes)
