"""The workers as Dynamo calls them, without its runtime, over fake devices: what is cancelled, and what comes while a worker ends."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from engine_pair import prefill_request
from fake_executor import FakeExecutor
from with_dynamo import WITH_DYNAMO

from dsjax.engine.engine_thread import AsyncEngine
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.transfer.messages import ChunkReady, ReleaseChunk
from dsjax.errors import UserError

pytestmark = [
    pytest.mark.dynamo,
    WITH_DYNAMO,
]

PROMPT = {"token_ids": [1, 2, 3]}


def options(mode):
    from dsjax.dynamo.worker import Options

    return Options(EngineArgs(disaggregation_mode=mode), ("tiny",), "tiny", step_timeout=0.0, shutdown_timeout=0.0)


def decode_worker(mode="decode"):
    """A worker whose engine has a thread that is not started: nothing makes a token."""
    from dsjax.dynamo.engine import DsjaxEngine

    worker = DsjaxEngine(options(mode))
    worker._engine = AsyncEngine(FakeExecutor().parts())
    return worker


def prefill_worker():
    """A prefill worker that has begun, whose engine has a thread that is not started, and what Dynamo is told of its ranks' pages."""
    from dsjax.dynamo.prefill import DsjaxPrefillEngine

    executor, worker = FakeExecutor(transfers=True), DsjaxPrefillEngine(options("prefill"))
    engine, used = PrefillEngine(executor, executor.config, timeout=1000.0), {}
    worker._server = SimpleNamespace(engine=engine, address="127.0.0.1:1", shutdown=engine.shutdown)
    worker._begin()
    worker.attach_snapshot_publisher(
        SimpleNamespace(publish=lambda rank, snapshot: used.update({rank: snapshot.kv_used_blocks}))
    )
    return worker, engine, used


def turns(engine):
    for _ in range(20):
        engine.core.executor.move_chunks()
        engine.turn(wait=False)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_request_that_comes_while_a_worker_ends_goes_to_another_one(kind, monkeypatch):
    from dynamo._core import Context
    from dynamo.llm.exceptions import EngineShutdown

    from dsjax.dynamo.engine import DsjaxEngine
    from dsjax.dynamo.prefill import DsjaxPrefillEngine

    async def main():
        worker = DsjaxEngine(options(kind)) if kind == "decode" else DsjaxPrefillEngine(options(kind))
        monkeypatch.setattr(worker, "_end_process", lambda: pytest.fail("a worker that ends has not failed"))
        await worker.cleanup()
        with pytest.raises(EngineShutdown, match="this worker ends"):  # the frontend goes on with another
            await anext(worker.generate(PROMPT, Context("late")))

    run(main())


def test_a_request_of_a_decode_worker_is_aborted_before_its_first_token():
    """Dynamo itself calls `abort` of a decode worker only when it has seen a token."""
    from dynamo._core import Context

    async def main():
        worker, context = decode_worker(), Context("left")
        answer = worker.generate(PROMPT, context)
        first = asyncio.ensure_future(anext(answer))
        while not worker._engine.num_unfinished:
            await asyncio.sleep(0.001)
        context.stop_generating()
        chunk = await first
        assert (chunk["token_ids"], chunk["finish_reason"]) == ([], "cancelled")
        assert worker._engine.num_unfinished == 0
        with pytest.raises(StopAsyncIteration):
            await anext(answer)
        assert not worker._streams

    run(main())


def test_a_request_that_comes_back_after_a_migration_is_not_aborted_with_the_one_before():
    """Both have one id; Dynamo sees the connection of the first one end when the second has begun."""
    from dynamo._core import Context

    async def main():
        worker, contexts = decode_worker("agg"), [Context("moved"), Context("moved")]
        answers = [worker.generate(PROMPT | {"stop_conditions": {"max_tokens": 3}}, context) for context in contexts]
        before, again = (asyncio.ensure_future(anext(answer)) for answer in answers)
        while worker._engine.num_unfinished < 2:
            await asyncio.sleep(0.001)
        contexts[0].stop_generating()
        await worker.abort(contexts[0])
        assert (await before)["finish_reason"] == "cancelled"
        await worker.abort(contexts[0])
        assert worker._engine.num_unfinished == 1
        worker._engine.start()
        chunks = [await again, *[chunk async for chunk in answers[1]]]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == 3
        assert chunks[-1]["finish_reason"] == "length"
        await worker._engine.shutdown()

    run(main())


