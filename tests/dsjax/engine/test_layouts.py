"""Every layout, dispatch and MLA form gives the logits, greedy tokens and log-probabilities of one device, to the bit.

What plain forms compute (``--kernels plain``) keeps a bound of float32's rounding instead.
"""

import functools

import numpy as np
import pytest
from goldens.our_model import bound, hf_tensors, logits_of
from goldens.random_weights import RandomWeights
from layouts import CHANGES_NUMBERS, MODELS, TINY, answer, prompts, wide, widths, write_checkpoint

from dsjax.cli.exact import DISPATCHES, PAIRS, Answer, difference
from dsjax.config import ModelConfig

pytestmark = pytest.mark.slow  # all together

NEW_TOKENS = 8
"""An eighth of what ``dsjax doctor --exact`` generates: two pages of each prompt. Steps on 32 emulated devices take their time."""

PLAIN = {"kernels": "plain"}
MIXED = {"mixed": True}  # prompts and decodes in one launch
FUSED = {"redundant_experts": 8, "enable_shared_experts_fusion": True}  # the shared expert as a routed one
CHUNKS = {"moe_chunk_tokens": 5}
# Dense MLP and head: tokens are split over tp, not widths.
BY_DATA = {"moe_dense_tp_size": 1, "enable_dp_lm_head": True}
HOST_EMBEDDING = {"embedding_location": "host"}
PREEMPTED = {"cache_tokens": 100}  # half of what the prompts and their tokens take; what is computed again is a prompt
FP8_PRODUCTS = {"weights": "fp8", "activation_scheme": "dynamic"}
FP8_CACHE = {"kv_cache_dtype": "fp8"}
EVERY_TOKEN = {"every_token": True}  # the logits at every position of a prompt too

USUAL, TURNED = PAIRS
ABSORBED = ("A_CC_ME", "A_CC_ME")
CHECKPOINTS = {
    "v3": {},
    "v3, no dense layer": {"first_k_dense_replace": 0},
    "v3.2": MODELS["v3.2"] | {"first_k_dense_replace": 0},
    "v3, wide": wide(2) | {"first_k_dense_replace": 0},  # FP8: whole blocks of 128 on each of two tp devices
    # NVFP4, MXFP4, INT4: a block of 32 of each expert's width on each of two tp devices.
    "v3, FP4": widths("mxfp4-bf16", 2) | {"num_hidden_layers": 2, "first_k_dense_replace": 0},
}
"""What each model changes in ``TINY``. Without dense layers, which depend on neither MLA forms nor dispatch, a third less is compiled."""

# A draw that has each kind of layout on one stage, each dispatch, each pair of forms and each option. Nearly all of a run is the
# compilation of its programs. All combinations: dsjax doctor --exact, of which CI runs a slice. Stages are in
# `pipeline/test_experts_of_stages.py`, and an expert's width over devices of several DP ranks in `test_exactness.py`.
# dp=12: 32 experts do not divide by 12 ranks, and four redundant ones fill them up.
RUNS = [
    ("v3, wide", "dp=16,tp=2,ep=8", "ragged", *TURNED, FP8_PRODUCTS | {"dispatch_wire": "fp8"}),
    ("v3", "dp=2,tp=4", "padded", "A_CC", "CC", PLAIN | BY_DATA | EVERY_TOKEN),
    ("v3", "dp=4,tp=8", "hierarchical", *USUAL, MIXED | BY_DATA | HOST_EMBEDDING | EVERY_TOKEN),
    ("v3", "dp=8,ep=2", "gather", *USUAL, FUSED | CHUNKS),
    ("v3, no dense layer", "tp=8,ep=1", "gather", *ABSORBED, EVERY_TOKEN),
    ("v3, no dense layer", "dp=12", "ragged", *ABSORBED, {"redundant_experts": 4, "ep_dispatch_algorithm": "static"} | CHUNKS),
    ("v3.2", "tp=8", "padded", "A_CC_ME", "A_CC_ME", FP8_CACHE | PREEMPTED | {"index_scores": "fp8"}),
    ("v3.2", "dp=2,tp=2+ep=8", "auto", "A_CC_ME", "A_CC_ME", FP8_CACHE | MIXED | HOST_EMBEDDING | {"index_scores": "fp8"}),
]  # fmt: skip
NUMBERS = (*CHANGES_NUMBERS, *FP8_PRODUCTS, *FP8_CACHE)
"""Options that one device must have too, to compute the same numbers."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """``answers(model, layout, dispatch, prefill, decode, **options)``: what a layout answers."""
    directory = functools.cache(
        lambda model: write_checkpoint(tmp_path_factory.mktemp("tiny"), mtp=True, **CHECKPOINTS[model])
    )

    def made(model: str, *run: str, every_token: bool = False, **options) -> Answer:
        return answer(directory(model), *run, new_tokens=NEW_TOKENS, every_token=every_token, **options)

    return made


@functools.cache
def logits_without_cache_or_mesh(model: str) -> np.ndarray:
    """Logits at every position of the longest prompt."""
    config = ModelConfig.from_dict(TINY | {"num_nextn_predict_layers": 1} | CHECKPOINTS[model])
    tensors = hf_tensors(config, RandomWeights(7, bias_center=-0.2))
    return logits_of(config, tensors, np.array([prompts()[-1]["prompt_token_ids"]]))[0]


@pytest.fixture(scope="module")
def one_device(answers):
    """``one_device(model, prefill, decode, options)``: what one device answers with the same arithmetic, made when first asked for.

    Where nothing is quantised, its logits keep the bound of float32's rounding against those of the model without cache or mesh.
    """

    @functools.cache
    def made(model: str, prefill: str, decode: str, numbers: tuple) -> Answer:
        quantises = not {*FP8_PRODUCTS, *FP8_CACHE}.isdisjoint(dict(numbers))
        found = answers(model, "dp=1", "auto", prefill, decode, every_token=not quantises, **dict(numbers))
        if not quantises:
            expected = logits_without_cache_or_mesh(model)
            assert np.abs(found.logits - expected).max() <= bound(expected)
        return found

    def of(model: str, prefill: str, decode: str, options: dict) -> Answer:
        prefill, decode = USUAL if "kernels" in options else (prefill, decode)  # plain forms are near all others
        numbers = tuple((name, options[name]) for name in NUMBERS if name in options)
        return made(model, prefill, decode, numbers)

    return of


def test_the_runs_meet_every_dispatch_and_every_pair_of_forms():
    assert {dispatch for _, _, dispatch, *_ in RUNS} >= set(DISPATCHES)
    assert {(prefill, decode) for _, _, _, prefill, decode, _ in RUNS} >= set(PAIRS)


@pytest.mark.parametrize(("model", "layout", "dispatch", "prefill", "decode", "options"), RUNS)
def test_layout_gives_the_answer_of_one_device(
    answers, one_device, kernels, model, layout, dispatch, prefill, decode, options
):
    found = answers(model, layout, dispatch, prefill, decode, **options)
    assert found.exact == ("kernels" not in options)
    assert found.rebalances or "enable_eplb" not in options
    assert difference(found, one_device(model, prefill, decode, options)) is None
