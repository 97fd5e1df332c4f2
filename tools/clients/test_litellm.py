"""litellm: chat, streams, forced tools, completions and the Responses API."""

import litellm
import pytest

HI = [{"role": "user", "content": "hi"}]
FUNCTION = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


@pytest.fixture
def usual(url):
    """What each call is given."""
    return {"api_base": url, "api_key": "none", "model": "openai/deepseek-r1", "num_retries": 0}


def test_chat(usual):
    more = {"metadata": {"a": "b"}, "user": "u", "store": True, "reasoning_effort": "none"}
    answer = litellm.completion(messages=HI, **more, **usual)
    assert answer.choices[0].message.content == "Hello there, Alice."
    assert answer.usage.completion_tokens > 0


def test_chat_streamed(usual):
    parts = [part.choices[0].delta.content or "" for part in litellm.completion(messages=HI, stream=True, **usual)]
    assert "".join(parts) == "Hello there, Alice."


def test_a_forced_tool(usual):
    tools = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
    (call,) = litellm.completion(messages=HI, **tools, **usual).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')


def test_completions(usual):
    assert litellm.text_completion(prompt="def main(", max_tokens=8, **usual).usage.completion_tokens == 8


def test_responses(usual):
    assert litellm.responses(input="hi", **usual).status == "completed"
    assert litellm.responses(input="hi", max_output_tokens=16, **usual).status == "incomplete"
    last = list(litellm.responses(input="hi", stream=True, **usual))[-1]
    assert "completed" in str(last.type).lower()
