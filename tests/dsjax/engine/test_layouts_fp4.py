"""Layouts with experts in FP4 give the answer of one device, and what does not go with FP4 is refused with the reason."""

import pytest
from layouts import widths, write_checkpoint
from test_layouts import USUAL, answers, one_device  # noqa: F401
from test_layouts import test_layout_gives_the_answer_of_one_device as check

from dsjax import LLM
from dsjax.errors import UserError
from sharding import MeshError

NVFP4_ROWS = {"weights": "nvfp4-bf16", "activation_scheme": "nvfp4", "redundant_experts": 4}
INT4 = {"weights": "int4-bf16", "redundant_experts": 4}
EPLB = {"num_redundant_experts": 2, "window_size": 4, "step_interval": 4, "payback": 0}
MXFP4_MOVING = {"weights": "mxfp4-bf16", "enable_eplb": True, "eplb_config": EPLB}
RUNS = [
    ("dp=2", "ragged", *USUAL, MXFP4_MOVING),
    ("dp=2,tp=2", "padded", *USUAL, NVFP4_ROWS),
    ("dp=2,tp=2", "gather", *USUAL, INT4),
]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=["MXFP4", "NVFP4", "INT4"])
def test_a_layout_with_experts_in_four_bits_gives_the_answer_of_one_device(request, kernels, run):
    check(*map(request.getfixturevalue, ("answers", "one_device")), kernels, "v3, FP4", *run)


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
def test_options_that_do_not_go_with_fp4_are_refused_with_the_reason(tmp_path, options, reason):
    checkpoint = write_checkpoint(tmp_path, num_hidden_layers=2, first_k_dense_replace=0, **widths("mxfp4-bf16", 2))
    with pytest.raises((UserError, MeshError), match=reason):
        LLM(str(checkpoint), **{"mesh": "dp=2", "weights": "mxfp4-bf16"} | options)
    directory = write_checkpoint(tmp_path, hidden_size=48)
    with pytest.raises(UserError, match="blocks of 32, and this model's hidden_size is 48"):
        LLM(str(directory), weights="mxfp4-bf16")
