"""Which MLA form computes prompts behind a cached prefix: priced as chosen, and told to the engine."""

import pytest

from dsjax.engine.setup.args import EngineArgs
from dsjax.plan.layout import parse_layout
from dsjax.plan.recipe import serve_options
from dsjax.plan.workload import PlanOptions

CACHED = 60_000


def _step(ask, **load):
    question = ask("h200-8", options=PlanOptions(redundant=0), **load)
    instance = question.instance(parse_layout("tp=8,ep=1", 0, question.config), {})
    return instance, instance.step_models()[0]


def _absorbs(model, new, cached=CACHED):
    return model.absorbs(new, cached, cached + (new + 1) / 2)


def test_a_few_new_tokens_behind_a_long_prefix_are_absorbed_and_many_are_not(ask):
    _, model = _step(ask)
    assert [_absorbs(model, new) for new in (1, 16, 128, 1024)] == [True, True, False, False]
    assert not _absorbs(model, 16, cached=0)


@pytest.mark.parametrize(("hit", "absorbed"), [(0.9998, True), (0.5, False), (0.0, False)])
def test_the_recipe_says_which(ask, hit, absorbed):
    instance, _ = _step(ask, prompt=CACHED, prefix_hit=hit)
    options = serve_options("deepseek-v3", instance, 4, 4096)
    assert options.get("--mla-prefill") == (EngineArgs.mla_decode if absorbed else None)
