"""What a front end tells the engine's process of a request, and hears of it, is what one process knows."""

from types import SimpleNamespace

import msgspec

from dsjax.engine.contract.executor import ErrorKind, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.text.input_processor import PreparedRequest
from dsjax.engine.text.output_processor import error_kind
from dsjax.serve.front_ends.front_end import _result
from dsjax.serve.front_ends.messages import FromEngine, NewRequest, StepUpdates
from dsjax.serve.front_ends.shared_engine import _Owner


def request(params: SamplingParams, max_tokens: int) -> Request:
    return Request("a", [5, 6], 2, params, max_tokens, 1)


def test_that_nobody_gave_max_tokens_is_told_so_that_a_smaller_mesh_need_not_refuse_the_request():
    for params in (SamplingParams(max_tokens=None), SamplingParams(max_tokens=9), SamplingParams()):
        sent = NewRequest.of(PreparedRequest("a", None, [5, 6], params, [request(params, 30)]), 1)
        got = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=NewRequest)
        assert got.sampling_params() == params
        assert got.requests(params, [None])[0].max_tokens == 30


def test_a_request_that_the_new_mesh_cannot_hold_ends_with_the_same_code_behind_a_front_end():
    params = SamplingParams(max_tokens=9)
    refused = RowResult(error="the cache holds 4 tokens", kind=ErrorKind.NO_ROOM)
    entry = _Owner(SimpleNamespace(), 7).entry(Update(request(params, 9), refused, FinishReason.ERROR))
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(StepUpdates([entry])), type=FromEngine)
    _, token_ids, _, more = told.updates[0]
    assert error_kind(params, _result(token_ids, more)) is ErrorKind.NO_ROOM
