"""The commands without a model: options, messages, what is imported, what is printed."""

import dataclasses
import io
import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from commands import run
from fake_executor import FakeExecutor, expected_tokens
from rich.console import Console
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.cli.generate import _standard_input, write_continuations
from dsjax.cli.info import describe
from dsjax.engine.contract.sampling_params import OutputKind, SamplingParams
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.llm_engine import LLMEngine
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.facts import EngineFacts, PrefillSizes
from dsjax.errors import UserError
from dsjax.options import Group
from dsjax.serve import server
from dsjax.serve.startup_screen import show_facts, show_url, warm_up_bar
from sharding import MeshError


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_every_engine_option_is_a_flag_of_both_commands_and_help_has_the_usual_ones_by_group(command):
    pages, terminal = ("--help", "--help-all"), {"COLUMNS": "100", "TERM": "dumb"}
    usual, every = (CliRunner().invoke(app, [command, page], env=terminal).output for page in pages)
    usual_flags, flags = (set(re.findall(r"^  (--[a-z-]+)", page, re.MULTILINE)) for page in (usual, every))
    options = [
        field for field in dataclasses.fields(EngineArgs) if field.name != "router"
    ]  # a class, which no text gives
    assert {f"--{field.name.replace('_', '-')}" for field in options} <= flags
    assert {"--mesh", "--help-all"} <= usual_flags < flags
    assert len(usual.splitlines()) <= 120, "two screens"
    assert {field.metadata["group"] for field in options} == set(Group)
    assert set(Group) <= set(re.findall(r"^(\S.*):$", usual, re.MULTILINE))
    assert re.search(r"128 for DeepSeek-V4\. \[also: --block- ?size\]", " ".join(every.split()))


