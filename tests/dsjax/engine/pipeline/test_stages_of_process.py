"""A stage a process, here a stage a thread: process 0 is a step ahead of the others, and all make what one process makes.

Real processes: `test_stages_of_processes.py` in `tests/dsjax/hosts`.
"""

import queue
import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from balanced_model import failing, move, random_row
from layouts import TINY, prompts
from links_in_threads import links_of
from staged_model import follow_load, load_stages

from dsjax import SamplingParams
from dsjax.engine.contract.commands import ReadLoads, Step
from dsjax.engine.contract.executor import ExecutorWrapper
from dsjax.engine.experts.eplb import ExpertMover
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from dsjax.engine.experts.expert_exchange import expert_share
from dsjax.engine.pipeline.experts_of_stages import ExpertsOfProcesses
from dsjax.engine.pipeline.stages_of_process import StagesOfProcess
from dsjax.engine.setup.assembly import expert_placement
from dsjax.engine.stream.leader import is_collected

pytestmark = pytest.mark.slow  # all together

PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False),
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=3, max_tokens=6, ignore_eos=True, detokenize=False),
]


class Leading(ExecutorWrapper):
    """Tells another process what it is told, as `LeaderExecutor` does, and counts the steps under way."""

    def __init__(self, inner, other, link):
        super().__init__(inner)
        self.hears, self.done_at_wait, hear = 0, [], link.hear

        def counting(number):
            found = hear(number)
            self.hears += 1
            return found

        link.hear = counting
        self.told, self.collected, self.under_way, self.most = queue.SimpleQueue(), 0, 0, 0
        self._thread = threading.Thread(target=self._follow, args=(other,), daemon=True)
        self._thread.start()

    def launch(self, command):
        self.told.put((self.collected, lambda other: other.launch(command)))
        self.under_way += isinstance(command, Step)
        self.most = max(self.most, self.under_way)
        return self.inner.launch(command)

    def wait(self, pending):
        before = self.hears
        self.inner.wait(pending)
        self.done_at_wait.append(self.hears - before)

    def collect(self, pending):
        found = self.inner.collect(pending)
        self.collected += is_collected(pending.command)
        self.under_way -= isinstance(pending.command, Step)
        return found

    def set_recording(self, on):
        self.inner.set_recording(on)
        self.told.put((self.collected, lambda other: other.set_recording(on)))

    def expert_counts(self):
        self.told.put((self.collected, lambda other: other.expert_counts()))
        return self.inner.expert_counts()

    def end(self):
        self.told.put(None)
        self._thread.join(60)

    def _follow(self, other):
        launched, collected = deque(), 0
        while (message := self.told.get()) is not None:
            wanted, carry_out = message
            while collected < wanted:
                other.collect(launched.popleft())
                collected += 1
            pending = carry_out(other)
            if pending is not None and is_collected(getattr(pending, "command", None)):
                launched.append(pending)


def made(llm):
    outputs = llm.generate(prompts()[3:6], PARAMS)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]


def recorded(llm):
    """(The experts' loads of a few requests, what metrics show of them, what is there when the record has ended.)"""
    llm.engine.flush_prefix_cache()
    executor = llm.engine.core.executor
    executor.set_recording(True)
    made(llm)
    loads, shown = executor.expert_counts(), executor.counts().experts
    executor.set_recording(False)
    after = executor.counts().experts
    llm.engine.flush_prefix_cache()
    return loads, shown, after


@pytest.fixture(scope="module")
def found(checkpoint):
    """What one process and two processes make of the same requests.

    ends: the executors of process 0, with the first stage, and of process 1, with all others. leading: that of process 0 as its engine
    sees it. moving: what two make while experts move.
    """
    llm = load_stages(checkpoint)
    sequence = prompts()[-1]["prompt_token_ids"]
    expected, logits, loads = made(llm), llm.logits([sequence])[0], recorded(llm)
    (first, *others), links = llm.executor.stages, links_of([0, 1])
    ends = [
        StagesOfProcess(stages, link, ExpertsOfProcesses(stages, llm.config, link))
        for stages, link in zip(([first], others), links, strict=True)
    ]
    llm.engine.core.executor = leading = Leading(*ends, links[0])
    found = SimpleNamespace(llm=llm, ends=ends, leading=leading, expected=expected, two=[made(llm)])
    found.logits = logits, llm.logits([sequence])[0]
    llm.engine.flush_prefix_cache()
    found.two.append(made(llm))
    found.loads = loads, recorded(llm)
    follow_load(llm)
    found.moving = made(llm)
    yield found
    leading.end()
    for link in links:
        link.close()


