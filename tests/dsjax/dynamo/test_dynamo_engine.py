"""The workers as Dynamo calls them, without its runtime, over fake devices: what is cancelled, and what comes while a worker ends."""

import asyncio
import dataclasses
import functools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from engine_pair import prefill_request
from fake_executor import FakeExecutor
from with_dynamo import WITH_DYNAMO

from dsjax.engine.engine_thread import AsyncEngine
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.transfer.messages import ChunkReady, ReleaseChunk
from dsjax.errors import UserError

pytestmark = [pytest.mark.dynamo, WITH_DYNAMO]

PROMPT = {"token_ids": [1, 2, 3]}


def options(mode):
    from dsjax.dynamo.worker import Options

    return Options(EngineArgs(disaggregation_mode=mode), ("tiny",), "tiny", step_timeout=0.0, shutdown_timeout=0.0)


def engines() -> dict[str, type]:
    from dsjax.dynamo.engine import DsjaxEngine
    from dsjax.dynamo.prefill import DsjaxPrefillEngine

    return {"decode": DsjaxEngine, "prefill": DsjaxPrefillEngine}


def decode_worker(mode="decode"):
    """A worker whose engine has a thread that is not started: nothing makes a token."""
    worker = engines()["decode"](options(mode))
    worker._engine = AsyncEngine(FakeExecutor().parts())
    return worker


def prefill_worker():
    """A prefill worker that has begun, whose engine has a thread that is not started, and what Dynamo is told of its ranks' pages."""
    executor, worker, used = FakeExecutor(transfers=True), engines()["prefill"](options("prefill")), {}
    engine = PrefillEngine(executor, executor.config, timeout=1000.0)
    worker._server = SimpleNamespace(engine=engine, address="127.0.0.1:1", shutdown=engine.shutdown)
    worker._begin()
    publish = lambda rank, snapshot: used.update({rank: snapshot.kv_used_blocks})  # noqa: E731
    worker.attach_snapshot_publisher(SimpleNamespace(publish=publish))
    return worker, engine, used


def turns(engine):
    for _ in range(20):
        engine.core.executor.move_chunks()
        engine.turn(wait=False)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def in_loop(test):
    """A test that is a coroutine."""

    @functools.wraps(test)
    def ran(**fixtures):
        run(test(**fixtures))

    return ran


def context_of(request_id: str):
    from dynamo._core import Context

    return Context(request_id)


def asking(worker, context, **more):
    """The answer to a prompt."""
    return worker.generate(PROMPT | more, context)


async def begun(worker, requests: int) -> None:
    while worker._engine.num_unfinished != requests:
        await asyncio.sleep(0.001)


