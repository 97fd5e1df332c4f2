"""A stage a process, here a stage a thread: process 0 is a step ahead of the others, and all make what one process makes.

Real processes: `test_stages_of_processes.py` in `tests/dsjax/hosts`.
"""

import queue
import threading
from collections import deque

import numpy as np
import pytest
from layouts import prompts, write_checkpoint
from links_in_threads import links_of

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.commands import Step
from dsjax.engine.contract.executor import ExecutorWrapper
from dsjax.engine.pipeline.stages_of_process import StagesOfProcess
from dsjax.engine.stream.leader import is_collected
from dsjax.errors import UserError

SIZES = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4}
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
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

        def counting():
            found = hear()
            self.hears += 1
            return found

        link.hear = counting
        self.told, self.collected, self.under_way, self.most = queue.SimpleQueue(), 0, 0, 0
        self._thread = threading.Thread(target=self._follow, args=(other,), daemon=True)
        self._thread.start()

    def launch(self, command):
        self.told.put((self.collected, command))
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

    def end(self):
        self.told.put(None)
        self._thread.join(60)

    def _follow(self, other):
        launched, collected = deque(), 0
        while (message := self.told.get()) is not None:
            wanted, command = message
            while collected < wanted:
                other.collect(launched.popleft())
                collected += 1
            pending = other.launch(command)
            if is_collected(command):
                launched.append(pending)


def made(llm):
    outputs = llm.generate(prompts()[3:6], PARAMS)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(what one process makes, what two make, logits of each, the executor of process 0)."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("stages"), mtp=True)
    llm = LLM(str(checkpoint), mesh="pp=2", max_model_len=64, **SIZES, **DRAFTS)
    sequence = prompts()[-1]["prompt_token_ids"]
    expected, logits = made(llm), llm.logits([sequence])[0]
    llm.engine.flush_prefix_cache()
    stages, links = llm.executor.stages, links_of([0, 1])
    first, last = (StagesOfProcess([stage], link) for stage, link in zip(stages, links, strict=True))
    llm.engine.core.executor = leading = Leading(first, last, links[0])
    two, logits_of_two = made(llm), llm.logits([sequence])[0]
    llm.engine.flush_prefix_cache()
    again = made(llm)
    leading.end()
    yield expected, (two, again), (logits, logits_of_two), leading
    for link in links:
        link.close()


def test_two_make_what_one_makes_to_the_bit(found):
    expected, (two, again), (logits, logits_of_two), _ = found
    assert two == expected
    assert again == expected
    np.testing.assert_array_equal(logits_of_two, logits)


def test_process_0_begins_a_step_while_the_one_before_is_at_the_next_stage(found):
    *_, leading = found
    assert leading.most == 2


def test_a_step_that_process_0_has_waited_for_is_done_at_the_last_stage(found):
    *_, leading = found
    assert len(leading.done_at_wait) > 10
    assert set(leading.done_at_wait) == {1}


def test_loads_of_experts_are_not_recorded_by_halves(found):
    *_, leading = found
    with pytest.raises(UserError, match="not put together"):
        leading.set_recording(True)
    leading.set_recording(False)
