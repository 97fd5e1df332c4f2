"""--batch-invariant where Pallas kernels compute: the bits of a request alone, in every batch and mesh, and refusals that say why.

GPU kernels are run here by Pallas's interpreter, in float32; `test_gpu_invariance.py` has the same on a GPU. These are the tests of
`setup/batch_invariance.py`.
"""

import dataclasses
import re

import jax
import numpy as np
import pytest
from bits_together import bits_alone_and_together
from layouts import TINY, write_checkpoint

from dsjax.config import ModelConfig
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import device_state, step_programs
from dsjax.engine.device.buckets import Rectangle
from dsjax.engine.device.programs import Programs
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.engine.setup.batch_invariance import OPEN_SUMS
from dsjax.errors import UserError
from sharding import MeshSpec


def step_of(mesh="dp=1", model=None, **options):
    options = {"dtype": "float32", "kernels": "pallas", "batch_invariant": True} | options
    spec = MeshSpec.parse(mesh)
    return make_step(EngineArgs(mesh=mesh, **options), ModelConfig.from_dict(TINY | (model or {})), spec, spec.build())


def test_every_product_norm_and_expert_has_one_order_and_the_start_names_what_has_not():
    step = step_of(dtype="bfloat16")
    assert step.kernels.fixed
    assert step.in_place.ordered
    assert not step.in_place.native
    assert step.prefill_form == step.decode_form
    assert OPEN_SUMS in step.kernels.note


@pytest.mark.parametrize(
    ("prefill", "decode", "exact"),
    [("CC", "A_CC_ME", True), ("CC", "AM_CC_ME", False), ("CC", "A_CC", False), ("CD", "CD", False)],
)
def test_a_step_is_exact_where_both_forms_have_native_kernels_that_read_its_cache(kernels, prefill, decode, exact):
    step = step_of(mla_prefill=prefill, mla_decode=decode, kernels="native", batch_invariant=False)
    assert step.is_exact == exact
    found = [step.implementations[f"{phase} attention"] for phase in ("prefill", "decode")]
    reads = step.attention.layout == "split"
    assert found == ["native" if reads and form.kernels else "plain" for form in (step.prefill_form, step.decode_form)]


def gpu_program(**options) -> str:
    """The text of a decode step for GPUs, lowered and not compiled: neither a GPU nor its compiler is needed."""
    step = step_of("dp=2,tp=2", {"num_hidden_layers": 1, "first_k_dense_replace": 0}, dtype="bfloat16", **options)
    compiled = dataclasses.replace(step.kernels.pallas, interpret=False)
    step = dataclasses.replace(step, kernels=dataclasses.replace(step.kernels, pallas=compiled))
    limits = ExecutorLimits(4, 4, 8, 16, 3, 2, 8, TINY["vocab_size"])
    params, state = step.abstract_parameters(), device_state.describe(step, limits, 0, counts_loads=False)
    shape = Programs(step, params, state, limits).shape(Rectangle(4, 1), None)
    run = jax.jit(lambda *arrays: step_programs.compute(step, *arrays, shape, False))
    traced = run.trace(params, state, jax.ShapeDtypeStruct((2, shape.packed_width), np.int32))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="JAX 0.11 lowers Triton kernels only where there is a GPU")
def test_a_gpus_program_has_the_options_operations_and_orders_with_it_and_none_of_them_without():
    """Its norm kernel, pieces of a depth, sizes that nothing chose, and no sum of a collective's or the compiler's products."""
    of_the_option, of_others = ('name = "rms_norm"', "order_piece"), ("all_reduce", "reduce_scatter", "dot_general")
    chosen = {"rows.mesh", "rows", "mesh"}
    for on in (False, True):
        text = gpu_program(batch_invariant=on)
        depends = set(re.findall(r"order_depends\\22: \\22([a-z.]*)\\22", text))
        assert 'name = "dense"' in text
        assert [part in text for part in of_the_option] == [on] * len(of_the_option)
        assert [f"stablehlo.{part}" in text for part in of_others] == [not on] * len(of_others)
        assert depends <= ({"", "exact"} if on else chosen), depends
        assert depends & ({""} if on else chosen)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mla_decode": "AM_CC_ME"}, "in one MLA form that has kernels, and --mla-prefill is AM_CC_ME"),
        ({"mla_prefill": "CC"}, "--mla-prefill is CC, --mla-decode A_CC_ME; leave --mla-prefill out"),
        ({"kernels": "plain"}, "--kernels leaves plain ones"),
        ({"kernels": "auto", "dtype": "bfloat16"}, "--dtype is bfloat16"),
        ({"kernel_config": "tiles.json"}, "--kernel-config: the first has the same tiles"),
        ({"weights": "nvfp4"}, "--weights nvfp4 take tiles that follow the rows"),
    ],
)
def test_what_would_leave_a_sum_open_is_refused_with_the_reason(kernels, options, why, tmp_path):
    if "kernel_config" in options:
        (tmp_path / "tiles.json").write_text('{"format": 1, "device": "any", "products": []}')
        options = {"kernel_config": str(tmp_path / "tiles.json")}
    with pytest.raises(UserError, match=why):
        step_of(**options)


@pytest.mark.slow
def test_a_request_gets_the_bits_of_it_alone_beside_others_on_two_devices(tmp_path):
    """Two layers, chunks of 8 against one of 16, and experts reached by padded exchanges against none."""
    checkpoint = write_checkpoint(tmp_path, num_hidden_layers=2, first_k_dense_replace=0)
    alone, together = bits_alone_and_together(
        checkpoint, {"mesh": "dp=1", "prefill_chunk": 16}, {"mesh": "tp=2", "dispatch": "padded", "prefill_chunk": 8},
        dtype="float32", kernels="pallas",
    )  # fmt: skip
    assert alone == together[1]
    assert len(set(together)) == 3
    assert np.isfinite(alone.logprobs).all()
