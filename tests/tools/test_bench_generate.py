"""The engine's options of a system in `tools/bench_generate.py`."""

import argparse

from tools.bench_generate import _engine_options, _flags


def test_values_are_json_where_they_are_json_and_a_systems_own_come_last():
    args = argparse.Namespace(option=["max_model_len=512", "kernels=native"], drafts=2)
    options = _engine_options(args, "dp=4,tp=2/kernels=plain/batch_invariant=true", ["speculative"])
    assert options == {
        "mesh": "dp=4,tp=2",
        "dtype": "float32",
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        "max_model_len": 512,
        "kernels": "plain",
        "batch_invariant": True,
    }


def test_a_server_gets_the_same_options_as_flags():
    options = {"enable_prefix_caching": False, "batch_invariant": True, "mesh": "dp=2"}
    options |= {"eplb_config": {"window_size": 8}}
    flags = ["--no-enable-prefix-caching", "--batch-invariant", "--mesh", "dp=2", "--eplb-config", '{"window_size": 8}']
    assert _flags(options) == flags
