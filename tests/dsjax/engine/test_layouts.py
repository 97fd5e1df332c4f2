"""Every layout, dispatch and MLA form gives the logits, greedy tokens and log-probabilities of one device, to the bit.

What plain forms compute (``--kernels plain``) keeps a bound of float32's rounding instead.
"""

import functools
import itertools

import numpy as np
import pytest
from goldens.our_model import bound, hf_tensors, logits_of
from goldens.random_weights import RandomWeights
from layouts import DISPATCHES, LAYOUTS, MODELS, TINY, References, difference, prompts, wide, write_checkpoint
from layouts import answer as answer_of

from dsjax.config import ModelConfig

pytestmark = pytest.mark.slow  # all together

# A quarter of what tools/check_layouts.py makes: four pages of each prompt's, and steps on 32 emulated devices take their time.
answer = functools.partial(answer_of, new_tokens=16)

PLAIN = {"kernels": "plain"}
MIXED = {"mixed": True}  # prompts and decodes in one launch
FUSED = {"redundant_experts": 8, "enable_shared_experts_fusion": True}  # the shared expert as a routed one
CHUNKS = {"moe_chunk_tokens": 5}
BY_DATA = {
    "moe_dense_tp_size": 1,
    "enable_dp_lm_head": True,
}  # dense MLP and head: tokens are split over tp, not widths
HOST_EMBEDDING = {"embedding_location": "host"}
PREEMPTED = {"cache_tokens": 140}  # a third of what the prompts and their tokens take

