"""The format of tool calls is chosen by what the model's prompts hold."""

import pytest
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.options import OptionError
from dsjax.serve.options import HttpOptions
from dsjax.serve.tool_calls import SEPARATOR
from dsjax.serve.tool_formats import TOOL_FORMATS, choose_tool_format


def chosen(name: str, **config) -> str | None:
    form = choose_tool_format(name, Tokenizer(tiny_tokenizer()._backend, config))
    return form and form.name


@pytest.mark.parametrize(("config", "name"), [
    ({"chat_template": f"{{{{ '{SEPARATOR}' }}}}"}, "deepseek_v31"),
    ({"chat_template": f"{{{{ '{SEPARATOR} ```json' }}}}"}, "deepseek_v3"),
    ({"chat_template": "<|tool_calls_section_begin|>"}, "kimi_k2"),
    ({"chat_template": "<｜DSML｜function_calls>"}, "deepseek_v32"),
    ({"prompt_encoder": "deepseek_v32"}, "deepseek_v32"),
    ({"prompt_encoder": "deepseek_v4"}, "deepseek_v4"),
    ({"chat_template": "{{ 1 }}"}, None),
])  # fmt: skip
def test_auto_takes_the_format_that_the_prompts_have(config, name):
    assert chosen("auto", **config) == name


def test_a_named_format_is_taken_whatever_the_template_is_and_every_one_can_be_asked_for():
    assert chosen("deepseek_v3", chat_template="{{ 1 }}") == "deepseek_v3"
    assert chosen("none", prompt_encoder="deepseek_v4") is None
    assert choose_tool_format("auto", None) is None
    for name in TOOL_FORMATS:
        assert HttpOptions(tool_call_parser=name).tool_call_parser == name
    with pytest.raises(OptionError, match="expected one of auto, deepseek_v3, "):
        HttpOptions(tool_call_parser="qwen")
