"""What a compiled program tells of how the compiler laid out the sums of a fusion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dsjax.dryrun.program.text import Computation, Operation, Program, Shape

SEQUENCE = "in sequence"
"""The order of a sum that one thread makes, term after term."""
_REGISTER = (128, 8)
"""Numbers of a TPU's register along the closest dimension in memory and along the next; windows count registers."""


@dataclass(frozen=True)
class Tiling:
    """The layout of a fusion's sums. whole: what is told of the fusion as a whole; told: whether that is enough to say that equal words are
    equal orders; sequence: whether one thread sums each element, in order; windows: of a TPU's fusion, in registers."""

    whole: str = ""
    told: bool = False
    sequence: bool = False
    windows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def words(self, computation: Computation, operation: Operation) -> str:
        """Say how one operation in the fusion is tiled; empty where nothing is told."""
        if self.sequence:
            return SEQUENCE
        if self.windows:
            return _depth_of_window(computation, operation, self.windows, self.whole)
        own = re.search(r'backend_config=\{"sizes":\[([^\]]*)\]\}', operation.attributes)
        depth = f", depth {_sizes(own.group(1))}" if own and own.group(1) else ""
        return self.whole + depth

    def around(self, fusion: Operation) -> Tiling:
        """Give the tiling of what lies in a fusion within this one."""
        inner = _triton_words(fusion)
        return replace(self, whole=", ".join(part for part in (self.whole, inner) if part))


NO_TILING = Tiling()


def tiling_of(program: Program, fusion: Operation, platform: str) -> Tiling:
    """The tiling of a scheduled fusion.

    GPU: a fusion of kind ``kLoop`` computes each element in one thread, and so does one whose result is scattered; one that Triton
    compiles has its tiles and warps written down; one of kind ``kInput`` is laid out when code is made for it. TPU: windows of the
    operands and the result are written down.
    """
    kind = re.search(r"\bkind=(\w+)", fusion.attributes)
    kind = kind.group(1) if kind else ""
    if platform == "gpu":
        triton = _triton_words(fusion)
        if triton:
            return Tiling(triton, told=True)
        inner = program.computations[fusion.computation("calls")]
        scattered = any(operation.opcode == "scatter" for operation in inner.operations.values())
        return Tiling(sequence=kind == "kLoop" or scattered)
    if platform == "tpu":
        found = re.findall(r'"(kernel|output|input)_window_bounds": ?\[([^\]]+)\]', fusion.attributes)
        windows = {name: tuple(int(part) for part in re.findall(r"\d+", bounds)) for name, bounds in found}
        emitter = re.search(r'"emitter":"(\w+)"', fusion.attributes)
        return Tiling(emitter.group(1) if emitter else "", told=bool(windows), windows=windows)
    return NO_TILING


def _triton_words(fusion: Operation) -> str:
    """Tiles and warps of a fusion that Triton compiles: ``tile 16×128, 4 warps``; of the older form of products all its sizes."""
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
    """How much of the depth one window of a TPU's fusion takes; rows and columns of a window order nothing."""
    source = computation.operations.get(operation.operands[0])
    if source is None or not source.shapes:
        return ""
    shape = source.shapes[0]
    if operation.opcode == "convolution":
        labels = re.search(r"dim_labels=(\w+)_", operation.attributes)
        window, axes = windows.get("input", ()), (labels.group(1).index("f"),) if labels else ()
    else:
        window, axes = (
            windows.get("output", ()),
            tuple(axis for axis in operation.integers("dimensions") if shape.dims[axis] > 1),
        )
    sizes = _in_elements(shape, window)
    if not sizes or not axes:
        return ""  # the windows are another operation's
    depth = "×".join(str(sizes[axis]) for axis in axes)
    return f"depth {depth}" + (f", {emitter}" if emitter else "")


def _in_elements(shape: Shape, window: tuple[int, ...]) -> tuple[int, ...]:
    """A window, whose sizes stand in the order of memory, as elements of each dimension; empty where it is of another array."""
    if len(window) != len(shape.dims) or len(shape.layout) != len(shape.dims):
        return ()
    sizes = [0] * len(window)
    for place, axis in enumerate(shape.layout):
        register = _REGISTER[place] if place < len(_REGISTER) else 1
        sizes[axis] = min(shape.dims[axis], window[len(window) - 1 - place] * register)
    return tuple(sizes)
