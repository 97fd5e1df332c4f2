"""pydantic-ai with both of its OpenAI models: text, tools and structured answers in each of its modes, whole and streamed."""

import asyncio

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    """A structured answer."""

    total: int


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"{a} and {b} make {a + b}"


def answer(url: str, kind: type, text: str, streamed: bool, **fields):
    """Let an agent answer; return what it says at the end."""
    agent = Agent(kind("deepseek-r1", provider=OpenAIProvider(base_url=url, api_key="none")), **fields)

    async def main():
        if not streamed:
            result = await agent.run(text)
            assert result.usage.output_tokens > 0
            return result.output
        async with agent.run_stream(text) as result:
            parts = [part async for part in result.stream_output(debounce_by=None)]
        assert len(parts) > 2
        return parts[-1]

    return asyncio.run(main())


every = pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
way = pytest.mark.parametrize("streamed", [False, True])


@every
@way
def test_text(url, kind, streamed):
    assert answer(url, kind, "hi", streamed) == "Hello there, Alice."


@every
@way
def test_a_tool_is_called_and_its_answer_read(url, kind, streamed):
    assert answer(url, kind, "add 3 and 3", streamed, tools=[add]) == "The tool says: 3 and 3 make 6"


@every
@way
@pytest.mark.parametrize("mode", [ToolOutput, NativeOutput, PromptedOutput])
def test_a_structured_answer(url, kind, streamed, mode):
    assert answer(url, kind, "The total of 5?", streamed, output_type=mode(Sum)) == Sum(total=5)
