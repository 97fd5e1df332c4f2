"""What a command makes of other engines' names, and of a file of options."""

import re
import shlex

import pytest
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from sharding.errors import MeshError

FILE = """
model: deepseek-v3
tensor-parallel-size: 2
max_num_seqs: 64
enable-prefix-caching: false
speculative-config: {method: mtp, num_speculative_tokens: 2}
prompt: [a, b]
"""
OF_FILE = {
    "model": "deepseek-v3",
    "mesh": "dp=1,tp=2",
    "max_num_seqs": 64,
    "enable_prefix_caching": False,
    "speculative_config": '{"method": "mtp", "num_speculative_tokens": 2}',
}


@pytest.fixture
def given(monkeypatch, tmp_path):
    """``given(words, file)``: the engine's options that `dsjax generate` gets and that differ from the defaults."""

    def run(words: str, file: str = "") -> dict:
        (tmp_path / "c.yaml").write_text(file, encoding="utf-8")
        got = {}
        monkeypatch.setattr("dsjax.llm.LLM", lambda **options: got.update(options) or 1 / 0)
        result = CliRunner().invoke(app, ["generate", *shlex.split(words.replace("FILE", str(tmp_path / "c.yaml")))])
        if isinstance(result.exception, SystemExit):
            raise UserError(result.output)
        if not isinstance(result.exception, ZeroDivisionError):
            raise result.exception
        usual = vars(EngineArgs())
        return {name: value for name, value in got.items() if value != usual[name]}

    return run


@pytest.mark.parametrize(("words", "options"), [
    ("-tp 8 -dp=2", {"mesh": "dp=2,tp=8"}),
    ("-pp 2 --mesh tp=4,pp=1 --ep 4", {"mesh": "tp=4,pp=2,ep=4"}),
    ("--tensor-parallel-size 4 --tp-size 8", {"mesh": "dp=1,tp=8"}),
    ("--model-path deepseek-v3 --context-length 99", {"model": "deepseek-v3", "max_model_len": 99}),
    ("-q FP8", {"weights": "fp8"}),
    ("--quantization modelopt_fp4", {"weights": "nvfp4"}),
    ("--all2all-backend deepep_low_latency", {"dispatch": "padded"}),
    ("--moe-a2a-backend none", {"dispatch": "gather"}),
    ("--attention-backend TRITON_MLA", {"kernels": "pallas"}),
    ("--num-gpu-blocks-override 100 --block-size 32", {"page_size": 32, "cache_tokens": 3200}),
    ("--num-gpu-blocks-override 9 --model deepseek-v4-flash", {"model": "deepseek-v4-flash", "cache_tokens": 1152}),
    ("--max-total-tokens 1008", {"cache_tokens": 1008}),
    ("--chunked-prefill-size 512", {"prefill_chunk": 512}),
    ("--long-prefill-token-threshold 512", {"prefill_chunk": 512}),
    ("--kv-offloading-size 1.5", {"host_cache_bytes": 1_610_612_736}),
    ("--ep-num-redundant-experts 32", {"redundant_experts": 32}),
    ("--enable-deterministic-inference", {"batch_invariant": True, "mla_prefill": "A_CC_ME"}),
    ("--disable-radix-cache", {"enable_prefix_caching": False}),
    ("--mem-fraction-static 0.5", {"gpu_memory_utilization": 0.5}),
    ("--nnodes 2 --node-rank 1", {"num_processes": 2, "process_id": 1}),
    ("--master-port 7000 --master-addr ::1", {"coordinator_address": "[::1]:7000"}),
    ("--master-addr a", {"coordinator_address": "a:8476"}),
    ("--block-size 32 --page-size 64", {"page_size": 64}),
    ("--page-size 64 --block-size 32", {"page_size": 32}),
    ("--tp 8 --tensor-parallel-size 4", {"mesh": "dp=1,tp=4"}),
    ("--disable-radix-cache --enable-prefix-caching", {}),
    ("--tp 8 --mesh dp=4", {"mesh": "dp=4,tp=8"}),
])  # fmt: skip
def test_an_option_of_another_engine_is_taken_for_ours(given, words, options):
    assert given(f"{words} --prompt -tp") == options, "a value that looks like an option stays a value"


