"""One set of options, checked once."""

import pytest
from fake_executor import FakeExecutor
from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from sharding.errors import MeshError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "--dtype is 'float16', expected one of auto, float32, bfloat16"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization is 0.0, expected a number above 0 and at most 1"),
        ({"gpu_memory_utilization": 90}, "--gpu-memory-utilization is 90, expected a number above 0"),
        ({"page_size": 0}, "--page-size is 0, expected an integer of at least 1"),
        ({"max_num_seqs": 600, "max_num_batched_tokens": 512}, "less than --max-num-seqs 600"),
        ({"mla_decode": "ABC"}, "--mla-decode is 'ABC'"),
        ({"model": None}, "--model is None, expected text"),
        ({"router": "hash"}, "--router is 'hash', expected a class"),
        ({"cache_tokens": "many"}, "--cache-tokens is 'many'"),
        ({"enable_prefix_caching": "no"}, "--enable-prefix-caching is 'no', expected True or False"),
        ({"speculative_config": {"method": "mtp", "drafts": 2}}, "--speculative-config has the unknown field drafts"),
        ({"tensor_parallel_size": 8}, "unknown engine option tensor_parallel_size; the options are model"),
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


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["dryrun"]], ids=lambda command: command[0])
def test_a_command_that_is_no_side_of_two_refuses_to_be_one(command):
    result = CliRunner().invoke(app, [*command, "--disaggregation-mode", "decode"])
    assert "--disaggregation-mode decode" in str(result.exception)
    assert isinstance(result.exception, UserError)