FORMS = (("CC", "A_CC"), ("A_CC_ME", "AM_CC_ME"), ("CD", "CD"))
# Each layout; each dispatch with each of these pairs of forms; between them each form in prefill and, with A_CC_ME further below, in
# decode; and on several layouts whatever may change nothing: in one table, since nearly all of a run is the compilation of its programs.
# 32 experts do not divide by 12 ranks: four redundant ones fill them up. Shared experts are fused with one pair of forms alone: each
# other pair would want an engine on one device of its own to be held to. All combinations of layout, dispatch and forms:
# tools/check_layouts.py.
RUNS = [
    ("dp=1", "gather", "CC", "A_CC", MIXED | FUSED),
    ("dp=8", "padded", "CD", "CD", {}),
    ("dp=2,tp=4", "ragged", "A_CC", "CC", PLAIN),
    ("dp=2,tp=4", "ragged", "CC", "A_CC", BY_DATA | FUSED),
    ("tp=8", "gather", "A_CC_ME", "AM_CC_ME", {}),
    ("tp=8,ep=1", "gather", "CD", "CD", {}),
    ("dp=8,ep=2", "gather", "CC", "A_CC", FUSED),
    ("dp=32", "hierarchical", "CD", "CD", {}),
    ("dp=4,tp=8", "hierarchical", "CC", "A_CC", MIXED | BY_DATA | HOST_EMBEDDING),
    ("dp=16,tp=2,ep=8", "ragged", "A_CC_ME", "AM_CC_ME", {}),
    ("dp=8,ep=1,etp=8", "gather", "CC", "A_CC", FUSED),
    ("dp=8,ep=2,etp=4", "padded", "A_CC_ME", "AM_CC_ME", {"redundant_experts": 8} | CHUNKS),
    ("pp=2", "gather", "CC", "A_CC", MIXED),
    ("pp=3,dp=2", "ragged", "CD", "CD", {}),
    ("pp=2,tp=4", "padded", "A_CC_ME", "AM_CC_ME", BY_DATA),
    ("pp=2,dp=4,ep=2", "padded", "CC", "A_CC", FUSED | CHUNKS),
    (
        "dp=12",
        "hierarchical",
        "A_CC_ME",
        "AM_CC_ME",
        {"redundant_experts": 4, "ep_dispatch_algorithm": "static"} | CHUNKS,
    ),
    ("dp=8", "auto", "A_CC_ME", "AM_CC_ME", MIXED),
    ("dp=4,tp=8", "auto", "CC", "A_CC", BY_DATA | CHUNKS),
    ("dp=2,tp=2+ep=8", "auto", "A_CC_ME", "AM_CC_ME", MIXED | BY_DATA | HOST_EMBEDDING),
]
# Sparse attention: both of its ways in prefill and in decode, on meshes with and without tp.
SPARSE_RUNS = [
    ("dp=1", "gather", "CC", "CC", PREEMPTED),  # in one form: what is computed again is a prompt
    ("dp=8", "padded", "A_CC_ME", "CC", {"index_scores": "hadamard"}),
    ("tp=8", "gather", "AM_CC_ME", "AM_CC_ME", {}),
    ("pp=2,dp=2,tp=2", "padded", "CC", "A_CC_ME", {}),
    ("dp=2+ep=4", "auto", "CC", "A_CC_ME", MIXED),
]
CHECKPOINTS = MODELS | {"v3.2": MODELS["v3.2"] | {"first_k_dense_replace": 0}}
"""What each model changes in ``TINY`` here. V3.2's dense layers are those of V3: without them a third less is compiled."""
ALL_RUNS = [("v3", *run) for run in RUNS] + [("v3.2", *run) for run in SPARSE_RUNS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The tiny checkpoint of each model, written when it is first asked for."""
    return functools.cache(lambda model: write_checkpoint(tmp_path_factory.mktemp("tiny"), **CHECKPOINTS[model]))


@pytest.fixture(scope="module")
def checkpoint(checkpoints):
    return checkpoints("v3")


@pytest.fixture(scope="module")
def one_device(checkpoints):
    """What each model's answers are held to, made when it is first asked for."""
    return functools.cache(lambda model: References(functools.partial(answer, checkpoints(model), "dp=1", "auto"), {}))


@pytest.mark.parametrize("model", MODELS)
def test_one_device_gives_the_logits_of_the_model_without_cache_or_mesh(one_device, model):
    config = ModelConfig.from_dict(TINY | CHECKPOINTS[model])
    tokens = np.array([prompts()[-1]["prompt_token_ids"]])
    reference = logits_of(config, hf_tensors(config, RandomWeights(7, bias_center=-0.2)), tokens)[0]
    assert np.abs(one_device(model).plain.logits - reference).max() <= bound(reference)


def test_the_runs_meet_every_layout_and_every_dispatch_with_each_pair_of_forms():
    assert set(LAYOUTS) <= {layout for layout, *_ in RUNS}
    met = {(dispatch, (prefill, decode)) for _, dispatch, prefill, decode, _ in RUNS}
    assert met >= set(itertools.product(DISPATCHES, FORMS))


@pytest.mark.parametrize(("model", "layout", "dispatch", "prefill", "decode", "options"), ALL_RUNS)
def test_layout_gives_the_answer_of_one_device(
    checkpoints, one_device, kernels, model, layout, dispatch, prefill, decode, options
):
    found = answer(checkpoints(model), layout, dispatch, prefill, decode, **options)
    assert found.exact == ("kernels" not in options)
    reference = one_device(model).of(found, prefill, decode, options)
    assert difference(found, reference) is None


@pytest.fixture(scope="module")
def one_device_with_an_fp8_cache(checkpoints, kernels):
    """Each model's answer, when it is first asked for."""
    return functools.cache(
        lambda model: answer(checkpoints(model), "dp=1", "auto", "A_CC_ME", "A_CC_ME", kv_cache_dtype="fp8")
    )


@pytest.mark.parametrize(
    ("model", "layout", "dispatch", "prefill", "decode"),
    [
        ("v3.2", "dp=2,tp=4", "padded", "A_CC_ME", "A_CC_ME"),
        ("v3", "pp=2,dp=2", "gather", "A_CC_ME", "A_CC_ME"),
        ("v3.2", "dp=2+ep=4", "auto", "A_CC_ME", "A_CC_ME"),
    ],
)
def test_layouts_give_it_with_an_fp8_cache_too(
    checkpoints, one_device_with_an_fp8_cache, model, layout, dispatch, prefill, decode
):
    found = answer(checkpoints(model), layout, dispatch, prefill, decode, kv_cache_dtype="fp8")
    assert found.exact
    assert difference(found, one_device_with_an_fp8_cache(model)) is None


@pytest.fixture(scope="module")
def with_fp8_products(tmp_path_factory):
    """Runs that quantise activations: whole blocks of 128 on each of two ``tp`` devices, two blocks of each width."""
    directory = write_checkpoint(tmp_path_factory.mktemp("wide"), **wide(2))
    return functools.partial(answer, directory, weights="fp8", activation_scheme="dynamic")


@pytest.fixture(scope="module")
def one_device_with_fp8_products(with_fp8_products, kernels):
    return with_fp8_products("dp=1", "auto", "CC", "A_CC_ME")


@pytest.mark.parametrize(
    ("layout", "dispatch", "options"),
    [
        ("dp=2,tp=2", "ragged", MIXED),
        ("dp=4", "padded", {"dispatch_wire": "fp8"}),
        ("pp=2,tp=2", "padded", {}),
    ],
)
def test_layouts_give_it_with_fp8_products_too(
    with_fp8_products, one_device_with_fp8_products, layout, dispatch, options
):
    found = with_fp8_products(layout, dispatch, "CC", "A_CC_ME", **options)
    assert found.exact
    assert difference(found, one_device_with_fp8_products) is None