@pytest.mark.parametrize(("words", "message"), [
    ("--quantization awq", "--quantization awq has no counterpart in dsjax; give --weights: fp8, nvfp4"),
    ("--moe-a2a-backend pplx", "give --dispatch: gather, padded, ragged or hierarchical; auto chooses"),
    ("-ep --seed 3", "-ep is not needed: experts are spread over all dp × tp devices unless --mesh has an ep; leave it out"),
    ("--ep --seed 3", "--ep --seed has no counterpart in dsjax; give --mesh ep=N: "),
    ("-tp", "-tp without a value has no counterpart in dsjax; give --mesh tp=N"),
    ("--max-total-tokens 1001", "--cache-tokens is 1001, which is no whole number of pages of 16 tokens"),
    ("--chunked-prefill-size 8192", "--prefill-chunk is 8192, more than --max-num-batched-tokens 2048, which a step"),
    ("--num-gpu-blocks-override 9 --model /no/such", "/no/such"),
    ("--block-size 0", "--page-size is 0, expected an integer of at least 1"),
    ("--config", "Option '--config' requires an argument"),
    ("--model-path", "--model-path without a value has no counterpart in dsjax; give --model"),
    ("--kv-offloading-size inf", "--kv-offloading-size inf has no counterpart in dsjax"),
    ("--disable-radix-cache=1", "--disable-radix-cache is --no-enable-prefix-caching"),
])  # fmt: skip
def test_a_value_without_counterpart_gets_one_message_with_what_to_use(given, words, message):
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        given(f"--prompt x {words}")
    assert "--config None" not in str(refused.value), "only keys of a file name it"


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("--config FILE", {}),
        ("--config=FILE --max-num-seqs 8 -dp 4", {"max_num_seqs": 8, "mesh": "dp=4,tp=2"}),
        ("--config FILE --mesh dp=4", {"mesh": "dp=4"}),
    ],
)
def test_a_file_gives_options_and_the_command_line_has_priority(given, words, changed):
    assert given(words, FILE) == OF_FILE | changed


@pytest.mark.parametrize(
    ("mesh", "message"), [("dp8", "found 'dp8', expected axis=size"), ("dp=2,dp=4", "axis dp is given twice")]
)
def test_a_wrong_mesh_is_refused_for_what_it_is_beside_another_engines_axis(given, mesh, message):
    with pytest.raises(MeshError, match=message):
        given(f"--prompt x --mesh {mesh} --tp 2")


@pytest.mark.parametrize("words", ["--page-size 64", "--block-size 64"])
def test_pages_of_a_file_are_those_of_the_command_lines_size(given, words):
    file = "num-gpu-blocks-override: 100\nprompt: x"
    assert given(f"--config FILE {words}", file) == {"page_size": 64, "cache_tokens": 6400}


def test_names_in_a_file_stay_as_they_are_written(given):
    file = "prompt: 010\nmodel: 1.10\nrevision: 2024-01-02"
    assert given("--config FILE", file) == {"model": "1.10", "revision": "2024-01-02"}


@pytest.mark.parametrize(("file", "message"), [
    ("max_num_sqs: 3", "c.yaml: max_num_sqs is not an option of this command; --help-all lists them"),
    ("watchdog-timeout: 3", "c.yaml: watchdog-timeout is not an option"),
    ("config: c.yaml", "c.yaml: config is not an option"),
    ("max_num_seqs: many", "c.yaml: max_num_seqs: "),
    ("max_num_seqs: true", "c.yaml: max_num_seqs: found true, expected a string or a number"),
    ("model: [a]", 'c.yaml: model: found ["a"], expected a string or a number'),
    ("tokenizer:", "c.yaml: tokenizer: found null"),
    ("enable-dbo: 1", "c.yaml: enable-dbo: found 1, expected true or false"),
    ("quantization: awq", "c.yaml: quantization: --quantization awq has no counterpart in dsjax"),
    ("trust-remote-code: true", "c.yaml: trust-remote-code is not an option of this command; --trust-remote-code is"),
    ("page-size: 4\nblock-size: 8", "c.yaml: page-size and block-size are the same option; remove one"),
    ("port: !!int abc", "c.yaml is not valid YAML"),
    ("[" * 2000, "c.yaml is not valid YAML"),
    ("speculative-config: {x: 2024-01-01}", "--speculative-config"),
    ("false", "c.yaml has a bool"),
    ("- model", "c.yaml has a list; expected lines such as max-num-seqs: 64"),
    ("a: b: c", "c.yaml is not valid YAML: mapping values are not allowed here"),
])  # fmt: skip
def test_a_wrong_key_or_type_is_refused_with_the_file_and_the_key(given, file, message):
    with pytest.raises(UserError, match=re.escape(message)):
        given("--prompt x --config FILE", file)
