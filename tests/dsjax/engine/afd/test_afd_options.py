"""What may be said with ``--attention-mesh`` and ``--expert-mesh``: the tests of `afd/options.py`."""

import pytest

from dsjax.engine.afd.options import expert_share, expert_spec
from dsjax.engine.elastic.joining import host_options
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError

SIDES = {"attention_mesh": "dp=4,tp=2", "expert_mesh": "ep=24"}
SEVERAL = {"afd_role": "expert", "afd_address": "10.0.0.1:7000, 10.0.0.2:7000"}


def test_the_mesh_is_that_of_attention_and_all_devices_count():
    args = EngineArgs(**SIDES)
    assert (args.mesh, args.num_devices, expert_spec(args).ep_size) == ("dp=4,tp=2", 32, 24)
    assert EngineArgs(**args.executor_options) == args
    assert expert_spec(EngineArgs()) is None
    apart = {role: EngineArgs(**SIDES, afd_role=role, afd_address="10.0.0.1:7000") for role in ("attention", "expert")}
    assert {role: one.num_devices for role, one in apart.items()} == {"attention": 8, "expert": 24}


def test_each_of_several_processes_has_its_own_run_of_the_expert_devices():
    second = EngineArgs(**SIDES, **SEVERAL, afd_server_rank=1)
    assert expert_share(second) == ("10.0.0.2:7000", 12, 12)
    assert second.num_devices == 12
    assert EngineArgs(**SIDES, **SEVERAL | {"afd_role": "attention"}).num_devices == 8


def test_the_attention_side_alone_may_be_several_processes():
    group = {"coordinator_address": "127.0.0.1:8476", "num_processes": 4, "process_id": 3}
    args = EngineArgs(**SIDES, **SEVERAL | {"afd_role": "attention"}, **group)
    assert (host_options(args).process_id, args.num_devices) == (3, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SIDES | {"expert_mesh": "dp=24"}, "expected ep="),
        (SIDES | {"attention_mesh": "dp=4,ep=2"}, "leave ep out"),
        (SIDES | {"afd_role": "expert", "afd_address": "nowhere"}, "expected HOST:PORT"),
        (SIDES | SEVERAL | {"expert_mesh": "ep=25"}, "25 devices, which 2 processes"),
        (SIDES | SEVERAL, "with --afd-server-rank, from 0 to 1"),
        (SIDES | SEVERAL | {"afd_server_rank": 2}, "names 2 processes, from 0 on"),
        (SIDES | SEVERAL | {"afd_address": "10.0.0.1:7000,10.0.0.1:7000"}, "names a process twice"),
        (SIDES | {"enable_dbo": True, "num_afd_stages": 1}, "expected an integer of at least 2"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        EngineArgs(**options)
