"""Operations of a convolution, which is how TPU programs write their matrix products."""

from __future__ import annotations

import math
import re

from dsjax.dryrun.program.text import Operation, Shape

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window={([^}]*)}")


def convolution_flops(operation: Operation, left: Shape, right: Shape) -> int:
    """Two for each multiply-add, of those that do not fall on padding or on the holes of a dilation.

    A product's batch dimension is written as a space dimension whose window is so dilated or strided that each output sees
    one position of it; counting positions that exist, as XLA's ``HloCostAnalysis`` does, gives the product's own operations.
    """
    labels = _LABELS.search(operation.attributes)
    if not labels:
        return 0
    left_labels, right_labels, out_labels = labels.groups()
    sides = _window(operation.attributes)
    spaces = [label for label in out_labels if label.isdigit()]
    positions = 1
    for place, label in enumerate(sorted(spaces, key=int)):
        positions *= _positions(
            left.dims[left_labels.index(label)],
            right.dims[right_labels.index(label)],
            operation.shapes[0].dims[out_labels.index(label)],
            {name: values[place] for name, values in sides.items() if place < len(values)},
        )
    batch = left.dims[left_labels.index("b")] // (operation.number("batch_group_count") or 1)
    features = right.dims[right_labels.index("i")] * right.dims[right_labels.index("o")]
    return 2 * batch * features * positions


def _window(attributes: str) -> dict[str, list[str]]:
    """``size=4 pad=3_3`` → each dimension's values."""
    window = _WINDOW.search(attributes)
    return {name: values.split("x") for name, values in re.findall(r"(\w+)=(\S+)", window.group(1))} if window else {}


def _positions(size: int, kernel: int, out: int, side: dict[str, str]) -> int:
    """Pairs of an output and a place of the kernel that meet an element of the input."""
    stride, hole, reach = (int(side.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(side.get("pad", "0_0").split("_")[0])
    count = 0
    for place in range(kernel):
        # Output o reads o × stride + place × reach − low of the dilated input: 0, hole, 2 × hole … exist.
        offset = place * reach - low
        period = hole // math.gcd(stride, hole)
        start = next((o for o in range(period) if (o * stride + offset) % hole == 0), None)
        if start is None:
            continue
        first = max(0, math.ceil(-offset / stride))
        last = min(out - 1, ((size - 1) * hole - offset) // stride)
        first += (start - first) % period
        count += max(0, (last - first) // period + 1)
    return count
