"""What a front end tells the engine's process of a request, and hears of it, is what one process knows."""

import asyncio
import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
from fake_executor import FakeExecutor
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.contract.executor import ErrorKind, RowResult
from dsjax.engine.contract.sampling_params import OutputKind, SamplingError, SamplingParams
from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.text.input_processor import PreparedRequest
from dsjax.engine.text.output_processor import error_kind
from dsjax.serve.errors import ApiError
from dsjax.serve.front_ends.front_end import RemoteEngine
from dsjax.serve.front_ends.messages import AddResponse, FromEngine, NewRequest, StepUpdates, Welcome
from dsjax.serve.front_ends.shared_engine import _Owner
from dsjax.serve.options import ServeOptions


def request(params: SamplingParams, max_tokens: int) -> Request:
    return Request("a", [5, 6], 2, params, max_tokens, 1)


def sent_over(message, kind):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def arrived(params: SamplingParams, *requests: Request) -> NewRequest:
    """A new request as the engine's process reads it."""
    return sent_over(NewRequest.from_prepared(PreparedRequest("a", None, [5, 6], params, [*requests]), 1), NewRequest)


def test_the_parameters_of_a_request_arrive_whether_somebody_gave_max_tokens_and_without_stop_strings():
    for params in (SamplingParams(max_tokens=None), SamplingParams(max_tokens=9), SamplingParams()):
        got = arrived(params, request(params, 30))
        assert got.params == params
        assert got.to_requests([None])[0].max_tokens == 30
    form = StructuredOutputs(choice=["a", "b"], structured_after=3)
    others = {"allowed_token_ids": [1, 2], "bad_words": ["c"], "logit_bias": {7: -1}, "output_kind": OutputKind.DELTA}
    params = SamplingParams(n=2, seed=4, stop=["\ud800"], temperature=0, structured_outputs=form, **others)
    assert arrived(params, request(params, 9), request(params, 9)).params == dataclasses.replace(params, stop=())


def test_a_request_that_the_new_mesh_cannot_hold_ends_with_the_same_code_behind_a_front_end():
    params = SamplingParams(max_tokens=9)
    refused = RowResult(error="the cache holds 4 tokens", kind=ErrorKind.NO_ROOM)
    entry = _Owner(SimpleNamespace(), 7).to_entry(Update(request(params, 9), refused, FinishReason.ERROR))
    ((_, result, _, _),) = sent_over(StepUpdates([entry]), FromEngine).updates
    assert error_kind(params, result) is ErrorKind.NO_ROOM


def test_an_update_arrives_as_it_was_with_its_progress_until_the_first_token_and_at_the_end():
    entries, owner, one = [], _Owner(SimpleNamespace(), 7), request(SamplingParams(), 9)
    scored = RowResult([8], scores=[(8, -0.5, 1, [(8, -0.5)])], num_drafts=1, drafts=[3])
    for result, reason in ((RowResult(), None), (scored, None), (RowResult([9]), None), (None, FinishReason.ABORT)):
        one.rank, one.num_preemptions, one.num_cached_tokens = 2, len(entries), 1
        entries.append(owner.to_entry(Update(one, result, reason)))
    told = sent_over(StepUpdates(entries), FromEngine).updates
    assert msgspec.msgpack.encode(told) == msgspec.msgpack.encode(entries)
    assert told[1][1].scores == scored.scores
    assert [progress and progress.num_preemptions for *_, progress in told] == [0, 1, None, 3]
    theirs = request(SamplingParams(), 9)
    told[-1][3].copy_to(theirs)
    assert (theirs.rank, theirs.num_preemptions, theirs.num_cached_tokens) == (2, 3, 1)


LIMITS = FakeExecutor().limits
WELCOME = Welcome(
    options=ServeOptions(), scheduler=SchedulerConfig.from_limits(LIMITS, max_num_batched_tokens=16), tokenizer=None, eos_token_ids=[0],
    vocab_size=LIMITS.vocab_size, seed=0, stream_interval=1, model_names=["tiny"], model_root="tiny", max_model_len=64, num_ranks=1,
    orders_by_priority=False, created=0, log_level="error", log_json=False, engine_address="",
)  # fmt: skip


@pytest.mark.parametrize(("refusal", "error"), [
    ({}, None),
    ({"refusal": "no such form", "param": "structured_outputs.regex"}, SamplingError),
    ({"refusal": "it failed", "failed": True}, RuntimeError),
    ({"refusal": "one waits"}, ApiError),
])  # fmt: skip
def test_a_front_end_leaves_a_grammar_to_the_engine_s_process_and_waits_for_what_that_says(refusal, error):
    engine, sent = RemoteEngine(WELCOME, tiny_tokenizer()), []

    async def ask(question):
        sent.append(question(1))
        return AddResponse(1, **refusal)

    engine.channel = SimpleNamespace(send=sent.append, ask=ask)
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="("))  # which does not compile
    with nullcontext() if error is None else pytest.raises(error, match=refusal["refusal"]):
        asyncio.run(engine.submit("a", [[1, 2], [3]], params))
    assert engine.num_unfinished == (2 if error is None else 0)
    [add] = sent  # nothing is aborted that was refused
    assert (add.number, [one.token_ids for one in add.requests]) == (1, [[1, 2], [3]])
