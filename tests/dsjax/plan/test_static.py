"""The static modes: one batch, phase by phase."""

import pytest

from dsjax.plan.static import STATIC_MODES, static


def test_static_is_its_two_halves_one_after_the_other(ask):
    question = ask(prompt=1000, output=200)
    by_mesh = {mode: {str(r.instance.layout): r for r in static(question, mode, 16)} for mode in STATIC_MODES}
    assert len(by_mesh["static"]) > 5
    for name, whole in by_mesh["static"].items():
        prefill, decode = by_mesh["static_ctx"][name], by_mesh["static_gen"][name]
        assert whole.ttft.value == prefill.ttft.value
        assert whole.tpot.value == decode.tpot.value
        users = 16 * whole.instance.replicas / whole.instance.layout.devices
        seconds = prefill.ttft.value + 199 * decode.tpot.value
        assert whole.rate.value == pytest.approx(users * 200 / seconds)
        assert prefill.rate.value == pytest.approx(users * 1000 / prefill.ttft.value)


def test_layouts_without_room_for_the_batch_are_left_out(ask):
    question = ask(prompt=1000, output=200)
    assert all(r.instance.max_batch >= 400 for r in static(question, "static_gen", 400))
    assert len(static(question, "static_gen", 400)) < len(static(question, "static_gen", 1))
    assert all(r.batch == r.instance.max_batch for r in static(question, "static_gen", None))
