"""With packed experts, every layout gives the answer of one device to the bit, and a mesh that cuts a block is refused."""

import functools

import pytest
from layouts import answer as answer_of
from layouts import widths, write_checkpoint

from dsjax import LLM
from dsjax.cli.exact import difference
from dsjax.errors import UserError
from sharding import MeshError

answer = functools.partial(answer_of, new_tokens=8, every_token=False)
EPLB = {
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 2, "window_size": 4, "step_interval": 4, "payback": 0},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint for both formats and for two ``tp`` devices: a device has one block of 32 of each expert's width."""
    fewer = {"num_hidden_layers": 2, "first_k_dense_replace": 0}
    return write_checkpoint(tmp_path_factory.mktemp("fp4"), **fewer, **widths("mxfp4-bf16", 2))


@pytest.fixture(scope="module")
def one_device(checkpoint):
    """What answers with some weights and some activations are held to. Where nothing is rounded, it is near that of the plain forms."""

    def exact(weights, scheme):
        options = {"weights": weights, "activation_scheme": scheme, "every_token": scheme == "auto"}
        found, plain = (
            answer(checkpoint, "dp=1", "auto", "CC", "A_CC_ME", kernels=kernels, **options)
            for kernels in ("auto", "plain")
        )
        assert found.exact
        assert scheme != "auto" or difference(found, plain) is None
        return found

    return functools.cache(exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "scheme", "layout", "dispatch", "options"),
    [
        ("mxfp4-bf16", "auto", "dp=2", "ragged", EPLB),
        ("nvfp4-bf16", "nvfp4", "dp=2,tp=2", "padded", {"redundant_experts": 4}),
        ("nvfp4-bf16", "dynamic", "dp=2", "gather", {}),
        ("int4-bf16", "auto", "dp=2,tp=2", "padded", {"redundant_experts": 4}),
    ],
)
def test_layout_gives_the_answer_of_one_device(
    checkpoint, one_device, kernels, weights, scheme, layout, dispatch, options
):
    found = answer(checkpoint, layout, dispatch, "CC", "A_CC_ME", weights=weights, activation_scheme=scheme, **options)
    assert found.exact
    assert difference(found, one_device(weights, scheme)) is None
    assert (found.rebalances or 0) >= (1 if "enable_eplb" in options else 0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mesh": "tp=4,ep=1"}, r"16 a device, which cuts a quantisation block of 32; tp may be \[1, 2\]"),
        ({"weights": "nvfp4-bf16", "enable_shared_experts_fusion": True}, "leave one of the two out"),
        ({"activation_scheme": "nvfp4"}, "--weights is mxfp4-bf16; add --weights nvfp4"),
        ({"weights": "fp8", "activation_scheme": "nvfp4"}, "experts of the same format, and --weights is fp8"),
        ({"mesh": "tp=2,ep=1", "weights": "nvfp4-bf16", "activation_scheme": "nvfp4"}, "splits it over 2 devices"),
        ({"mesh": "tp=2,ep=1", "activation_scheme": "dynamic"}, "one scale, and --mesh tp=2,ep=1 leaves 32 of 64"),
    ],
)
def test_options_that_do_not_go_with_fp4_are_refused_with_the_reason(checkpoint, options, reason):
    with pytest.raises((UserError, MeshError), match=reason):
        LLM(str(checkpoint), **{"mesh": "dp=2", "weights": "mxfp4-bf16"} | options)


def test_blocks_that_do_not_divide_a_width_are_refused(tmp_path):
    directory = write_checkpoint(tmp_path, hidden_size=48)
    with pytest.raises(UserError, match="blocks of 32, and this model's hidden_size is 48"):
        LLM(str(directory), weights="mxfp4-bf16")
