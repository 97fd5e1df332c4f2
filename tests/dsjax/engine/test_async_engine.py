"""The engine's thread: outputs, disconnects and the engine's death. Also tests `engine_thread.py` and `request_streams.py`."""

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fake_executor import FakeExecutor, expected_tokens

from dsjax.engine.contract.commands import Step
from dsjax.engine.contract.executor import RowResult
from dsjax.engine.contract.sampling_params import OutputKind, SamplingParams
from dsjax.engine.engine_thread import AsyncEngine, EngineThread
from dsjax.engine.request_streams import OutputStream
from dsjax.engine.schedule.mesh_changer import MeshEpoch
from dsjax.engine.schedule.request import DEFAULT_OPTIONS, FinishReason
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.schedule.scheduler_config import AdmissionError
from dsjax.engine.text.input_processor import InputProcessor, PromptError
from dsjax.engine.text.outputs import CompletionOutput, EngineClosingError, EngineDeadError, RequestOutput
from dsjax.errors import UserError

FINAL = SamplingParams(temperature=0, max_tokens=12, output_kind=OutputKind.FINAL_ONLY)
LONG = SamplingParams(max_tokens=100, ignore_eos=True, output_kind=OutputKind.DELTA)


def unchanging() -> SimpleNamespace:
    """Stands for a `MeshChanger` whose processes all live."""
    return SimpleNamespace(patience=600, needs_change=False, phase=None, watch=lambda wake: None, end_change=int)


async def collect(engine: AsyncEngine, request_id: str, prompts, params=FINAL) -> dict[int, list[int]]:
    stream = await engine.submit(request_id, prompts, params)
    return {index: output.outputs[0].token_ids async for index, output in stream}


async def until(condition) -> None:
    """As long as a test may take."""
    while not condition():
        await asyncio.sleep(0.01)


def pages_in_use(engine: AsyncEngine) -> int:
    return sum(rank.pool.num_used for rank in engine.core.scheduler.ranks)


def in_loop(*, start: bool = True, generations=None, **options):
    """Give a test an engine of a fake executor, in an event loop, and end the engine afterwards. start: its thread too."""

    def decorate(test):
        async def main():
            executor = FakeExecutor(**options)
            engine = AsyncEngine(executor.parts(mesh_changer=generations))
            if start:
                engine.start()
            await test(engine, executor)
            await engine.shutdown()

        def of_pytest():
            asyncio.run(asyncio.wait_for(main(), 120))

        of_pytest.__name__ = test.__name__
        return of_pytest

    return decorate


@in_loop(num_ranks=2)
async def test_many_streams_at_once_each_get_their_own_tokens(engine, executor):
    prompts = [[[i, i + 1], [i, 7, 7]] for i in range(30)]
    results = await asyncio.gather(*(collect(engine, str(i), prompt) for i, prompt in enumerate(prompts)))
    for prompt, result in zip(prompts, results, strict=True):
        assert result == {index: expected_tokens(each, 12) for index, each in enumerate(prompt)}
    assert engine.num_unfinished == 0
    await engine.shutdown()
    assert executor.closed


@in_loop(step_seconds=0.05)
async def test_closing_a_stream_frees_its_pages_within_two_steps(engine, executor):
    stream = await engine.submit("r", [[1, 2, 3]], LONG)
    await anext(stream)
    assert pages_in_use(engine) > 0
    stream.close()
    steps = executor.steps
    await until(lambda: pages_in_use(engine) == 0)
    assert executor.steps <= steps + 2
    assert engine.num_unfinished == 0


@in_loop()
async def test_seeds_are_drawn_in_the_order_of_arrival_whichever_prompt_is_prepared_first(engine, executor):
    """A long prompt is prepared in a thread, which here waits until the short one that came later has been prepared."""
    prepare, second = engine._inputs.prepare, threading.Event()

    def in_turn(request_id, *arguments):
        if request_id == "long":
            assert second.wait(60)
        prepared = prepare(request_id, *arguments)
        second.set()
        return prepared

    engine._inputs.prepare = in_turn
    long = asyncio.ensure_future(engine.submit("long", [[1] * 3000], FINAL))
    await asyncio.sleep(0)
    short = await engine.submit("short", [[1]], FINAL)
    expected = InputProcessor(None, engine._inputs.config, engine._inputs.vocab_size)
    with pytest.raises(AdmissionError):
        await long
    assert short.completions[0].seed == [expected.draw_seed() for _ in range(2)][1]


