"""Several engines beside each other are one to whoever asks: requests, aborts, calls, counts, and death."""

import asyncio

import numpy as np
import pytest
from fake_executor import FakeExecutor, expected_tokens
from test_async_engine import FINAL, collect, run, until
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.async_engine import AsyncEngine, EngineDeadError
from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.contract.sampling_params import OutputKind, SamplingParams
from dsjax.engine.engine import LLMEngine
from dsjax.engine.experts.eplb import BalanceStats, RebalanceUnderWayError
from dsjax.engine.instances import EngineState, Whole, all_experts, all_rebalances
from dsjax.engine.schedule.page_events import AllBlocksCleared
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.transfer.remote_prefill import TransferCounts

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, output_kind=OutputKind.DELTA)


class Sink:
    """Hears of pages."""

    def __init__(self):
        self.heard, self.closed = [], 0

    def publish(self, rank, events):
        self.heard.append((rank, list(events)))

    def close(self):
        self.closed += 1


class Watcher:
    """Hears of steps and requests."""

    def __init__(self):
        self.stats, self.ranks = [], set()

    def on_step(self, stats):
        self.stats.append(stats)

    def on_updates(self, updates):
        self.ranks |= {update.request.rank for update in updates}

    def on_ended(self, requests, reason):
        pass

    def on_outputs(self, outputs):
        pass


def make(instances=3, ranks=2, **options):
    executors = [FakeExecutor(num_ranks=ranks, **options) for _ in range(instances)]
    config = SchedulerConfig.from_limits(executors[0].limits, max_num_batched_tokens=16)
    sink = Sink()
    beside = [(executor, None) for executor in executors[1:]]
    return LLMEngine(executors[0], tiny_tokenizer(), config, beside=beside, event_sink=sink), executors, sink


def in_use(engine):
    return [sum(rank.pool.num_used for rank in core.scheduler.ranks) for core in engine.cores]


def test_streams_over_several_threads_each_get_their_own_tokens_and_ranks_are_numbered_through():
    async def main():
        llm, executors, sink = make()
        engine, watcher = AsyncEngine(llm), Watcher()
        engine.observers.append(watcher)
        engine.start()
        prompts = [[[i, i + 1], [i, 7, 7, 7, 7, 7]] for i in range(40)]
        results = await asyncio.gather(*(collect(engine, str(i), prompt) for i, prompt in enumerate(prompts)))
        for prompt, result in zip(prompts, results, strict=True):
            assert result == {index: expected_tokens(each, 12) for index, each in enumerate(prompt)}
        assert all(executor.steps for executor in executors)
        assert watcher.ranks == set(range(6)) == {rank for rank, _ in sink.heard}
        assert [load.rank for load in watcher.stats[-1].ranks] == list(range(6))
        assert max(sum(load.running for load in stats.ranks) for stats in watcher.stats) > 2 * 8, "of all engines"
        assert (engine.num_unfinished, engine.num_waiting, engine.waiting_tokens) == (0, 0, 0)
        assert list(engine.steppers) == ["decode engine 0", "decode engine 1", "decode engine 2"]
        assert sum(len(stepper.running_requests()) for stepper in engine.steppers.values()) == 6

        assert await engine.call_each(lambda core: core.flush_prefix_cache()) == [True] * 3
        assert {rank for rank, events in sink.heard if AllBlocksCleared() in events} == set(range(6))
        state = await engine.state()
        assert [(load.rank, load.cached_pages) for load in state.loads] == [(rank, 0) for rank in range(6)]
        await engine.shutdown()
        assert all(executor.closed for executor in executors)
        assert sink.closed == 1

    run(main())


def test_an_abort_finds_the_engine_that_has_the_request():
    async def main():
        llm, _, _ = make(step_seconds=0.005)
        engine = AsyncEngine(llm)
        engine.start()
        streams = [await engine.submit(f"{i}", [[i] * 9], LONG) for i in range(6)]
        for stream in streams:
            await anext(stream)
        assert all(in_use(engine))
        for stream in streams[:3]:
            stream.close()
        await until(lambda: sum(map(bool, in_use(engine))) <= 3 and engine.num_unfinished == 3)
        assert len([output async for output in streams[5]]) > 10, "others go on"
        engine.abort_all()
        await until(lambda: not any(in_use(engine)))
        await engine.shutdown()

    run(main())


def test_when_one_engine_dies_all_requests_get_an_error_and_the_owner_is_told_once():
    async def main():
        llm, executors, _ = make(step_seconds=0.005)
        executors[1].fail_at_step = 3
        engine, deaths = AsyncEngine(llm), []
        engine.on_death = lambda: deaths.append(True)
        engine.start()
        found = await asyncio.gather(*(collect(engine, f"{i}", [[i]], LONG) for i in range(9)), return_exceptions=True)
        assert [type(error) for error in found] == [EngineDeadError] * 9
        assert deaths == [True]
        with pytest.raises(EngineDeadError):
            await engine.submit("late", [[1]], FINAL)
        with pytest.raises(EngineDeadError):
            await engine.call_each(lambda core: None)
        await engine.shutdown()
        assert executors[0].closed

    run(main())


