"""The static modes: one batch, phase by phase."""

import dataclasses

import pytest

from dsjax.plan.search import instances
from dsjax.plan.static import static_of


def static(question, mode, batch):
    return static_of(instances(question)[1], mode, batch)


STATIC_MODES = ("static", "static_ctx", "static_gen")


def test_static_is_its_two_halves_one_after_the_other(ask):
    question = ask(prompt=1000, output=200)
    by_mesh = {mode: {str(r.instance.layout): r for r in static(question, mode, 16)} for mode in STATIC_MODES}
    assert len(by_mesh["static"]) > 5
    for name, whole in by_mesh["static"].items():
        prefill, decode = by_mesh["static_ctx"][name], by_mesh["static_gen"][name]
        assert whole.ttft == prefill.ttft
        assert whole.tpot == decode.tpot
        users = 16 * whole.instance.replicas / whole.instance.layout.devices
        seconds = prefill.ttft + 199 * decode.tpot
        assert whole.rate == pytest.approx(users * 200 / seconds)
        assert prefill.rate == pytest.approx(users * 1000 / prefill.ttft)


def test_layouts_without_room_for_the_batch_are_left_out(ask):
    question = ask(prompt=1000, output=200)
    assert all(r.instance.max_batch >= 400 for r in static(question, "static_gen", 400))
    assert len(static(question, "static_gen", 400)) < len(static(question, "static_gen", 1))
    assert all(r.batch == r.instance.max_batch for r in static(question, "static_gen", None))


@pytest.mark.parametrize("drafts", [0, 1])
def test_decode_alone_is_priced_at_the_context_that_is_given_and_for_the_tokens_that_a_step_makes(ask, drafts):
    question = ask(prompt=1000, output=200)
    question = dataclasses.replace(question, options=dataclasses.replace(question.options, drafts=drafts))
    at = dataclasses.replace(question, workload=dataclasses.replace(question.workload, decoding_at=8192.0))
    found = static(at, "static_gen", 4)
    assert len(found) > 5
    for result in found:
        steps = [model.decode(4, 8192.0, drafts=drafts) for model in result.instance.step_models()]
        assert result.tpot * question.options.tokens_a_step == pytest.approx(min(steps))
    assert max(r.instance.max_batch for r in found) < max(
        r.instance.max_batch for r in static(question, "static_gen", 4)
    )
