"""The static modes: one batch, phase by phase."""

import pytest

from dsjax.plan.search import instances
from dsjax.plan.static import static_results
from dsjax.plan.workload import PlanOptions


def static(question, mode, batch):
    return static_results(instances(question)[1], mode, batch)


def test_static_is_its_two_halves_one_after_the_other(ask):
    question = ask(prompt=1000, output=200)
    modes = [static(question, mode, 16) for mode in ("static", "static_ctx", "static_gen")]
    assert len(modes[0]) > 5
    wholes, *halves = ({str(one.instance.layout): one for one in each} for each in modes)
    for name, whole in wholes.items():
        prefill, decode = (half[name] for half in halves)
        assert whole.ttft == prefill.ttft
        assert whole.tpot == decode.tpot
        users = 16 * whole.instance.replicas / whole.instance.layout.devices
        seconds = prefill.ttft + 199 * decode.tpot
        assert whole.rate == pytest.approx(users * 200 / seconds)
        assert prefill.rate == pytest.approx(users * 1000 / prefill.ttft)


def test_layouts_without_room_for_the_batch_are_left_out(ask):
    many, one, most = (static(ask(output=200), "static_gen", batch) for batch in (400, 1, None))
    assert all(r.instance.max_batch >= 400 for r in many)
    assert len(many) < len(one)
    assert all(r.batch == r.instance.max_batch for r in most)


@pytest.mark.parametrize("drafts", [0, 1])
def test_decode_alone_is_priced_at_the_context_that_is_given_and_for_the_tokens_that_a_step_makes(ask, drafts):
    options = PlanOptions(drafts=drafts)
    asked = (ask(output=200, options=options, decoding_at=at) for at in (8192.0, None))
    found, shorter = (static(question, "static_gen", 4) for question in asked)
    assert len(found) > 5
    for result in found:
        steps = [model.decode(4, 8192.0, drafts=drafts) for model in result.instance.step_models()]
        assert result.tpot * options.tokens_a_step == pytest.approx(min(steps))
    assert max(r.instance.max_batch for r in found) < max(r.instance.max_batch for r in shorter)