def test_a_decode_worker_waits_no_longer_for_the_end_of_a_request_that_has_ended():
    async def main():
        worker, stopped = decode_worker(), asyncio.get_running_loop().create_future()
        worker._engine.start()
        context = SimpleNamespace(id=lambda: "whole", is_stopped=lambda: False, async_killed_or_stopped=lambda: stopped)
        chunks = [chunk async for chunk in worker.generate(PROMPT | {"stop_conditions": {"max_tokens": 3}}, context)]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == 3
        assert chunks[-1]["finish_reason"] == "length"
        assert stopped.cancelled()
        await worker._engine.shutdown()

    run(main())


def test_a_worker_ends_only_when_dynamo_has_taken_the_last_of_every_answer():
    """The engine has finished the request by then, and its chunks wait to be read."""
    from dynamo._core import Context

    async def main():
        worker = decode_worker("agg")
        worker._options = dataclasses.replace(worker._options, shutdown_timeout=30.0)
        worker._loads = SimpleNamespace(stop=lambda: None)
        engine = worker._engine
        engine.start()
        answer = worker.generate(PROMPT | {"stop_conditions": {"max_tokens": 30}}, Context("slow reader"))
        chunks = [await anext(answer)]
        while engine.num_unfinished:
            await asyncio.sleep(0.001)
        assert not await worker.is_quiescent()
        ends = asyncio.ensure_future(worker.cleanup())
        await asyncio.sleep(0.2)
        assert not ends.done()
        chunks += [chunk async for chunk in answer]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == 30
        await ends
        assert await worker.is_quiescent()

    run(main())


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


def test_a_prefill_worker_hands_on_what_the_frontend_says_of_a_prompt():
    from dynamo._core import Context

    worker, _, _ = prefill_worker()
    handed = []
    worker._server.prefill = lambda token_ids, **given: handed.append((token_ids, given)) or {"address": "here"}
    routing = {"dp_rank": 1, "cache_salt": "mine", "priority": 3}
    both = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}

    async def main():
        request = PROMPT | {"routing": routing, "bootstrap_info": both}
        return [chunk async for chunk in worker.generate(request, Context("a"))]

    [chunk] = run(main())
    assert (chunk["finish_reason"], chunk["disaggregated_params"]) == ("length", {"address": "here"})
    assert handed == [([1, 2, 3], {"salt": "mine", "priority": -3, "room": 7, "dp_rank": 1})]


def test_ranks_that_a_smaller_mesh_has_not_are_told_as_full_and_hold_nothing():
    from dsjax.dynamo.worker import LoadReports

    def loads(*used):
        return [
            SimpleNamespace(rank=rank, used_pages=pages, usable_pages=8, queried=0, hits={})
            for rank, pages in enumerate(used)
        ]

    told, reports = [], LoadReports(3)
    publish = lambda rank, seen: told.append((rank, seen.kv_used_blocks, seen.kv_total_blocks))  # noqa: E731
    reports.publisher = SimpleNamespace(publish=publish)
    reports.publish(loads(2, 2, 2))
    told.clear()
    for _ in range(2):
        reports.publish(loads(0))
    assert told == [(1, 8, 8), (2, 8, 8), (0, 0, 8)]
    assert not reports.holds_pages
    reports.publish(loads(0, 1, 1))
    assert told[3:] == [(1, 1, 8), (2, 1, 8)]


def test_a_command_line_makes_the_engine_of_its_mode_and_asking_for_help_none():
    from dsjax.dynamo.engine import DsjaxEngine
    from dsjax.dynamo.prefill import DsjaxPrefillEngine

    prefill = ["--model", "demo", "--disaggregation-mode", "prefill"]
    for kind in (DsjaxEngine, DsjaxPrefillEngine):
        engine, worker = run(kind.from_args(prefill))
        assert (type(engine), worker.component) == (DsjaxPrefillEngine, "prefill")
    assert type(run(DsjaxEngine.from_args(["--model", "demo"]))[0]) is DsjaxEngine
    with pytest.raises(UserError, match="--disaggregation-mode is agg, expected prefill"):
        run(DsjaxPrefillEngine.from_args(["--model", "demo"]))
    from dsjax.dynamo.engine import DsjaxEngine
    from dsjax.dynamo.prefill import DsjaxPrefillEngine

    for kind in (DsjaxEngine, DsjaxPrefillEngine):
        with pytest.raises(SystemExit) as ended:
            run(kind.from_args(["--help"]))
        assert ended.value.code == 0
