"""What a step did is handed over also when nothing follows it."""

from fake_executor import FakeExecutor

from dsjax import SamplingParams
from dsjax.engine.engine_thread import EngineThread


def test_a_last_token_is_handed_over_though_the_only_other_request_is_aborted_right_behind_its_step():
    executor, updates = FakeExecutor(), []
    parts = executor.parts()
    thread = EngineThread(parts.core, on_done=lambda done, stats: updates.extend(done))
    requests = []
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