def assert_whole(chunks: list[dict], tokens: int) -> None:
    assert sum(len(chunk["token_ids"]) for chunk in chunks) == tokens
    assert chunks[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@in_loop
async def test_a_request_that_comes_while_a_worker_ends_goes_to_another_one(kind, monkeypatch):
    from dynamo.llm.exceptions import EngineShutdown

    worker = engines()[kind](options(kind))
    monkeypatch.setattr(worker, "_end_process", lambda: pytest.fail("a worker that ends has not failed"))
    await worker.cleanup()
    with pytest.raises(EngineShutdown, match="this worker ends"):  # the frontend goes on with another
        await anext(asking(worker, context_of("late")))


@in_loop
async def test_a_request_of_a_decode_worker_is_aborted_before_its_first_token():
    """Dynamo itself calls `abort` of a decode worker only when it has seen a token."""
    worker, context = decode_worker(), context_of("left")
    answer = asking(worker, context)
    first = asyncio.ensure_future(anext(answer))
    await begun(worker, 1)
    context.stop_generating()
    chunk = await first
    assert (chunk["token_ids"], chunk["finish_reason"]) == ([], "cancelled")
    assert worker._engine.num_unfinished == 0
    with pytest.raises(StopAsyncIteration):
        await anext(answer)
    assert not worker._streams


@in_loop
async def test_a_request_that_comes_back_after_a_migration_is_not_aborted_with_the_one_before():
    """Both have one id; Dynamo sees the connection of the first one end when the second has begun."""
    worker, contexts = decode_worker("agg"), [context_of("moved"), context_of("moved")]
    answers = [asking(worker, context, stop_conditions={"max_tokens": 3}) for context in contexts]
    before, again = (asyncio.ensure_future(anext(answer)) for answer in answers)
    await begun(worker, 2)
    contexts[0].stop_generating()
    await worker.abort(contexts[0])
    assert (await before)["finish_reason"] == "cancelled"
    await worker.abort(contexts[0])
    assert worker._engine.num_unfinished == 1
    worker._engine.start()
    assert_whole([await again, *[chunk async for chunk in answers[1]]], 3)
    await worker._engine.shutdown()


@in_loop
async def test_a_decode_worker_waits_no_longer_for_the_end_of_a_request_that_has_ended():
    worker, stopped = decode_worker(), asyncio.get_running_loop().create_future()
    worker._engine.start()
    context = SimpleNamespace(id=lambda: "whole", is_stopped=lambda: False, async_killed_or_stopped=lambda: stopped)
    assert_whole([chunk async for chunk in asking(worker, context, stop_conditions={"max_tokens": 3})], 3)
    assert stopped.cancelled()
    await worker._engine.shutdown()


@in_loop
async def test_a_worker_ends_only_when_dynamo_has_taken_the_last_of_every_answer():
    """The engine has finished the request by then, and its chunks wait to be read."""
    worker = decode_worker("agg")
    worker._options = dataclasses.replace(worker._options, shutdown_timeout=30.0)
    worker._loads = SimpleNamespace(stop=lambda: None)
    worker._engine.start()
    answer = asking(worker, context_of("slow reader"), stop_conditions={"max_tokens": 30})
    chunks = [await anext(answer)]
    await begun(worker, 0)
    assert not await worker.is_quiescent()
    ends = asyncio.ensure_future(worker.cleanup())
    await asyncio.sleep(0.2)
    assert not ends.done()
    assert_whole([*chunks, *[chunk async for chunk in answer]], 30)
    await ends
    assert await worker.is_quiescent()


def test_the_router_hears_that_a_prefill_worker_has_sent_the_pages_that_found_no_room_at_first():
    _, engine, used = prefill_worker()
    engine.buffers._room = [2]
    heard = []
    engine.post(prefill_request("a", range(49)), heard.append)
    turns(engine)
    assert used == {0: 8}, "of 12 pages"
    steps = engine.core.executor.steps
    for _ in range(2):
        for message in heard:
            if isinstance(message, ChunkReady):
                engine.post(ReleaseChunk(message.number), heard.append)
        turns(engine)
    assert engine.num_jobs == 0
    assert engine.core.executor.steps == steps, "nothing more was computed"
    assert used == {0: 0}


@in_loop
async def test_a_prefill_worker_hands_on_what_the_frontend_says_of_a_prompt():
    worker, _, _ = prefill_worker()
    worker._server.prefill = prefill = Mock(return_value={"address": "here"})
    routing = {"dp_rank": 1, "cache_salt": "mine", "priority": 3}
    both = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}
    [chunk] = [chunk async for chunk in asking(worker, context_of("a"), routing=routing, bootstrap_info=both)]
    assert (chunk["finish_reason"], chunk["disaggregated_params"]) == ("length", {"address": "here"})
    prefill.assert_called_once_with([1, 2, 3], salt="mine", priority=-3, room=7, dp_rank=1)


def test_ranks_that_a_smaller_mesh_has_not_are_told_as_full_and_hold_nothing():
    from dsjax.dynamo.worker import LoadReports

    told, reports = [], LoadReports(3)

    def report(*used) -> None:
        same = {"usable_pages": 8, "queried": 0, "hits": {}}
        reports.publish([SimpleNamespace(rank=rank, used_pages=pages, **same) for rank, pages in enumerate(used)])

    publish = lambda rank, seen: told.append((rank, seen.kv_used_blocks, seen.kv_total_blocks))  # noqa: E731
    reports.publisher = SimpleNamespace(publish=publish)
    report(2, 2, 2)
    told.clear()
    report(0)
    report(0)
    assert told == [(1, 8, 8), (2, 8, 8), (0, 0, 8)]
    assert not reports.holds_pages
    report(0, 1, 1)
    assert told[3:] == [(1, 1, 8), (2, 1, 8)]


def test_a_command_line_makes_the_engine_of_its_mode_and_asking_for_help_none():
    decode, prefill = engines().values()
    agg = ["--model", "demo"]
    for kind in (decode, prefill):
        engine, worker = run(kind.from_args([*agg, "--disaggregation-mode", "prefill"]))
        assert (type(engine), worker.component) == (prefill, "prefill")
        with pytest.raises(SystemExit) as ended:
            run(kind.from_args(["--help"]))
        assert ended.value.code == 0
    assert type(run(decode.from_args(agg))[0]) is decode
    with pytest.raises(UserError, match="--disaggregation-mode is agg, expected prefill"):
        run(prefill.from_args(agg))
