"""Events whose text alone changes are, byte for byte, those of whole chunks."""

from types import SimpleNamespace

import pytest

from dsjax.engine.schedule.request import FinishReason
from dsjax.engine.text.outputs import CompletionOutput, Logprob, RequestOutput
from dsjax.serve.answers import TextEvent
from dsjax.serve.chat import ChatAnswer
from dsjax.serve.chat_fields import ChatRequest
from dsjax.serve.connections import encode_event
from dsjax.serve.message_parser import Section

TEXTS = ("so ", '"quoted" \\ ', "\n", "日本 </think>", "and ", "", "a\u2028b", "end")


def answer(options: dict) -> ChatAnswer:
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "stream": True, **options})
    engine = SimpleNamespace(tokenizer=None)
    reasoning = SimpleNamespace(close_token_id=None)
    serving = SimpleNamespace(engine=engine, check_model=lambda _: 'a "name"', reasoning=reasoning, tool_format=None)
    made = ChatAnswer(serving, body, "id")
    made._section = Section.REASONING
    made.first_chunks()
    return made


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}, {"service_tier": "auto"}])
def test_events_of_a_chat_s_text_are_those_of_its_chunks(options):
    as_events, as_chunks = answer(options), answer(options)
    as_events._common_fields["created"] = as_chunks._common_fields["created"]
    made = 0
    for text in TEXTS:
        output = RequestOutput("r", None, [1], [CompletionOutput(0, text, [7])], False)
        events = as_events.chunks_of(0, output)
        chunks = as_chunks.chunks_of(0, output, as_events=False)
        made += sum(isinstance(event, bytes) for event in events)
        assert [e if isinstance(e, bytes) else encode_event(e) for e in events] == [
            encode_event(chunk) for chunk in chunks
        ]
    assert made >= 4, "reasoning and content"


@pytest.mark.parametrize("finish_reason", [None, FinishReason.STOP])
def test_reasoning_and_content_come_in_chunks_of_their_own_each_with_its_tokens(finish_reason):
    made = answer({"logprobs": True, "return_token_ids": True})
    made._tokenizer = SimpleNamespace(token_bytes=lambda token: bytes([token]))
    made._parsers[0]._reasoning._close = 8
    scores = [{token: Logprob(-token, 1, str(token))} for token in (7, 8, 9)]
    completion = CompletionOutput(0, "so </think>then", [7, 8, 9], logprobs=scores, finish_reason=finish_reason)
    choices = [chunk["choices"][0] for chunk in made.chunks_of(0, RequestOutput("r", None, [1], [completion], False))]
    assert [sorted(choice["delta"]) for choice in choices] == [["reasoning", "reasoning_content"], ["content"]]
    assert [choice["token_ids"] for choice in choices] == [[7, 8], [9]]
    assert [[one["logprob"] for one in choice["logprobs"]["content"]] for choice in choices] == [[-7, -8], [-9]]
    assert [choice["finish_reason"] for choice in choices] == [None, finish_reason]


def test_a_text_s_place_is_found_beside_strings_that_look_like_it():
    chunk = {"model": '"text":""', "text": "", "other": '\\"text":""'}
    assert TextEvent(chunk, "text").with_text('"') == encode_event({**chunk, "text": '"'})
