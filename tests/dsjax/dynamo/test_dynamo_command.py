"""`dsjax dynamo` without Dynamo: what it says, and what it chooses for the frontend."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsjax.dynamo.command import choose_parsers, runtime_config
from dsjax.engine.tokenizer import Tokenizer
from dsjax.errors import UserError

DEMO = Path(__file__).parents[3] / "configs" / "models" / "demo"


def test_without_dynamo_one_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dynamo", None)
    with pytest.raises(UserError, match=r"needs NVIDIA Dynamo 1\.6.*pip install 'dsjax\[dynamo\]'") as found:
        runtime_config([])
    assert "\n" not in str(found.value)


def test_the_frontends_parsers_are_those_of_the_models_template_unless_asked_for():
    tokenizer = Tokenizer.from_directory(DEMO)
    chosen = SimpleNamespace(dyn_tool_call_parser=None, dyn_reasoning_parser=None)
    choose_parsers(chosen, tokenizer)
    assert (chosen.dyn_tool_call_parser, chosen.dyn_reasoning_parser) == ("deepseek_v3_1", "deepseek_r1")
    chosen = SimpleNamespace(dyn_tool_call_parser="hermes", dyn_reasoning_parser="basic")
    choose_parsers(chosen, tokenizer)
    assert (chosen.dyn_tool_call_parser, chosen.dyn_reasoning_parser) == ("hermes", "basic")


@pytest.mark.dynamo
@pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="NVIDIA Dynamo is not installed")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-such-option", "1"], "unrecognized arguments: --no-such-option 1"),
        (["--discovery-backend", "carrier-pigeon"], "argument --discovery-backend: invalid choice"),
        (["--endpoint", "only-one-part"], "ndpoint"),
        (["--custom-jinja-template", "/nowhere"], "/nowhere is no file"),
    ],
)
def test_dynamos_own_options_are_refused_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as found:
        runtime_config(arguments)
    assert "\n" not in str(found.value)


@pytest.mark.dynamo
@pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="NVIDIA Dynamo is not installed")
def test_an_endpoint_is_taken_apart_and_found_in_the_namespace_by_default():
    from dsjax.dynamo.command import TOOL_CALL_PARSERS

    config = runtime_config(["--namespace", "here"])
    assert (config.namespace, config.component, config.endpoint) == ("here", "backend", "generate")
    config = runtime_config(["--endpoint", "dyn://a.b.c"])
    assert (config.namespace, config.component, config.endpoint) == ("a", "b", "c")
    from dynamo._core import get_tool_parser_names

    assert set(TOOL_CALL_PARSERS.values()) <= set(get_tool_parser_names())
