"""The gate of a SwiGLU MLP, and that every product with experts uses it."""

import numpy as np
import pytest
from kernel_cases import STORED, ExpertsCase

from dsjax.fp4.formats import MXFP4, NVFP4
from dsjax.kernels.gate import gated
from dsjax.kernels.table import Kernels, PallasKernels, choose_kernels
from dsjax.model.experts import ExpertProduct


def test_is_silu_of_the_gate_times_up():
    # silu(1) = 1 / (1 + e⁻¹)
    found = gated(np.float32([0, 1, -30]), np.float32([5, 2, 1]))
    np.testing.assert_allclose(found, [0, 1.4621172, -2.8e-12], rtol=1e-2)


@pytest.mark.parametrize(
    ("gate", "up", "same_as"),
    [(50.0, 1.0, (10.0, 1.0)), (-50.0, 1.0, (-50.0, 1.0)), (1.0, 50.0, (1.0, 10.0)), (1.0, -50.0, (1.0, -10.0))],
)
def test_a_limit_clips_the_gate_from_above_and_up_on_both_sides(gate, up, same_as):
    # transformers' DeepseekV4MLP: gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    arrays = (np.float32([value]) for value in (gate, up))
    assert gated(*arrays, limit=10.0) == gated(*(np.float32([value]) for value in same_as))


LIMIT = 0.5


def on(backend, kernels):
    """The kernels of a test's backend, and what chooses the implementation where these do not."""
    if backend in ("tiles", "einsum"):
        return Kernels(), backend
    if backend == "tpu":
        return Kernels(pallas=PallasKernels("tpu", interpret=True)), "auto"
    pallas = choose_kernels("pallas", "cpu", np.dtype(np.float32), devices=1, cache=None)
    return {"native": kernels, "pallas": pallas}[backend], "auto"


@pytest.mark.parametrize("backend", ["tiles", "einsum", "native", "pallas", "tpu"])
@pytest.mark.parametrize("stored", [2, 1])
def test_every_product_with_experts_clips(kernels, backend, stored):
    case = ExpertsCase.drawn(3, X=3, D=128, F=128, N=9, K=2, stored=stored, routing="all")
    (expected, size), (without, _) = case.expected(LIMIT), case.expected()
    assert np.abs(without - expected).max() > 0.1 * size.max(), "the limit is reached"
    chosen, implementation = on(backend, kernels)
    product = ExpertProduct(implementation, weight_dtype=STORED[stored], kernels=chosen, mean_load=4.0, limit=LIMIT)
    case.assert_near(case.by(product), limit=LIMIT)


@pytest.mark.parametrize("backend", ["tiles", "native", "pallas"])
@pytest.mark.parametrize("form", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
def test_a_scale_of_the_whole_tensor_stands_before_the_clip(kernels, backend, form):
    packed, numbers = ExpertsCase.drawn(5, X=3, D=128, F=64, N=9, K=2).in_fp4(form)
    chosen, implementation = on(backend, kernels)
    product = ExpertProduct(implementation, weight_dtype=np.dtype(np.uint8), kernels=chosen, limit=LIMIT)
    numbers.assert_near(numbers.by(product, packed), limit=LIMIT)
