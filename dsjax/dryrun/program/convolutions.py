"""FLOPs of a convolution. XLA's TPU programs write matrix products as convolutions."""

from __future__ import annotations

import math
import re

from dsjax.dryrun.program.text import Operation, Shape

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window={([^}]*)}")


def convolution_flops(operation: Operation, left: Shape, right: Shape) -> int:
    """Return 2 FLOPs per multiply-add, excluding multiply-adds with padding or with zeros that dilation inserts into the input.

    XLA writes a batch dimension of a matrix product as a spatial dimension, dilated or strided so that each output reads one
    position. Counting only elements that exist, as XLA's ``HloCostAnalysis`` does, gives the FLOPs of the matrix product.
    """
    labels = _LABELS.search(operation.attributes)
    if not labels:
        return 0
    left_labels, right_labels, out_labels = labels.groups()
    window = _window(operation.attributes)
    spatial = [label for label in out_labels if label.isdigit()]
    positions = 1
    for axis, label in enumerate(sorted(spatial, key=int)):
        positions *= _positions(
            left.dims[left_labels.index(label)],
            right.dims[right_labels.index(label)],
            operation.shapes[0].dims[out_labels.index(label)],
            {name: values[axis] for name, values in window.items() if axis < len(values)},
        )
    batch = left.dims[left_labels.index("b")] // (operation.integer_attribute("batch_group_count") or 1)
    features = right.dims[right_labels.index("i")] * right.dims[right_labels.index("o")]
    return 2 * batch * features * positions


def _window(attributes: str) -> dict[str, list[str]]:
    """``size=4 pad=3_3`` → ``{name: values by spatial dimension}``."""
    match = _WINDOW.search(attributes)
    return {name: values.split("x") for name, values in re.findall(r"(\w+)=(\S+)", match.group(1))} if match else {}


def _positions(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Return the number of (output position, kernel position) pairs along one dimension that read an element of the input."""
    stride, lhs_dilate, rhs_dilate = (int(window.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(window.get("pad", "0_0").split("_")[0])
    count = 0
    for k in range(kernel):
        # Output o reads index o × stride + k × rhs_dilate − low of the dilated input, whose elements are at multiples of lhs_dilate.
        offset = k * rhs_dilate - low
        period = lhs_dilate // math.gcd(stride, lhs_dilate)
        start = next((o for o in range(period) if (o * stride + offset) % lhs_dilate == 0), None)
        if start is None:
            continue
        first = max(0, math.ceil(-offset / stride))
        last = min(out - 1, ((size - 1) * lhs_dilate - offset) // stride)
        first += (start - first) % period
        count += max(0, (last - first) // period + 1)
    return count
