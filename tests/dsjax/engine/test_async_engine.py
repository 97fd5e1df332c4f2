"""The engine's thread: outputs arrive, disconnects free pages, death is heard by all."""

import asyncio
import time

import pytest
from fake_runner import FakeRunner, expected_tokens
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.async_engine import AsyncEngine, EngineClosingError, EngineDeadError
from dsjax.engine.engine import LLMEngine
from dsjax.engine.input_processor import PromptError
from dsjax.engine.sampling_params import OutputKind, SamplingParams
from dsjax.engine.scheduler import SchedulerConfig

FINAL = SamplingParams(temperature=0, max_tokens=12, output_kind=OutputKind.FINAL_ONLY)


def make(**options) -> tuple[AsyncEngine, FakeRunner]:
    runner = FakeRunner(**options)
    config = SchedulerConfig.from_limits(runner.limits, max_num_batched_tokens=16)
    return AsyncEngine(LLMEngine(runner, tiny_tokenizer(), config)), runner


async def collect(engine: AsyncEngine, request_id: str, prompts, params=FINAL) -> dict[int, list[int]]:
    stream = await engine.submit(request_id, prompts, params)
    return {index: output.outputs[0].token_ids async for index, output in stream}


async def until(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


def pages_in_use(engine: AsyncEngine) -> int:
    return sum(rank.pool.num_used for rank in engine._core.scheduler.ranks)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_many_streams_at_once_each_get_their_own_tokens():
    async def main():
        engine, runner = make(num_ranks=2)
        engine.start()
        prompts = [[[i, i + 1], [i, 7, 7]] for i in range(30)]
        results = await asyncio.gather(*(collect(engine, str(i), prompt) for i, prompt in enumerate(prompts)))
        for prompt, result in zip(prompts, results, strict=True):
            assert result == {index: expected_tokens(each, 12) for index, each in enumerate(prompt)}
        assert engine.num_unfinished == 0
        await engine.shutdown()
        assert runner.closed

    run(main())


def test_closing_a_stream_frees_its_pages_within_two_steps():
    async def main():
        engine, runner = make(step_seconds=0.01)
        engine.start()
        params = SamplingParams(max_tokens=100, output_kind=OutputKind.DELTA)
        stream = await engine.submit("r", [[1, 2, 3]], params)
        await anext(stream)
        assert pages_in_use(engine) > 0
        stream.close()
        steps = runner.steps
        await until(lambda: pages_in_use(engine) == 0)
        assert runner.steps <= steps + 2
        assert engine.num_unfinished == 0
        await engine.shutdown()

    run(main())


def test_a_wrong_prompt_among_several_queues_none():
    async def main():
        engine, runner = make()
        engine.start()
        with pytest.raises(PromptError):
            await engine.submit("r", [[1], [9999]], FINAL)
        assert engine.num_unfinished == 0
        await engine.shutdown()
        assert runner.steps == 0

    run(main())


def test_when_the_thread_dies_every_stream_gets_an_error_and_the_owner_is_told():
    async def main():
        engine, runner = make()
        runner.fail_at_step = 3
        deaths = []
        engine.on_death = lambda: deaths.append(True)
        engine.start()
        params = SamplingParams(max_tokens=100, output_kind=OutputKind.FINAL_ONLY)
        results = await asyncio.gather(
            *(collect(engine, str(i), [[i], [i, i]], params) for i in range(5)), return_exceptions=True
        )
        assert [type(result) for result in results] == [EngineDeadError] * 5
        assert deaths == [True]
        with pytest.raises(EngineDeadError):
            await engine.submit("late", [[1]], FINAL)
        await engine.shutdown()

    run(main())


def test_shutdown_ends_what_runs_with_an_error_and_refuses_what_comes():
    async def main():
        engine, _ = make(step_seconds=0.01)
        engine.start()
        running = asyncio.create_task(collect(engine, "r", [[1, 2]], SamplingParams(max_tokens=100)))
        await until(lambda: pages_in_use(engine) > 0)
        await engine.shutdown()
        with pytest.raises(EngineClosingError):
            await running
        with pytest.raises(EngineClosingError):
            await engine.submit("late", [[1]], FINAL)
        assert pages_in_use(engine) == 0

    run(main())
