"""Greedy requests, and an engine's core over a fake executor that computes them."""

from fake_executor import FakeExecutor, expected_tokens

from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.engine import attachments_of
from dsjax.engine.schedule.request import Request, RequestOptions


def greedy(name, tokens, max_tokens=6, **options) -> Request:
    """options: fields of `RequestOptions`."""
    tokens, params = list(tokens), SamplingParams(temperature=0)
    return Request(str(name), tokens, len(tokens), params, max_tokens, 0, options=RequestOptions(**options))


def check_tokens(*requests: Request) -> None:
    """Each has got all that the fake model says to its prompt."""
    for request in requests:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, request.max_tokens)


def small_core(sinks=(), **sizes) -> EngineCore:
    """An engine with 16 pages a rank."""
    executor = FakeExecutor(pages_per_rank=17, max_rows_decode=4, **sizes)
    return EngineCore(executor, executor.config, attachments=attachments_of(executor.config, sinks=sinks))
