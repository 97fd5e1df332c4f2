"""Prompts of V3.2 and V4 are those of DeepSeek's own encoders, whose outputs for our conversations are in `prompt_goldens.json`.

They were made by `encoding_dsv32` of deepseek-ai/DeepSeek-V3.2 and `encoding_dsv4` of the first DeepSeek-V4-Flash. The same encoders
agreed with ours on 5,661 conversations that hypothesis drew, and ours give the seven outputs that DeepSeek publishes beside them, three
of V3.2 and four of V4. (The copies of V3.2's encoder in vLLM and SGLang lack seven blank lines of the description of tools.)
"""

import json
from pathlib import Path

import pytest
from tiny_tokenizer import CONFIG, write_tokenizer

from dsjax.engine.text.prompt_encoder import ABSOLUTE_EFFORT as ABSOLUTE
from dsjax.engine.text.prompt_encoder import BEYOND_EFFORT as BEYOND
from dsjax.engine.text.prompt_encoder import BOS, ENCODERS, FIRST_EFFORTS, V4Encoder, V32Encoder
from dsjax.engine.text.tokenizer import ChatTemplateError, Tokenizer

GOLDENS = json.loads((Path(__file__).parent / "prompt_goldens.json").read_text(encoding="utf-8"))
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: f"{golden['encoder']}: {golden['claim']}")
def test_prompts_are_those_of_deepseek_s_own_encoder(golden):
    encoder = V4Encoder(FIRST_EFFORTS) if golden["encoder"] == "deepseek_v4" else V32Encoder()
    assert encoder.render(golden["messages"], tools=golden["tools"], **golden["variables"]) == golden["prompt"]


@pytest.mark.parametrize("name", ENCODERS)
def test_thinking_is_off_unless_it_is_asked_for(name):
    encoder = ENCODERS[name]()
    assert encoder.render(HELLO) == f"{BOS}<｜User｜>Hello<｜Assistant｜></think>"
    assert encoder.render(HELLO, enable_thinking=True).endswith("<｜Assistant｜><think>")
    assert encoder.render(HELLO, thinking=True, reasoning_effort="none").endswith("<｜Assistant｜></think>")
    assert encoder.render(HELLO, add_generation_prompt=False) == f"{BOS}<｜User｜>Hello"


@pytest.mark.parametrize(
    ("effort", "begins_with"), [("low", ""), ("medium", ""), ("high", ABSOLUTE), ("xhigh", ABSOLUTE), ("max", BEYOND)]
)
def test_v4_has_three_efforts_and_takes_openai_s_others_for_the_next_lower_one(effort, begins_with):
    assert V4Encoder().render(HELLO, thinking=True, reasoning_effort=effort).startswith(f"{BOS}{begins_with}<｜User｜>")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([*HELLO, {"role": "tool", "content": "1"}], "message 1 is a tool's result that no tool call asked for"),
        ([{"role": "critic", "content": "no"}], "the role 'critic'"),
    ],
)
def test_what_the_format_has_no_place_for_is_refused(messages, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        V32Encoder().render(messages)


def test_arguments_that_are_no_object_become_one_parameter():
    written = V4Encoder().calls([("f", "not JSON"), ("g", ""), ("h", '{"a": null}')])
    assert '<｜DSML｜parameter name="arguments" string="true">not JSON</｜DSML｜parameter>' in written
    assert '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>' in written
    assert '<｜DSML｜parameter name="a" string="false">null</｜DSML｜parameter>' in written
    assert "[[[" in V4Encoder().calls([("f", "[" * 9000)])


@pytest.fixture
def without_template(tmp_path):
    write_tokenizer(tmp_path)
    config = {name: value for name, value in CONFIG.items() if name != "chat_template"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    return tmp_path


def test_the_model_s_type_chooses_the_encoder_where_there_is_no_template(without_template):
    read = Tokenizer.from_directory
    assert isinstance(read(without_template).chat_template, V4Encoder)
    assert isinstance(read(without_template, "deepseek_v32").chat_template, V32Encoder)
    assert read(without_template, "hf").chat_template is None
    (without_template / "chat_template.jinja").write_text("{{ 1 }}")
    assert read(without_template).chat_template.source == "{{ 1 }}"
    assert isinstance(read(without_template, "deepseek_v4").chat_template, V4Encoder)


def test_another_process_has_the_same_encoder(without_template):
    encoding = without_template / "encoding"
    encoding.mkdir()
    for code, begins_with in (("'Absolute maximum'", ABSOLUTE), (repr(BEYOND), BEYOND)):
        (encoding / "encoding_dsv4.py").write_text(code, encoding="utf-8")
        there = Tokenizer.from_texts(*Tokenizer.from_directory(without_template).to_texts())
        prompt = there.chat_template.render(HELLO, thinking=True, reasoning_effort="max")
        assert prompt.startswith(BOS + begins_with)
