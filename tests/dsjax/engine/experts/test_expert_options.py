"""How many copies of experts are asked for, and whether they move: tests of `experts/eplb.py`."""

import pytest

from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError

COPIES = {"num_redundant_experts": 16}


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ({}, 0),
        ({"redundant_experts": 8}, 8),
        ({"enable_eplb": True, "redundant_experts": 8}, 8),
        ({"enable_eplb": True, "eplb_config": COPIES}, 16),
        ({"enable_eplb": True, "eplb_config": COPIES, "redundant_experts": 16}, 16),
    ],
)
def test_copies_are_as_many_as_either_option_says(options, copies):
    args = EngineArgs(**options)
    assert args.num_redundant == copies
    assert (args.eplb is not None) == args.enable_eplb


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eplb_config": COPIES}, "--eplb-config is given without --enable-eplb"),
        (
            {"enable_eplb": True, "eplb_config": COPIES, "redundant_experts": 8},
            "--redundant-experts is 8, and num_redundant_experts in --eplb-config is 16",
        ),
    ],
)
def test_options_that_contradict_each_other_are_named(options, message):
    with pytest.raises(UserError, match=message):
        EngineArgs(**options)