@in_loop()
async def test_a_prompt_is_rendered_and_prepared_in_one_worker_thread(engine, executor):
    threads, prepare = [], engine._inputs.prepare

    def watched(*arguments):
        threads.append(threading.current_thread())
        return prepare(*arguments)

    def render():
        threads.append(threading.current_thread())
        return [[1, 2]], FINAL

    engine._inputs.prepare = watched
    stream = await engine.submit_rendered("r", render, DEFAULT_OPTIONS, in_thread=True)
    assert [output.prompt_token_ids async for _, output in stream] == [[1, 2]]
    assert threads[0] is threads[1]
    assert threads[0] is not threading.main_thread()
    with pytest.raises(UserError, match="no prompt"):
        await engine.submit_rendered("no", Mock(side_effect=UserError("no prompt")), DEFAULT_OPTIONS, in_thread=False)
    assert engine.num_unfinished == 0


@in_loop()
async def test_when_the_thread_dies_every_stream_gets_an_error_and_the_owner_is_told(engine, executor):
    executor.fail_at_step, engine.on_death = 3, Mock()
    collecting = [collect(engine, str(i), [[i], [i, i]]) for i in range(5)]
    results = await asyncio.gather(*collecting, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * 5
    engine.on_death.assert_called_once_with()
    with pytest.raises(EngineDeadError):
        await engine.submit("late", [[1]], FINAL)


@in_loop(step_seconds=0.01)
async def test_whoever_finds_that_nothing_can_go_on_ends_it_for_all(engine, executor):
    deaths, reason = [], UserError("no front end comes up")
    engine.on_death = lambda: deaths.append(engine.error)
    stream = await engine.submit("r", [[1, 2, 3]], LONG)
    engine.fail(reason)
    with pytest.raises(EngineDeadError):
        [output async for output in stream]
    assert deaths == [reason]


@in_loop(step_seconds=0.05)
async def test_a_call_runs_in_the_engine_s_thread_between_steps_and_gives_its_result_or_its_error(engine, executor):
    await engine.call(lambda core: core.flush_prefix_cache())
    stream = await engine.submit("r", [[1, 2, 3]], LONG)
    await anext(stream)
    seen = await engine.call(lambda core: (threading.current_thread().name, executor.computing, core.loads()))
    assert seen[:2] == ("dsjax-engine", False)
    assert seen[2][0].running == 1
    with pytest.raises(ZeroDivisionError):
        await engine.call(lambda core: 1 // 0)
    assert engine.running, "an error in a call is its caller's"
    stream.close()
    await engine.shutdown()
    with pytest.raises(EngineClosingError):
        await engine.call(lambda core: None)


@in_loop(step_seconds=0.3)
async def test_a_call_that_waits_when_the_engine_dies_gets_an_error(engine, executor):
    executor.fail_at_step = 1
    stream = await engine.submit("r", [[1, 2, 3]], LONG)
    await anext(stream)
    await until(lambda: (executor.steps == 1 and executor.computing) or engine.error is not None)
    with pytest.raises(EngineDeadError):
        await engine.call(lambda core: None)
    with pytest.raises(EngineDeadError):
        await anext(stream)
    assert engine.steppers["the engine"].step_started is None


@in_loop(num_ranks=2)
async def test_observers_hear_of_every_step_and_of_every_output_that_was_delivered(engine, executor):
    steps, threads, updates, outputs = [], set(), [], []
    observer = Mock(on_updates=updates.extend, on_outputs=outputs.extend)
    observer.on_step = lambda stats: (steps.append(stats), threads.add(threading.current_thread()))
    engine.observers.append(observer)
    prompt = list(range(10))
    for name in ("first", "again"):
        assert (await collect(engine, name, [prompt]))[0] == expected_tokens(prompt, 12)
    await engine.shutdown()
    observer.on_ended.assert_not_called()  # both ended by themselves
    assert threads == {threading.main_thread()}
    assert len(steps) == executor.steps
    assert sum(update.result.finite for update in updates) == 24
    assert [(output.request_id, output.num_cached_tokens) for output in outputs] == [("first", 0), ("again", 8)]
    assert outputs[1].metrics.num_cached_tokens == 8
    # 10 prompt tokens in chunks of 8, then 2 that were not cached; each makes 12 tokens, the last of which is not computed.
    assert sum(stats.num_prompt_tokens for stats in steps) == 12
    assert sum(stats.num_decode_tokens for stats in steps) == 22
    ranks = steps[-1].ranks
    assert (sum(rank.queried for rank in ranks), sum(rank.hits["device"] for rank in ranks)) == (20, 8)
    for stats in steps:
        assert stats.host_seconds.keys() == {"plan", "launch", "device", "enter"}
        assert sum(stats.host_seconds.values()) == pytest.approx(stats.duration)
        assert [load.rank for load in stats.ranks] == [0, 1]
    assert ranks[0][:5] == (0, 0, 0, 0, 0), "nothing runs, waits, or holds a page"


@in_loop()
async def test_requests_that_come_during_the_first_step_after_a_rest_are_in_the_second(engine, executor):
    executor.keep_commands, compute, go_on = True, executor._run, threading.Event()
    executor._run = lambda command: go_on.wait(60) and compute(command)
    for request_id in ("first", "later"):
        executor.commands.clear()
        go_on.clear()
        streams = [await engine.submit(request_id, [[1, 2, 3]], FINAL)]
        await until(lambda: executor.computing)
        streams.append(await engine.submit(f"behind {request_id}", [[4, 5]], FINAL))
        go_on.set()
        for stream in streams:
            await anext(stream)
        planned = [command for command in executor.commands if isinstance(command, Step)]
        assert [len(step.ranks[0].prefills) for step in planned[:3]] == [1, 1, 0]
        await until(lambda: not engine.core.has_unfinished)


@in_loop(start=False)
async def test_what_waits_is_counted_before_the_thread_has_taken_it(engine, executor):
    engine._loop = asyncio.get_running_loop()  # the thread is not started
    await engine.submit("a", [[1, 2, 3], [4, 5]], SamplingParams(n=2, max_tokens=4))
    assert engine.waiting == (4, 10)


@in_loop(step_seconds=0.05)
async def test_an_id_that_is_aborted_and_used_again_during_one_step_is_a_new_request(engine, executor):
    stream = await engine.submit("r", [[1, 2, 3]], LONG)
    await anext(stream)
    await until(lambda: executor.computing)
    stream.close()
    assert await collect(engine, "r", [[7, 8]]) == {0: expected_tokens([7, 8], 12)}
    assert pages_in_use(engine) == 0


@in_loop(step_seconds=0.05)
async def test_shutdown_ends_what_runs_with_an_error_and_refuses_what_comes(engine, executor):
    running = asyncio.create_task(collect(engine, "r", [[1, 2]], LONG))
    await until(lambda: pages_in_use(engine) > 0)
    await engine.shutdown()
    with pytest.raises(EngineClosingError):
        await running
    with pytest.raises(EngineClosingError):
        await engine.submit("late", [[1]], FINAL)
    assert pages_in_use(engine) == 0


@in_loop(start=False)
async def test_an_update_behind_the_one_that_a_stop_string_ended_is_no_observer_s(engine, executor):
    engine._loop = asyncio.get_running_loop()  # the thread is not started
    engine.observers.append(observer := Mock())
    stream = await engine.submit("r", [[1, 2]], SamplingParams(max_tokens=9, stop=("a",)))
    (request,) = stream.completions
    token = engine.tokenizer.encode("a", add_special_tokens=False)
    updates = [Update(request, RowResult(token), None), Update(request, None, FinishReason.ABORT)]
    engine.deliver(updates, None)
    observer.on_updates.assert_called_once_with(updates[:1])


def output(request_id: str, text: str, *, last: bool = False) -> RequestOutput:
    return RequestOutput(request_id, None, [1], [CompletionOutput(0, text, [3])], last)


async def reader(stream: OutputStream, *at_once) -> asyncio.Task:
    """Somebody who waits for the stream's outputs."""
    reading = asyncio.create_task(stream.ready(*at_once))
    await asyncio.sleep(0)
    return reading


@in_loop(start=False)
async def test_a_reader_that_waits_takes_outputs_at_once_and_is_woken_for_what_it_refuses_and_for_the_last(
    engine, executor
):
    stream, seen, willing = OutputStream(["a", "b"], lambda ids: None), [], True
    texts = lambda outputs: [(index, each.outputs[0].text) for index, each in outputs]  # noqa: E731

    def at_once(outputs) -> bool:
        seen.extend([texts(outputs)] * willing)
        return willing

    reading = await reader(stream, at_once)
    stream.add(output("a", "1"))
    stream.add(output("b", "2"))
    assert seen == []
    stream.tell()
    stream.put(output("a", "3"))
    assert seen == [[(0, "1"), (1, "2")], [(0, "3")]]
    assert not reading.done()
    willing = False
    stream.put(output("b", "4"))
    willing = True
    stream.put(output("b", "5"))  # behind what has not been read yet
    assert texts(await reading) == [(1, "4"), (1, "5")]
    for index, request_id in enumerate("ab"):
        reading = await reader(stream, at_once)
        stream.put(output(request_id, "end", last=True))
        assert texts(await reading) == [(index, "end")]
    assert await stream.ready(at_once) == []
    assert len(seen) == 2


@in_loop(start=False)
async def test_what_a_reader_raises_while_it_takes_outputs_at_once_is_its_own_to_hear(engine, executor):
    stream = OutputStream(["a"], lambda ids: None)
    reading = await reader(stream, lambda outputs: [][1])
    stream.put(output("a", "1"))
    with pytest.raises(IndexError):
        await reading
    reading = await reader(stream)
    stream.fail(PromptError("over"))
    with pytest.raises(PromptError):
        await reading


@in_loop(generations=unchanging(), pages_per_rank=33, step_seconds=0.05)
async def test_streams_of_requests_that_wait_for_a_larger_mesh_stay_open_until_they_are_closed_or_the_server_ends(
    engine, executor
):
    smaller = FakeExecutor(pages_per_rank=5)
    given_up, kept = [await engine.submit(name, [[1, 2, 3]], LONG) for name in ("given up", "kept")]
    await anext(given_up)
    await anext(kept)
    new = MeshEpoch(smaller, smaller.config, is_reduced=True)
    await engine.call(lambda core: engine._thread.change(lambda: new))
    parked = engine.core.parked
    await until(lambda: len(parked) == 2)
    assert await collect(engine, "short", [[5]], FINAL) == {0: expected_tokens([5], 12)}, "nobody waits behind them"
    assert engine.num_unfinished == 2
    given_up.close()
    await until(lambda: len(parked) == 1)
    engine.wait_for_no_mesh()
    async for _, output in kept:
        last = output.outputs[0]
    assert (last.finish_reason, last.error) == ("error", "no_room_on_the_new_mesh")
    assert engine.num_unfinished == len(parked) == 0
    assert parked.outcomes == Counter(aborted=1, expired=1)


@in_loop(generations=unchanging())
async def test_a_change_of_the_mesh_that_nobody_waits_for_any_more_while_it_is_checked_keeps_nobody_else_out(
    engine, executor
):
    checked, go_on = threading.Event(), threading.Event()
    made = Mock(return_value=MeshEpoch(executor, executor.config))

    def ask(mesh, *experts):
        checked.set()
        assert go_on.wait(60)
        return mesh

    engine.core.mesh_changer.begin_change, engine.core.mesh_changer.change_to = ask, made
    task = asyncio.ensure_future(engine.scale("dp=1"))
    await until(checked.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await until(lambda: made.called)
    made.assert_called_once_with("dp=1")


def test_a_last_token_is_handed_over_though_the_only_other_request_is_aborted_right_behind_its_step():
    parts, updates, requests = FakeExecutor().parts(), [], []
    thread = EngineThread(parts.core, on_done=lambda done, stats: updates.extend(done))
    for name, max_tokens in (("ends", 1), ("goes on", 8)):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        requests += parts.inputs.prepare(name, {"prompt_token_ids": [3]}, params, arrival_time=0.0).completions
    thread.add(requests)
    thread.turn()  # a step that nothing was launched ahead of
    thread.abort([requests[1].request_id])
    thread.turn()
    thread.call(lambda: None)
    thread.turn()  # it would wait for a command now
    assert not parts.core.has_unfinished
    assert [update.request for update in updates if update.finish_reason] == requests[:1]