@pytest.mark.parametrize(("arguments", "message"), [
    (("dsjax.serve", "--mesh", "dp=3,sp=2"), "error: mesh 'dp=3,sp=2': found 'sp=2'"),
    (("dsjax", "serve", "--mla-decode", "XY"), "error: --mla-decode is 'XY', expected one of CD"),
    (("dsjax.generate", "--prompt", "a", "--temperature", "-1"), "error: temperature: found -1.0"),
    (("dsjax", "info", "--model", "no-such-model"), "error: no model configuration at 'no-such-model'"),
])  # fmt: skip
def test_a_user_s_mistake_is_one_line_without_a_traceback(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


GROUP = ("--num-processes", "2", "--coordinator-address", "127.0.0.1:1", "--mesh", "dp=2")
EXPERTS = ("--afd-role", "expert", "--attention-mesh", "dp=2", "--expert-mesh", "ep=2", "--afd-address", "127.0.0.1:1")


@pytest.mark.parametrize(("given", "port"), [
    ((), 8000),
    ((*GROUP, "--process-id", "0"), 8000),
    ((*GROUP, "--process-id", "1"), 0),
    ((*GROUP, "--process-id", "1", "--port", "8000"), 8000),
    (EXPERTS, 0),
])  # fmt: skip
def test_only_the_process_with_the_server_takes_the_usual_port_unasked(monkeypatch, given, port):
    bind = Mock(side_effect=UserError("enough"))
    monkeypatch.setattr(server, "bind", bind)
    CliRunner().invoke(app, ["serve", *given])
    assert [called.args[1] for called in bind.call_args_list] == [port]


def test_info_writes_documented_json(tmp_path):
    done = run("dsjax", "info", "--model", "deepseek-v3", "--json", "-")
    facts = json.loads(done.stdout)
    assert set(facts) == {"model", "path", "config", "parameters", "layers", "parts", "device"}
    assert facts["layers"] == {"dense": 3, "moe": 58, "mtp": 1}
    assert sum(part["parameters"] for part in facts["parts"].values()) == 671_026_419_200, "parts do not overlap"
    assert all(part["each"] * part["count"] == part["parameters"] for part in facts["parts"].values())
    assert facts["device"]["cache_bytes_per_token"] == 70_272
    assert facts["parameters"]["main_model"] == 671_026_419_200
    assert facts["config"]["hidden_size"] == 7168
    CliRunner().invoke(app, ["info", "--model", "deepseek-v3", "--json", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text()) == facts


def test_info_counts_bytes_of_a_device_of_a_mesh_and_the_cache_for_the_layers_of_its_stage_alone():
    facts = describe("deepseek-v3", "dp=32")
    assert facts["device"]["devices"] == 32
    assert sum(facts["device"]["weight_bytes"]["bf16"].values()) == 75_104_624_640
    text = CliRunner().invoke(app, ["info", "--model", "deepseek-v3", "--mesh", "dp=32"], env={"COLUMNS": "80"}).output
    for shown in ("3 dense layers, 58 MoE layers", "75,104,624,640", "70,272 bytes a token", "671,026,419,200"):
        assert shown in text
    device = describe("deepseek-v3", "pp=2,tp=8")["device"]
    assert (device["stages"], device["cache_bytes_per_token"]) == (2, 31 * 1152), "61 layers are 31 and 30"
    with pytest.raises(MeshError, match="128 attention heads are not divisible by tp=3"):
        describe("deepseek-v3", "tp=3")


def test_info_takes_hub_ids_and_downloads_only_the_configuration(monkeypatch, tmp_path):
    demo, download = describe("demo"), Mock(return_value=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(demo["config"]))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    facts = describe("somebody/model", revision="main")
    (called,) = download.call_args_list
    assert called.args == ("somebody/model",)
    assert (called.kwargs["allow_patterns"], called.kwargs["revision"]) == (["config.json"], "main")
    assert facts["path"] == str(tmp_path)
    assert facts["parameters"]["main_model"] == demo["parameters"]["main_model"]


@pytest.fixture
def engine():
    return LLMEngine(FakeExecutor(num_ranks=2).parts())


def test_generate_writes_prompts_and_continuations_in_order_and_says_which_failed(engine):
    out = io.StringIO()
    engine.core.executor.non_finite.add(7)
    add, seeds = engine.add_request, {"1": 7}
    engine.add_request = lambda id, prompt, params: add(id, prompt, dataclasses.replace(params, seed=seeds.get(id)))
    params = SamplingParams(temperature=0, max_tokens=9, output_kind=OutputKind.DELTA)
    prompts, tokenizer = ["def main", "import", "x"], engine.tokenizer
    failures = write_continuations(out, engine, prompts, params)
    assert list(failures) == [1]
    assert "not finite" in failures[1]
    first, third = (p + tokenizer.decode(expected_tokens(tokenizer.encode(p), 9)) for p in (prompts[0], prompts[2]))
    assert out.getvalue() == f"{first}\n\nimport\n\n{third}\n"


def test_generate_ends_with_1_and_one_line_when_a_prompt_fails(engine, monkeypatch):
    monkeypatch.setattr("dsjax.llm.LLM", lambda **options: SimpleNamespace(engine=engine))
    failed = {0: "the values are not finite"}
    monkeypatch.setattr("dsjax.cli.generate.write_continuations", lambda *_, **__: failed)
    result = CliRunner().invoke(app, ["generate", "--prompt", "x"])
    assert result.exit_code == 1
    assert result.stderr == "error: prompt 1 of 1 was not finished: the values are not finite\n"


@pytest.mark.parametrize(
    ("prompts", "given", "message"),
    [(["-"], b"\xff\xfe", "invalid UTF-8 at byte 0"), (["-", "-"], b"a", "standard input can be read only once")],
)
def test_generate_refuses_a_standard_input_that_has_no_text(monkeypatch, prompts, given, message):
    options = [word for prompt in prompts for word in ("--prompt", prompt)]
    result = CliRunner().invoke(app, ["generate", *options], input=given)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="standard input, which is closed"):
        _standard_input()


def test_generate_in_chat_form_uses_the_template_and_says_when_there_is_none(engine):
    out = io.StringIO()
    params, tokenizer = SamplingParams(temperature=0, max_tokens=5, output_kind=OutputKind.DELTA), engine.tokenizer
    write_continuations(out, engine, ["hi"], params, chat=True)
    text = tokenizer.chat_template.render([{"role": "user", "content": "hi"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert out.getvalue() == tokenizer.decode(expected_tokens(ids, 5)) + "\n"
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="--chat"):
        write_continuations(out, engine, ["hi"], params, chat=True)


FACTS = EngineFacts(
    model="demo", parameters=10_047_264, dtype="float32", weights="f32", cache_bytes=500_000, cache_tokens=131_072, page_size=16,
    weight_bytes={"attention": 1_000_000, "routed experts": 2_000_000}, physical_experts_per_device=2, prefill_chunk=256,
    mesh="dp=4,tp=8", mesh_shape={"dp": 1, "ep": 4, "tp": 8}, dp_ranks=4, num_devices=32, num_processes=1, device_kind="cpu",
    dispatch={"prefill": "padded", "decode": "gather"}, mla={"prefill": "CC", "decode": "A_CC_ME"}, platform="cpu",
    max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048,
)  # fmt: skip


def screen(**changed) -> str:
    """What the start-up screen shows of `FACTS` with changes, in one line."""
    console = Console(file=io.StringIO(), width=160)
    show_facts(console, dataclasses.replace(FACTS, **changed))
    return " ".join(console.file.getvalue().split())


DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}
PER_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
SEPARATED = {"prefill_meshes": ["dp=2"], "prefill_sizes": PrefillSizes(2, 4, 16_384, 8_192, 64_000, 1_000)}
RANGES = [[1, 8, 2], [9, 64, 1], [65, 4096, 0]]


@pytest.mark.parametrize(("changed", "line"), [
    ({"speculation": DRAFTS}, "the MTP module drafts 2 tokens a row"),
    ({"speculation": DRAFTS | {PER_BATCH_SIZE: RANGES}}, "2 with 1 to 8, 1 with 9 to 64, 0 with 65 or more running on a rank"),
    ({"speculation": DRAFTS | {PER_BATCH_SIZE: "auto"}}, "drafts up to 2 tokens a row, by step times"),
    ({"activation_scheme": "dynamic"}, "activations are quantised"),
    (SEPARATED, "up to 4 prompts under way, and a step up to 16,384 tokens, 8,192 of one prompt; its cache holds 32,000; "),
    (SEPARATED, "prompts of 1,000 tokens or more are computed where they are decoded"),
])  # fmt: skip
def test_the_start_up_screen_has_a_line_for_what_is_not_usual(changed, line):
    if "speculation" in changed:
        changed = {"speculation": dataclasses.asdict(SpeculativeConfig.parse(changed["speculation"]))}
    assert line in screen(**changed)
    assert line not in screen()


@pytest.mark.parametrize(("shape", "devices"), [((1, 4, 8), 32), ((8, 1, 4), 32), ((1, 1, 1), 1), ((1, 144, 1), 144)])
def test_the_start_up_screen_shows_mesh_bytes_capacity_and_url(shape, devices):
    console, mesh_shape = Console(file=io.StringIO(), width=120), dict(zip(("dp", "ep", "tp"), shape, strict=True))
    show_facts(console, dataclasses.replace(FACTS, mesh_shape=mesh_shape, num_devices=devices))
    show_url(console, "http://127.0.0.1:8123", ("demo",))
    text = console.file.getvalue()
    for expected in (
        *("dp=4,tp=8", "routed experts", "2,000,000", "3,500,000", "http://127.0.0.1:8123/v1"),
        "131,072 tokens in pages of 16, 32,768 on each of 4 DP ranks",
        "up to 2,048 tokens a request; the cache of a rank holds 16.0 of that length at once",
    ):
        assert expected in text
    drawn = "\n".join(line for line in text.splitlines() if "[" in line)
    assert set(map(int, re.findall(r"(?<=[\[· ])\d+(?=[·\]])", drawn))) >= set(range(min(devices, 16)))


def test_the_warm_up_bar_counts():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    parts = FakeExecutor(num_ranks=2).parts()
    with warm_up_bar(console) as progress:
        parts.warm_up(progress)
    assert parts.core.executor.warm
    assert "3/3" in console.file.getvalue()


def test_without_a_terminal_the_decode_and_the_prefill_engine_say_how_far_they_are():
    parts = FakeExecutor(num_ranks=2).parts()
    parts.prefill_links = (parts.core.executor,)  # it has what a link has of a warm-up
    console = Console(file=io.StringIO(), width=120)
    with warm_up_bar(console) as progress:
        parts.warm_up(progress)
    lines = console.file.getvalue().splitlines()
    for name in ("decode engine", "prefill engine"):
        assert "3 of 3" in [line for line in lines if line.startswith(f"compiling shapes of {name}: ")][-1]
    assert len(lines) == len(set(lines)), "nothing is said twice"
