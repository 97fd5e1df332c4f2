"""openai-agents with both of its models: tools, structured answers, both at once, handoffs, whole and streamed."""

import asyncio

import agents
import pytest
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

MODEL = "deepseek-r1"
MODELS = [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel]
agents.set_tracing_disabled(True)


class Sum(BaseModel):
    """A form."""

    total: int


@agents.function_tool
def add(a: int, b: int) -> str:
    """Add."""
    return f"{a} and {b} make {a + b}"


def run(url: str, kind: type, text: str, streamed: bool, settings: agents.ModelSettings | None = None, **fields):
    """Let an agent answer; return the result of the run, and how many events there were."""

    async def main():
        model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
        settings_ = settings or agents.ModelSettings(reasoning=Reasoning(effort="high"), include_usage=True)
        agent = agents.Agent(name="A", model=model, model_settings=settings_, **fields)
        if not streamed:
            return await agents.Runner.run(agent, text), 0
        result = agents.Runner.run_streamed(agent, text)
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
    kinds = [type(item).__name__ for item in result.new_items]
    assert [name for name in kinds if "Tool" in name] == ["ToolCallItem", "ToolCallOutputItem"]
    assert isinstance(result.final_output, Sum)


@every
@way
@pytest.mark.parametrize("choice", ["required", "add"])
def test_a_forced_tool(url, kind, streamed, choice):
    settings = agents.ModelSettings(tool_choice=choice, parallel_tool_calls=False, include_usage=True)
    result = run(url, kind, "hi", streamed, settings, tools=[add], tool_use_behavior="stop_on_first_tool")
    assert result.final_output == "1 and 1 make 2"


@every
@way
def test_a_handoff(url, kind, streamed):
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    other = agents.Agent(name="B", model=model, output_type=Sum)
    result = run(url, kind, "transfer_to_b", streamed, handoffs=[agents.handoff(other)])
    assert result.last_agent.name == "B"
    assert isinstance(result.final_output, Sum)
