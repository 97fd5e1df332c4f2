"""Each grouped expert product, and each dispatch in front of it, on one GPU against a plain loop in NumPy."""

import dataclasses

import numpy as np
import pytest
from dispatch_cases import assert_sums, compiled, routings
from kernel_cases import STORED, ExpertsCase

from dsjax.model.experts import IMPLEMENTATIONS, ExpertProduct
from sharding.dispatch import DispatchConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", STORED.values(), ids=str)
def test_products_are_those_of_the_loop(implementation, dtype):
    case = ExpertsCase.drawn(0, X=5, D=256, F=128, N=96, K=3, stored=dtype.itemsize)  # two FP8 blocks of width
    case.ids[:20, 1:], case.ids[:20, 0] = -1, 4  # one expert has many more than its share
    given = case.rows.astype(dtype if dtype.itemsize == 2 else np.float32)
    case = dataclasses.replace(case, rows=given.astype(np.float32))
    # The dtype itself, not its bits.
    params = case.params() | {"gate_up.weight": case.gate_up, "down.weight": case.down}
    product = ExpertProduct(implementation, weight_dtype=dtype, platform="gpu", tile=8, capacity=8)
    found = case.by(product, params, given).astype(np.float32)
    if dtype.itemsize != 2:
        case.assert_near(found, factor=3e-7)
        return
    # The hidden values and the result are rounded to 8 bits: 2⁻⁹ each, of values up to the largest.
    exact, _ = case.expected()
    assert np.abs(found - exact).max() <= 1e-2 * np.abs(exact).max()


@pytest.mark.parametrize("method", ["gather", "padded", "ragged", "auto"])
def test_every_dispatch_on_one_device_gives_the_exact_sums(method):
    spec, call = compiled("dp=1", DispatchConfig(method, capacity=2, report=True), 8)
    for name, slots in routings(12, 8, spec.num_devices).items():
        report = assert_sums(call, slots, name)
        counts = np.bincount(slots[slots >= 0], minlength=8)
        np.testing.assert_array_equal(report["tokens_per_expert"], counts[None], err_msg=name)