def test_two_make_what_one_makes_to_the_bit(found):
    assert found.two == [found.expected] * 2
    np.testing.assert_array_equal(*found.logits)


def test_process_0_begins_a_step_while_the_one_before_is_at_the_next_stage(found):
    assert found.leading.most == 2


def test_a_step_that_process_0_has_waited_for_is_done_at_the_last_stage(found):
    assert len(found.leading.done_at_wait) > 10
    assert set(found.leading.done_at_wait) == {1}


def test_the_record_of_loads_has_the_layers_and_devices_of_all_processes_and_begins_anew_each_time(found):
    (loads, _, after), (loads_of_two, shown_of_two, after_of_two) = found.loads
    for name in ("tokens_per_expert", "logical_load", "physical_to_logical", "rows_sent"):
        np.testing.assert_array_equal(getattr(loads_of_two, name), getattr(loads, name))
    assert loads.tokens_per_expert.sum(1).min() > 0
    assert (loads_of_two.rounds, loads_of_two.dispatch_bytes) == (loads.rounds, loads.dispatch_bytes)
    assert loads_of_two.padding_share == pytest.approx(loads.padding_share)
    np.testing.assert_array_equal(shown_of_two.tokens_per_expert, loads.tokens_per_expert)
    assert (after, after_of_two) == (None, None)


def placed(experts) -> np.ndarray:
    return experts.extension(ExpertMover).slots.physical_to_logical


def test_process_0_decides_for_the_experts_of_others_and_no_token_changes(found):
    llm, (first, last) = found.llm, found.ends
    assert found.moving == found.expected
    stats, slots = llm.engine.core.part(ExpertBalancer).stats, first.extension(ExpertMover).slots
    assert stats.rebalances
    assert not stats.failures
    assert stats.exchange_seconds > 0
    assert sum(stats.rank_tokens) > 0
    own = [stage.extension(ExpertMover).slots for stage in last.stages]
    np.testing.assert_array_equal(slots.physical_to_logical, np.concatenate([one.physical_to_logical for one in own]))
    at_first = expert_placement(llm.config, first.model.spec, 8).physical_to_logical
    assert (slots.physical_to_logical[: len(at_first)] != at_first).any()
    for name in ("ranks", "expert_bytes", "per_exchange"):
        assert getattr(slots, name) == getattr(own[0], name)
    assert slots.expert_share == expert_share(llm.config)


def test_process_0_hears_what_goes_wrong_elsewhere(found, monkeypatch):
    llm, (first, last) = found.llm, found.ends

    before = placed(first)
    row = random_row(np.random.default_rng(4), before.shape[1])
    with monkeypatch.context() as patch:
        patch.setattr(last.stages[1].programs, "place_experts", lambda layers: failing())
        errors = move(llm, 1, row)
    assert errors == [None] * (len(errors) - 1) + ["RuntimeError: the device said no"]
    np.testing.assert_array_equal(placed(first), before)
    assert not any(move(llm, 1, row))
    np.testing.assert_array_equal(placed(first)[1], row)


def test_process_0_knows_what_an_exchange_takes_once_all_are_warm(found):
    first, last = (end._experts for end in found.ends)
    for mover, seconds in zip(last._movers, ((0.25, 0.125), (0.125, 0.5)), strict=True):
        mover._seconds = seconds
    for experts in (last, first):
        experts.meet()
    command = ReadLoads()
    told = [end.launch(command) for end in reversed(found.ends)]
    assert found.ends[0].collect(told[1]).logical.shape == (3, TINY["n_routed_experts"])
    assert first.slots.seconds == (0.25, 0.5)
