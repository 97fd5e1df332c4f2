"""Run other people's clients, unmodified, against a running `dsjax serve` of the demo: see docs/serving.md.

Each wants an environment of its own (`pip install langchain-openai litellm`; `pip install openai-agents`):

    python tools/check_clients.py langchain --url http://127.0.0.1:8000
"""

import argparse
import asyncio
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel

HI = [{"role": "user", "content": "hi"}]


class Person(BaseModel):
    """A form whose every text ends: the demo model would write an open string for ever."""

    name: Literal["Ann", "Bob"]
    age: Literal[1, 2]


def langchain(url: str) -> None:
    """Chat, streams, batches, forced tools streamed and whole, structured output in two ways, completions, the Responses API."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def chat(**options):
        usual = {"model": "demo", "base_url": url, "api_key": "none", "temperature": 0, "reasoning_effort": "none"}
        return ChatOpenAI(**{**usual, **options})

    assert chat(max_tokens=8).invoke("hi").usage_metadata["output_tokens"] == 8
    assert len(list(chat(max_tokens=8).stream("hi"))) > 1
    assert len(chat(max_tokens=8).batch(["a", "b", "c"])) == 3
    forced = chat(max_tokens=200).bind_tools([add], tool_choice="required", parallel_tool_calls=False)
    streamed = None
    for chunk in forced.stream("add 1 and 2"):
        streamed = chunk if streamed is None else streamed + chunk
    assert [call["args"] for call in streamed.tool_calls] == [
        call["args"] for call in forced.invoke("add 1 and 2").tool_calls
    ]
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat(max_tokens=200).with_structured_output(Person, method=method).invoke("who?"), Person)
    assert OpenAI(model="demo", base_url=url, api_key="none", max_tokens=8).invoke("def main(")
    assert chat(max_tokens=20, use_responses_api=True).invoke("hi").usage_metadata["output_tokens"] == 20


def litellm(url: str) -> None:
    """Chat, streams, forced tools, completions, the Responses API."""
    import litellm as client

    usual = {"api_base": url, "api_key": "none", "model": "openai/demo"}
    function = {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    }
    more = {"metadata": {"a": "b"}, "user": "u", "store": True, "reasoning_effort": "none"}
    assert client.completion(messages=HI, max_tokens=8, **more, **usual).usage.completion_tokens == 8
    assert len(list(client.completion(messages=HI, max_tokens=8, stream=True, **usual))) > 1
    tools = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "reasoning_effort": "none",
    }
    called = client.completion(messages=HI, max_tokens=200, parallel_tool_calls=False, **tools, **usual)
    assert called.choices[0].message.tool_calls[0].function.name == "add"
    assert client.text_completion(prompt="def main(", max_tokens=8, **usual).choices[0].text
    assert client.responses(input="hi", max_output_tokens=16, **usual).status == "incomplete"
    last = list(client.responses(input="hi", max_output_tokens=16, stream=True, **usual))[-1]
    assert "completed" in str(last.type).lower()


def agents(url: str) -> None:
    """Both of its models: a structured answer whole and streamed, a tool that is called, and its answer sent back."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI
    from openai.types.shared import Reasoning

    @function_tool
    def add(a: bool, b: bool) -> str:
        """Add."""
        return str(a + b)

    async def run() -> None:
        settings = {
            "max_tokens": 200,
            "temperature": 0,
            "reasoning": Reasoning(effort="none"),
            "parallel_tool_calls": False,
        }
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
            usual = {"name": "A", "model": kind(model="demo", openai_client=AsyncOpenAI(base_url=url, api_key="none"))}
            asked = Agent(output_type=Person, model_settings=ModelSettings(**settings), **usual)
            assert isinstance((await Runner.run(asked, "who?")).final_output, Person)
            streamed = Runner.run_streamed(asked, "who?")
            assert len([event async for event in streamed.stream_events()]) > 2
            forced = ModelSettings(tool_choice="required", **settings)
            caller = Agent(tools=[add], model_settings=forced, tool_use_behavior="stop_on_first_tool", **usual)
            called = await Runner.run(caller, "add 1 and 2")
            history = [*called.to_input_list(), {"role": "user", "content": "so?"}]
            assert isinstance((await Runner.run(asked, history)).final_output, Person)

    set_tracing_disabled(True)
    asyncio.run(run())


CLIENTS: dict[str, Callable[[str], None]] = {"langchain": langchain, "litellm": litellm, "agents": agents}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    given = parser.parse_args()
    CLIENTS[given.client](given.url.rstrip("/") + "/v1")
    print(f"{given.client}: all answers are as they should be")
