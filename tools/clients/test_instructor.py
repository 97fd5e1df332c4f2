"""instructor in each of its modes that OpenAI's clients have: whole, as a partial stream, and as a stream of several."""

import asyncio
from collections.abc import Iterable
from typing import Literal

import instructor
import openai
import pytest
from pydantic import BaseModel

MODEL = "deepseek-r1"
MESSAGES = [{"role": "user", "content": "'Jason' is 25 years old."}]
MODES = ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_O1", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS"]
MODES += ["RESPONSES_TOOLS_WITH_INBUILT_TOOLS"]


class Pet(BaseModel):
    """A part of a form."""

    kind: Literal["cat", "dog"]
    weight: float | None = None


class Person(BaseModel):
    """A form with the usual types."""

    name: str
    age: int
    pets: list[Pet]


JASON = Person(name="Jason", age=25, pets=[Pet(kind="cat", weight=25)])


def client(url: str, mode: str, **options):
    """Make instructor's client for a mode."""
    kind = openai.AsyncOpenAI if options.pop("asynchronous", False) else openai.OpenAI
    given = kind(base_url=url, api_key="none", max_retries=0)
    return instructor.from_openai(given, mode=instructor.Mode[mode], model=MODEL)


@pytest.mark.parametrize("mode", MODES)
def test_whole(url, mode):
    person, answer = client(url, mode).create_with_completion(messages=MESSAGES, response_model=Person, max_retries=0)
    assert person.model_dump() == JASON.model_dump()
    assert answer.usage.total_tokens > 0


@pytest.mark.parametrize("mode", MODES)
def test_whole_by_the_asynchronous_client(url, mode):
    made = client(url, mode, asynchronous=True).create(messages=MESSAGES, response_model=Person, max_retries=0)
    assert asyncio.run(made).model_dump() == JASON.model_dump()


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_stream_grows_to_the_whole(url, mode):
    parts = list(client(url, mode).create_partial(messages=MESSAGES, response_model=Person, max_retries=0))
    assert len(parts) > 2
    assert parts[-1].model_dump() == JASON.model_dump()


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_of_several(url, mode):
    people = client(url, mode).create_iterable(messages=MESSAGES, response_model=Person, max_retries=0)
    assert [person.model_dump() for person in people] == [JASON.model_dump()]


def test_parallel_tools(url):
    class Weather(BaseModel):
        """A call."""

        place: str

    messages = [{"role": "user", "content": "Weather in 'Ulm'"}]
    calls = client(url, "PARALLEL_TOOLS").create(messages=messages, response_model=Iterable[Weather | Person])
    assert list(calls) == [Weather(place="Ulm")]


def test_deepseek_s_own_client(url):
    given = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    made = instructor.from_deepseek(given, model=MODEL)
    assert made.create(messages=MESSAGES, response_model=Person, max_retries=0).model_dump() == JASON.model_dump()
