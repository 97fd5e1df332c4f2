"""Drawn mixes of requests: a seed draws the same again, and what one request gets otherwise is found and said."""

import contextlib
import dataclasses
import random

from layouts import MODELS
from mixes import Batch, Engine, Given, Request, Sizes, differences, draw_batch, draw_engine, reads_an_answer

from sharding import MeshError
from tools.check_mixes import count_requests, tell

HEADS = [list(range(2, 49)), list(range(40, 87))]
ENGINE = Engine("v3", "dp=2", {"page_size": 4}, (), decode=(8,), chunk=16, rows=2, mixed=True)


def draw(seed: int, count: int = 200):
    rng, drawn = random.Random(seed), []
    while len(drawn) < count:
        with contextlib.suppress(MeshError):  # its axes do not go together
            engine = draw_engine(rng)
            drawn.append((engine, draw_batch(rng, engine, HEADS, 2)))
    return drawn


def test_a_seed_draws_the_same_mixes_again_and_another_seed_others():
    assert draw(1, 5) == draw(1, 5)
    assert draw(1, 5) != draw(2, 5)


def test_what_may_change_nothing_is_drawn():
    drawn = draw(3)
    engines, batches = zip(*drawn, strict=True)
    assert {engine.model for engine in engines} == set(MODELS)
    options = {name for engine in engines for name in engine.options}
    assert options >= {"speculative_config", "enable_dbo", "dispatch", "host_cache_bytes", "kv_cache_dtype"}
    assert any("+" in engine.layout for engine in engines)
    assert any("pp=" in engine.layout and "enable_eplb" in engine.options for engine in engines)
    requests = [request for batch in batches for request in batch.requests]
    drawn_of_each = [{request.rank for request in requests}, {request.aborted is None for request in requests}]
    assert drawn_of_each == [{None, 0, 1}, {True, False}]
    assert {batch.sizes.pages is None for batch in batches} == {True, False}
    for engine, batch in drawn:
        assert batch.sizes.chunk <= engine.chunk
        longest = max(len(request.prompt) + request.params["max_tokens"] for request in batch.requests)
        assert batch.sizes.pages is None or batch.sizes.pages * engine.page_size >= longest


def test_a_request_that_got_another_bit_is_found_and_said(capsys):
    right = Given((7, 8), (-1.5, -2.5), (), 0)
    other = dataclasses.replace(right, logprobs=(-1.5, -2.5000002))
    batch = Batch(tuple(Request((5,), {"max_tokens": 2}) for _ in range(3)), Sizes(), flush=False)
    wrong = differences(batch, [right, other, None], lambda request: right)
    assert wrong == [(1, other, right)]
    tell(9, 4, 2, 8, ENGINE, batch, wrong)
    said = capsys.readouterr().out
    assert "batch 2 of python tools/check_mixes.py --seed 9 --slice 5/5 --engines 1 --batches 8" in said
    assert "request 1: logprobs differ at [1]; at 1 -2.5000002 instead of -2.5" in said
    counts = {"requests": 3, "aborted": 1, "tokens": 4, "preemptions": 0, "cached": 0}
    assert count_requests([right, other, None]) == counts


def test_a_request_may_read_an_answer_where_another_is_alike_beyond_the_end_of_its_prompt():
    request, given = Request((5, 6, 7), {}), Given((8, 9), (), (), 0)
    for prompt, tokens, reads in (
        ((5, 6), (7,), True),
        ((5, 6, 7, 8), (1,), True),
        ((5, 6, 7), (8, 9), False),
        ((5,), (1,), False),
        ((5, 6, 1), (), False),
    ):
        assert reads_an_answer(request, given, [(Request(prompt, {}), Given(tokens, (), (), 0))]) is reads
