"""Which steps are exact, and what --batch-invariant refuses. These are the tests of `setup/batch_invariance.py`."""

import pytest
from layouts import TINY
from v4_models import v4_config

from dsjax.config import ModelConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.errors import UserError
from sharding import MeshSpec


def step_of(model=TINY, **options):
    args, spec = EngineArgs(**{"dtype": "float32"} | options), MeshSpec.parse("dp=1")
    return make_step(args, ModelConfig.from_dict(model), spec, spec.build())


@pytest.mark.parametrize(
    ("prefill", "decode", "exact"),
    [("CC", "A_CC_ME", True), ("CC", "AM_CC_ME", False), ("CC", "A_CC", False), ("CD", "CD", False)],
)
def test_a_step_is_exact_where_both_forms_have_native_kernels_that_read_its_cache(kernels, prefill, decode, exact):
    step = step_of(mla_prefill=prefill, mla_decode=decode, kernels="native")
    assert step.is_exact == exact
    found = [step.implementations[f"{phase} attention"] for phase in ("prefill", "decode")]
    reads = step.attention.layout == "split"
    assert found == ["native" if reads and form.kernels else "plain" for form in (step.prefill_form, step.decode_form)]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mla_decode": "AM_CC_ME"}, "in one MLA form that has kernels, and --mla-prefill is AM_CC_ME"),
        ({"mla_prefill": "CC"}, "--mla-prefill is CC, --mla-decode A_CC_ME; leave --mla-prefill out"),
        ({"kernels": "plain"}, "--kernels leaves plain ones"),
        ({"kernels": "pallas"}, "needs the native kernels"),
        ({"dtype": "bfloat16"}, "--dtype is bfloat16"),
    ],
)
def test_what_would_leave_a_sum_open_is_refused_with_the_reason(kernels, options, why):
    with pytest.raises(UserError, match=why):
        step_of(batch_invariant=True, **options)


def test_a_cache_that_native_attention_does_not_read_is_named(kernels):
    with pytest.raises(UserError, match=r"decode attention and prefill attention have none for a cache in bfloat16"):
        step_of(v4_config("wc"), kv_cache_dtype="bfloat16", batch_invariant=True)
