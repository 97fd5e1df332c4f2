"""With experts in FP4, every layout gives the answer of one device to the bit, and a mesh that cuts a block is refused."""

import functools

import pytest
from layouts import References, difference, widths, write_checkpoint
from layouts import answer as answer_of

from dsjax import LLM
from dsjax.errors import UserError
from sharding import MeshError

answer = functools.partial(answer_of, new_tokens=12)
EPLB = {
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 2, "window_size": 4, "step_interval": 4, "payback": 0},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """One for both formats and for two ``tp`` devices: a device has one block of 32 of each expert's width."""
    return write_checkpoint(tmp_path_factory.mktemp("fp4"), **widths("mxfp4-bf16", 2))


@pytest.fixture(scope="module")
def one_device(checkpoint):
    """What answers with some weights and some activations are held to, when they are first asked for."""
    alone = functools.partial(answer, checkpoint, "dp=1", "auto")
    return functools.cache(lambda weights, scheme: References(alone, {"weights": weights, "activation_scheme": scheme}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "layout", "dispatch", "options"),
    [
        ("nvfp4-bf16", "dp=2", "ragged", EPLB),
        ("nvfp4-bf16", "dp=2,tp=2", "padded", {"activation_scheme": "nvfp4"}),
        ("nvfp4-bf16", "dp=2", "ragged", {"activation_scheme": "dynamic"}),
        ("mxfp4-bf16", "tp=2,ep=1", "gather", {"kernels": "plain"}),
        ("mxfp4-bf16", "dp=8", "ragged", {"redundant_experts": 8}),
    ],
)
def test_layout_gives_the_answer_of_one_device(checkpoint, one_device, kernels, weights, layout, dispatch, options):
    found = answer(checkpoint, layout, dispatch, "CC", "A_CC_ME", weights=weights, **options)
    assert found.exact == ("kernels" not in options)
    references = one_device(weights, options.get("activation_scheme", "auto"))
    assert difference(found, references.of(found, "CC", "A_CC_ME", options)) is None
    assert found.rebalances >= (1 if "enable_eplb" in options else 0)


def test_a_mesh_that_cuts_a_block_is_refused_with_the_sizes_that_fit(checkpoint):
    with pytest.raises(
        MeshError,
        match=r"expert width 64 over tp=4 is 16 a device, which cuts a quantisation block of 32; tp may be \[1, 2\]",
    ):
        LLM(str(checkpoint), mesh="tp=4,ep=1", weights="mxfp4-bf16")


def test_blocks_that_do_not_divide_a_width_are_refused(tmp_path):
    directory = write_checkpoint(tmp_path, hidden_size=48)
    with pytest.raises(UserError, match="blocks of 32, and this model's hidden_size is 48"):
        LLM(str(directory), weights="mxfp4-bf16")


def test_the_shared_expert_does_not_become_one_in_fp4(checkpoint):
    with pytest.raises(UserError, match="leave one of the two out"):
        LLM(str(checkpoint), mesh="dp=2", weights="nvfp4-bf16", enable_shared_experts_fusion=True)


@pytest.mark.parametrize(
    ("mesh", "weights", "reason"),
    [
        (
            "dp=2",
            "mxfp4-bf16",
            "rows with experts of the same format, and --weights is mxfp4-bf16; add --weights nvfp4",
        ),
        ("dp=2", "fp8", "rows with experts of the same format, and --weights is fp8"),
        ("tp=2,ep=1", "nvfp4-bf16", "one scale over its width, and --mesh tp=2,ep=1 splits it over 2 devices"),
    ],
)
def test_rows_in_nvfp4_need_experts_in_nvfp4_that_are_whole(checkpoint, mesh, weights, reason):
    with pytest.raises(UserError, match=reason):
        LLM(str(checkpoint), mesh=mesh, weights=weights, activation_scheme="nvfp4")


def test_a_mesh_that_cuts_a_block_of_rows_in_fp8_is_refused(checkpoint):
    with pytest.raises(
        UserError, match="gives 128 values of an expert's width one scale, and --mesh tp=2,ep=1 leaves 32 of 64"
    ):
        LLM(str(checkpoint), mesh="tp=2,ep=1", weights="mxfp4-bf16", activation_scheme="dynamic")
