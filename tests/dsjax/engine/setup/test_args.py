"""One set of options, checked once, and what they mean together: the tests of `tiers/options.py` and `afd/options.py` too."""

import pytest
from fake_executor import FakeExecutor
from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.engine.afd.options import expert_share, expert_spec
from dsjax.engine.elastic.joining import host_options
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from sharding.errors import MeshError

COPIES = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 16}}
SIDES = {"attention_mesh": "dp=4,tp=2", "expert_mesh": "ep=24"}
SEVERAL = SIDES | {"afd_role": "expert", "afd_address": "10.0.0.1:7000, 10.0.0.2:7000"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "--dtype is 'float16', expected one of auto, float32, bfloat16"),
        ({"gpu_memory_utilization": 90}, "--gpu-memory-utilization is 90, expected a number above 0"),
        ({"page_size": 0}, "--page-size is 0, expected an integer of at least 1"),
        ({"max_num_seqs": 600, "max_num_batched_tokens": 512}, "less than --max-num-seqs 600"),
        ({"prefill_chunk": 300, "max_num_batched_tokens": 256}, "is 300, more than --max-num-batched-tokens 256"),
        ({"mla_decode": "ABC"}, "--mla-decode is 'ABC'"),
        ({"router": "hash"}, "--router is 'hash', expected a class"),
        ({"enable_prefix_caching": "no"}, "--enable-prefix-caching is 'no', expected True or False"),
        ({"speculative_config": {"method": "mtp", "drafts": 2}}, "--speculative-config has the unknown field drafts"),
        ({"tensor_parallel_size": 8}, "unknown engine option tensor_parallel_size; the options are model"),
        (COPIES | {"enable_eplb": False}, "--eplb-config is given without --enable-eplb"),
        (COPIES | {"redundant_experts": 8}, "--redundant-experts is 8, and num_redundant_experts in"),
        (SIDES | {"expert_mesh": "dp=24"}, "expected ep="),
        (SIDES | {"afd_role": "expert", "afd_address": "nowhere"}, "expected HOST:PORT"),
        (SIDES | {"enable_dbo": True, "num_afd_stages": 1}, "expected an integer of at least 2"),
        (SEVERAL | {"expert_mesh": "ep=25"}, "25 devices, which 2 processes"),
        (SEVERAL, "with --afd-server-rank, from 0 to 1"),
        (SEVERAL | {"afd_address": "10.0.0.1:7000,10.0.0.1:7000"}, "names a process twice"),
    ],
)
def test_wrong_options_are_named_as_flags(options, message):
    with pytest.raises(UserError, match=message):
        EngineArgs.from_options(**options)


def test_a_mesh_that_cannot_be_is_refused_at_once():
    with pytest.raises(MeshError, match="sp=2"):
        EngineArgs(mesh="sp=2")


def test_the_scheduler_uses_all_the_room_of_the_runner():
    limits = FakeExecutor(max_rows_decode=5, max_chunk=7, pages_per_rank=9, page_size=3).limits
    options = {"max_num_batched_tokens": 99, "scheduling_policy": "priority", "enable_prefix_caching": False}
    config = EngineArgs(**options).scheduler_config(limits)
    assert (config.max_num_seqs, config.prefill_chunk, config.max_tokens_in_cache) == (5, 7, 24)
    assert (config.max_num_batched_tokens, config.policy, config.prefix_caching) == (99, "priority", False)


def test_a_command_that_is_no_side_of_two_refuses_to_be_one():
    options = ["generate", "--prompt", "a", "--disaggregation-mode", "decode"]
    with pytest.raises(UserError, match="--disaggregation-mode decode"):
        CliRunner().invoke(app, options, catch_exceptions=False)


@pytest.mark.parametrize("option", ["--disaggregation-mode", "--scheduling-policy", "--num-processes", "--afd-role"])
def test_a_dry_run_has_no_options_of_a_host(option):
    result = CliRunner().invoke(app, ["dryrun", option, "decode"])
    assert (result.exit_code, f"No such option: {option}" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ({}, 0),
        ({"redundant_experts": 8}, 8),
        ({"enable_eplb": True, "redundant_experts": 8}, 8),
        (COPIES, 16),
        (COPIES | {"redundant_experts": 16}, 16),
    ],
)
def test_copies_of_experts_are_as_many_as_either_option_says(options, copies):
    args = EngineArgs(**options)
    assert args.num_redundant == copies
    assert (args.eplb is not None) == args.enable_eplb


def test_with_sides_the_mesh_is_that_of_attention_and_all_devices_count():
    args = EngineArgs(**SIDES)
    assert (args.mesh, args.num_devices, expert_spec(args).ep_size) == ("dp=4,tp=2", 32, 24)
    assert EngineArgs(**args.executor_options) == args
    assert expert_spec(EngineArgs()) is None
    apart = {role: EngineArgs(**SIDES, afd_role=role, afd_address="10.0.0.1:7000") for role in ("attention", "expert")}
    assert {role: one.num_devices for role, one in apart.items()} == {"attention": 8, "expert": 24}


def test_each_of_several_processes_has_its_own_run_of_the_expert_devices_and_attention_may_be_several():
    second = EngineArgs(**SEVERAL, afd_server_rank=1)
    assert expert_share(second) == ("10.0.0.2:7000", 12, 12)
    assert second.num_devices == 12
    group = {"coordinator_address": "127.0.0.1:8476", "num_processes": 4, "process_id": 3}
    args = EngineArgs(**SEVERAL | {"afd_role": "attention"}, **group)
    assert (host_options(args).process_id, args.num_devices) == (3, 8)
