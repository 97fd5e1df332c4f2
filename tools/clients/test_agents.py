"""openai-agents with both of its models: tools, structured answers, both at once, handoffs, whole and streamed."""

import asyncio

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

MODEL = "deepseek-r1"
MODELS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]
set_tracing_disabled(True)


class Sum(BaseModel):
    """A form."""

    total: int


@function_tool
def add(a: int, b: int) -> str:
    """Add."""
    return f"{a} and {b} make {a + b}"


def run(url: str, kind: type, text: str, streamed: bool, settings: ModelSettings | None = None, **fields):
    """Let an agent answer; return the result of the run, and how many events there were."""

    async def main():
        client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        settings_ = settings or ModelSettings(reasoning=Reasoning(effort="high"), include_usage=True)
        agent = Agent(name="A", model=kind(model=MODEL, openai_client=client), model_settings=settings_, **fields)
        if not streamed:
            return await Runner.run(agent, text), 0
        result = Runner.run_streamed(agent, text)
        return result, len([event async for event in result.stream_events()])

    result, events = asyncio.run(main())
    assert (events > 3) is streamed
    assert result.context_wrapper.usage.total_tokens > 0
    return result


every = pytest.mark.parametrize("kind", MODELS)
way = pytest.mark.parametrize("streamed", [False, True])


@every
@way
def test_text(url, kind, streamed):
    assert run(url, kind, "hi", streamed).final_output == "Hello there, Alice."


@every
@way
def test_a_structured_answer(url, kind, streamed):
    assert run(url, kind, "The total of 5?", streamed, output_type=Sum).final_output == Sum(total=5)


@every
@way
def test_a_tool_is_called_and_its_answer_read(url, kind, streamed):
    result = run(url, kind, "add 3 and 3", streamed, tools=[add])
    assert result.final_output == "The tool says: 3 and 3 make 6"
    assert len(result.raw_responses) == 2


@every
@way
def test_a_tool_and_a_structured_answer(url, kind, streamed):
    result = run(url, kind, "add 3 and 3", streamed, tools=[add], output_type=Sum)
    assert [type(item).__name__ for item in result.new_items if "Tool" in type(item).__name__] == [
        "ToolCallItem",
        "ToolCallOutputItem",
    ]
    assert isinstance(result.final_output, Sum)


@every
@way
@pytest.mark.parametrize("choice", ["required", "add"])
def test_a_forced_tool(url, kind, streamed, choice):
    settings = ModelSettings(tool_choice=choice, parallel_tool_calls=False, include_usage=True)
    result = run(url, kind, "hi", streamed, settings, tools=[add], tool_use_behavior="stop_on_first_tool")
    assert result.final_output == "1 and 1 make 2"


@every
@way
def test_a_handoff(url, kind, streamed):
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    other = Agent(name="B", model=model, output_type=Sum)
    result = run(url, kind, "transfer_to_b", streamed, handoffs=[handoff(other)])
    assert result.last_agent.name == "B"
    assert isinstance(result.final_output, Sum)
