"""What does not go with experts in FP4 is refused with the reason. Layouts with them: `test_layouts.py`."""

import pytest
from layouts import widths, write_checkpoint

from dsjax import LLM
from dsjax.errors import UserError
from sharding import MeshError


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
