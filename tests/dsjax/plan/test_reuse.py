"""What tiers of the cache find of prompts that come back, beside what `docs/cache-tiers.md` measured."""

import json

import pytest
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.plan.candidate import aggregated
from dsjax.plan.layout import parse_layout
from dsjax.plan.reuse import reuse, tier_shares

SET, CACHE = 8192, 2048
HELD = 256 + 4 + 3 + 100
"""That run holds so many tokens: the prompt that is asked with its answer, and the other request, half-way through 200 tokens."""
BIG = 10.0 * SET


def test_the_devices_find_what_was_measured():
    """docs/cache-tiers.md: 17.8 % without tiers, 17.3 and 17.8 % with them, of a working set of four times the cache."""
    device, host, disk = tier_shares(SET, CACHE, HELD, 0, 0)
    assert device == pytest.approx(0.178, abs=0.01)
    assert device.low < 0.173 < 0.178 < device.high
    assert host == disk == 0


def test_what_fits_into_a_higher_tier_is_not_found_twice():
    device, host, disk = tier_shares(SET, CACHE, HELD, SET / 2, SET / 2)
    assert (host, device + host + disk) == (0.5, pytest.approx(1))
    assert list(tier_shares(100, CACHE, HELD, BIG, BIG)) == [1, 0, 0]
    assert tier_shares(SET, CACHE, 2 * CACHE, 0, 0)[0] == 0


def _plan(*options):
    base = ["plan", "--cluster", "h200-8", "--mesh", "tp=8,ep=1", "--mode", "aggregated"]
    base += ["--max-concurrency", "16", "--input", "4000"]
    return CliRunner().invoke(app, [*base, *options])


def test_the_command_says_what_to_plan_with():
    found = _plan("--working-set", "5e6", "--host-cache-gb", "100", "--json", "-")
    body = json.loads(found.output)["reuse"]
    assert 0 < body["device"]["value"] < 1
    assert body["host"]["value"] == pytest.approx(100e9 / 70272 / 5e6, rel=0.01)
    assert 0 < body["loading_s"]["low"] < body["loading_s"]["value"] < body["loading_s"]["high"] < 0.1
    assert "Plan with --prefix-hit" in _plan("--working-set", "5e6").output
    assert json.loads(_plan("--json", "-").output)["reuse"] is None


def test_of_stages_prompts_are_found_in_the_cache_of_all_batches(ask):
    """A DP rank has as many batches as stages, each with its part of the cache: room for what they hold is no room for pages."""
    question = ask("h200-16", prompt=4000)
    instance = question.instance(parse_layout("pp=2,tp=8", 0, question.config), {})
    found = reuse(aggregated(instance, 1, 8, 4000), 1e8, 0, 0).device
    cache, held = 2 * instance.memory.cache_tokens, 16 * question.workload.context
    assert found == pytest.approx(0.9 * (cache - held) / 1e8)