def test_without_threads_the_engines_are_taken_in_turn():
    llm, executors, _ = make()
    for index in range(12):
        llm.add_request(f"{index}", [index, 5, index], SamplingParams(temperature=0, max_tokens=9, n=2))
    llm.abort("3")
    found = {}
    while llm.has_unfinished():
        found |= {output.request_id: output for output in llm.step() if output.finished}
    assert found.pop("3").outputs[0].finish_reason == "abort"
    assert all(found[f"{i}"].outputs[0].token_ids == expected_tokens([i, 5, i], 9) for i in range(12) if i != 3)
    assert all(executor.steps for executor in executors)
    assert llm.flush_prefix_cache()
    assert not any(load.cached_pages for core in llm.cores for load in core.loads())
    llm.shutdown()
    assert all(executor.closed for executor in executors)


def test_an_interrupt_while_one_engine_waits_loses_nothing_of_what_another_has_done(monkeypatch):
    llm, _, _ = make(instances=2, ranks=1)
    llm.add_request("a", [3, 4], SamplingParams(temperature=0, max_tokens=4))
    llm.add_request("b", [5, 6], SamplingParams(temperature=0, max_tokens=4))
    second, found, turns = llm.cores[1].step, {}, 0

    def interrupted(**how):
        nonlocal turns
        turns += 1
        if turns % 2:
            raise KeyboardInterrupt
        return second(**how)

    monkeypatch.setattr(llm.cores[1], "step", interrupted)
    while llm.has_unfinished():
        try:
            found |= {output.request_id: output for output in llm.step() if output.finished}
        except KeyboardInterrupt:
            continue
    assert found["a"].outputs[0].token_ids == expected_tokens([3, 4], 4)
    assert found["b"].outputs[0].token_ids == expected_tokens([5, 6], 4)
    llm.shutdown()


def test_after_a_step_of_one_engine_the_others_are_told_of_as_they_are():
    llm, _, _ = make(instances=2, ranks=1)
    whole = Whole(llm.cores)
    for name in ("a", "b", "c", "d"):
        llm.add_request(name, [3, 4], SamplingParams(temperature=0, max_tokens=4))
    assert llm.cores[0].step()
    own = llm.cores[0].stats()
    assert [load.running + load.waiting for load in whole.after(0, own).ranks] == [2, 2]
    for name in ("b", "d"):
        llm.abort(name)
    assert [load.running + load.waiting for load in whole.after(0, own).ranks] == [2, 0]
    llm.shutdown()


def test_what_engines_count_is_put_together():
    states = [
        EngineState([], DiskCounts(used_pages=1, page_bytes=8), BalanceStats(2, 0.5, 0.4, (1, 3)), TransferCounts(3)),
        EngineState([], DiskCounts(used_pages=2, page_bytes=8), BalanceStats(4, 0.7, 0.6, (5, 5)), TransferCounts(4)),
    ]
    together = EngineState.together(states)
    assert together.disk == DiskCounts(used_pages=3, page_bytes=8)
    assert together.transfers == TransferCounts(asked=7)
    assert (together.balance.windows, together.balance.rank_tokens) == (6, (6, 8))
    assert together.balance.balancedness == pytest.approx(0.6)
    assert EngineState.together([EngineState([]), states[0]]).disk == states[0].disk

    slots = np.array([[0, 1, 1]])
    counts = [
        ExpertCounts(np.array([[1, 2, 3]]) * k, np.array([k, k]), k, 100 * k, 0.5 / k, np.array([[1, 5]]) * k, slots)
        for k in (1, 3)
    ]
    experts = all_experts([counts[0], None, counts[1]])
    assert experts.tokens_per_expert.tolist() == [[4, 8, 12]]
    assert experts.rows_sent.tolist() == [1, 1, 0, 0, 3, 3], "devices keep their places"
    assert (experts.rounds, experts.dispatch_bytes, experts.padding_share) == (4, 400, 0.25)
    assert all_experts([None, None]) is None

    moved = {"layers": 1, "experts": 2, "bytes": 3, "exchanges": 1, "balancedness": {"before": 0.5, "after": 0.9}}
    busy = RebalanceUnderWayError("a rebalance is under way")
    assert all_rebalances([moved, busy]) == moved
    assert all_rebalances([moved, moved])["experts"] == 4
    assert all_rebalances([moved, moved])["balancedness"] == moved["balancedness"]
    assert all_rebalances([None, None]) is None
    with pytest.raises(RebalanceUnderWayError):
        all_rebalances([busy, busy])
