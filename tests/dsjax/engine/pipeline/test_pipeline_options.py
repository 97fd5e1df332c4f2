"""What may be said with ``--mesh pp=2,…``: the tests of `pipeline/options.py`."""

import pytest

from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError

STAGES = {"mesh": "pp=2,dp=2"}


def test_all_devices_of_all_stages_count():
    args = EngineArgs(**STAGES, pp_layer_partition="3,2")
    assert args.num_devices == 4
    assert EngineArgs(**args.executor_options) == args


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp_layer_partition": "3,2"}, "has one; add pp"),
        (STAGES | {"page_source": "dsjax.nowhere"}, "one at each stage"),
        (STAGES | {"disaggregation_mode": "decode"}, "not handed over"),
        ({"prefill_mesh": "pp=2", "decode_mesh": "dp=2"}, "not handed over"),
        ({"attention_mesh": "pp=2,dp=2", "expert_mesh": "ep=4"}, "its own routed experts"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        EngineArgs(**options)
