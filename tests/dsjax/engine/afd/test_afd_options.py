"""What may be said with ``--attention-mesh`` and ``--expert-mesh``: the tests of `afd/options.py`."""

import pytest

from dsjax.engine.afd.options import expert_spec
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError

SIDES = {"attention_mesh": "dp=4,tp=2", "expert_mesh": "ep=24"}


def test_the_mesh_is_that_of_attention_and_all_devices_count():
    args = EngineArgs(**SIDES)
    assert (args.mesh, args.num_devices, expert_spec(args).ep_size) == ("dp=4,tp=2", 32, 24)
    assert EngineArgs(**args.executor_options) == args
    assert expert_spec(EngineArgs()) is None
    apart = {role: EngineArgs(**SIDES, afd_role=role, afd_address="10.0.0.1:7000") for role in ("attention", "expert")}
    assert {role: one.num_devices for role, one in apart.items()} == {"attention": 8, "expert": 24}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_mesh": "ep=24"}, "without --attention-mesh"),
        ({"attention_mesh": "dp=8"}, "without --expert-mesh"),
        (SIDES | {"mesh": "dp=2"}, "name all devices"),
        (SIDES | {"expert_mesh": "dp=24"}, "expected ep="),
        (SIDES | {"attention_mesh": "dp=4,ep=2"}, "leave ep out"),
        (SIDES | {"enable_eplb": True}, "experts stay where they are"),
        (SIDES | {"enable_shared_experts_fusion": True}, "shared experts are on the attention side"),
        (SIDES | {"dispatch": "padded"}, "rows go to all"),
        (SIDES | {"moe_chunk_tokens": 4}, "max-num-batched-tokens"),
        (SIDES | {"disaggregation_mode": "decode"}, "attention side"),
        (SIDES | {"coordinator_address": "127.0.0.1:1"}, "each side is one process"),
        (SIDES | {"num_processes": 2}, "each side is one process"),
        (SIDES | {"afd_role": "expert"}, "both need it"),
        (SIDES | {"afd_role": "expert", "afd_address": "nowhere"}, "expected HOST:PORT"),
        (SIDES | {"afd_address": "127.0.0.1:1"}, "is for two processes"),
        ({"afd_role": "attention"}, "give these too"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        EngineArgs(**options)
