"""Anthropic's own client against /v1/messages: text, thinking, tools, its tool runner, structured answers, counting, errors."""

import asyncio

import anthropic
import pytest
from pydantic import BaseModel

MODEL = "claude-3-5"
HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
ASK = [{"role": "user", "content": "add 3 and 3"}]


class Sum(BaseModel):
    """A form."""

    total: int


@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Add."""
    return f"{a} and {b} make {a + b}"


@pytest.fixture
def address(url):
    """Address of the server, to which this client adds the API's version."""
    return url.removesuffix("/v1")


@pytest.fixture
def client(address):
    """The client, unmodified."""
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)


def answer(client: anthropic.Anthropic, streamed: bool, **fields) -> anthropic.types.Message:
    """Ask; the answer of a stream is what the client builds of its events."""
    asked = {"model": MODEL, "max_tokens": 500, **fields}
    if not streamed:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        assert len(list(stream)) > 5
        return stream.get_final_message()


way = pytest.mark.parametrize("streamed", [False, True])


@way
def test_thinking_and_text(client, streamed):
    made = answer(client, streamed, messages=HELLO, system="Be brief.")
    assert [block.type for block in made.content] == ["thinking", "text"]
    assert (made.content[0].thinking, made.content[1].text) == ("Let me see.", "Hello there, Alice.")
    assert (made.stop_reason, made.model) == ("end_turn", MODEL)
    assert made.usage.input_tokens > 0 < made.usage.output_tokens


@way
def test_thinking_can_be_turned_off(client, streamed):
    made = answer(client, streamed, messages=HELLO, thinking={"type": "disabled"})
    assert [block.type for block in made.content] == ["text"]


@way
def test_a_tool_is_called_and_its_result_read(client, streamed):
    made = answer(client, streamed, messages=ASK, tools=[ADD])
    used = made.content[-1]
    assert (used.type, used.name, used.input, made.stop_reason) == ("tool_use", "add", {"a": 3, "b": 3}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "6"}
    told = [*ASK, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    assert answer(client, streamed, messages=told, tools=[ADD]).content[-1].text == "The tool says: 6"


@way
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_forced_tool(client, streamed, choice):
    made = answer(client, streamed, messages=HELLO, tools=[ADD], tool_choice=choice)
    assert made.content[-1].input == {"a": 1, "b": 1}


def test_no_tool_where_none_may_be_called(client):
    made = answer(client, False, messages=ASK, tools=[ADD], tool_choice={"type": "none"})
    assert made.content[-1].type == "text"


@way
def test_a_stop_sequence_is_named(client, streamed):
    made = answer(client, streamed, messages=HELLO, stop_sequences=[" there"])
    assert (made.content[-1].text, made.stop_reason, made.stop_sequence) == ("Hello", "stop_sequence", " there")


@way
def test_the_tool_runner_runs_to_the_end(client, streamed):
    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=500, messages=ASK, tools=[add], stream=streamed)
    assert runner.until_done().content[-1].text == "The tool says: 3 and 3 make 6"


def test_a_structured_answer(client):
    made = client.messages.parse(
        model=MODEL, max_tokens=500, messages=[{"role": "user", "content": "The total of 5?"}], output_format=Sum
    )
    assert made.parsed_output == Sum(total=5)


def test_tokens_are_counted_as_the_answer_counts_them(client):
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, tools=[ADD]).input_tokens
    used = answer(client, False, messages=ASK, tools=[ADD]).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens
    assert counted > client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens


def test_the_asynchronous_client(address):
    async def main() -> str:
        client = anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0)
        async with client, client.messages.stream(model=MODEL, max_tokens=500, messages=HELLO) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(main()) == "Hello there, Alice."


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"tools": [ADD, ADD]}, anthropic.BadRequestError),
    ],
)
def test_errors_are_this_client_s(client, wrong, kind):
    with pytest.raises(kind) as error:
        answer(client, False, **{"messages": HELLO, **wrong})
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["message"]
