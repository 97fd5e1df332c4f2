"""Experts on devices of their own change no bit of what one device gives: the tests of `afd/layer_programs.py`, too."""

import json

import numpy as np
import pytest
from balanced_model import generate

from dsjax import LLM
from dsjax.engine.afd.layer_programs import CompiledPass
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.setup.expert_location import ExpertLocation
from dsjax.model.apart import PassInputs, Routed
from sharding.dispatch import between
from sharding.dispatch.between import Between

SIZES = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "prefill_chunk": 16, "page_size": 4, "dtype": "float32"}
SIZES |= {"mla_prefill": "CC", "mla_decode": "CC"}  # in one form: what is computed again after a preemption is a prompt
SIDES = {"attention_mesh": "dp=2", "expert_mesh": "ep=3", "redundant_experts": 4}


def made(llm):
    """Continuations of all prompts, with log-probabilities, of an engine with few shapes, which this ends."""
    llm.executor.buckets = Buckets((6,), (Rectangle(3, 16),), mixed=False, speculation=llm.executor.buckets.speculation)
    try:
        assert llm.executor.model.is_exact
        return generate(llm)
    finally:
        llm.shutdown()


@pytest.mark.slow  # compiles an engine
def test_chunks_decodes_drafts_micro_batches_and_rounds_are_those_of_one_device_to_the_bit(
    checkpoint, tmp_path, monkeypatch
):
    """Each side has its own parameters alone, experts as a file places them; the cache is too small for all requests."""
    one_device = made(LLM(str(checkpoint), mesh="dp=1", **SIZES))
    rounds, own = [], Between.rounds
    monkeypatch.setattr(Between, "rounds", lambda self, counts: rounds.append(own(self, counts)) or rounds[-1])
    monkeypatch.setattr(between, "default_capacity", lambda tokens, *_, **__: min(tokens, 2))
    rows = np.stack([np.random.default_rng(layer).permutation([*range(32), 1, 5, 5, 30]) for layer in range(2)])
    path = tmp_path / "location.json"
    path.write_text(json.dumps(ExpertLocation("tiny", None, rows).to_json()))
    options = {"num_afd_stages": 3, "init_expert_location": str(path), "cache_tokens": 76}
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    halves = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
    apart = LLM(str(checkpoint), **SIZES, **SIDES, **options, **drafts, **halves)
    attention, side, facts = apart.executor.model, apart.executor.programs.experts, apart.facts
    np.testing.assert_array_equal(attention.placement.physical_to_logical[:2], rows)
    assert {device for array in side.params.values() for device in array.devices()} == set(side.mesh.devices.flat)
    assert not set(side.mesh.devices.flat) & set(attention.mesh.devices.flat)
    assert all(".moe.experts." in path for path in side.params)
    assert not any(".moe.experts." in path for path in apart.executor.params)
    assert (facts.mesh, facts.expert_mesh, facts.physical_experts_per_device) == ("dp=2", "ep=3", 12)
    assert "routed experts" not in facts.weight_bytes
    assert facts.expert_weight_bytes > 0
    assert made(apart) == one_device
    assert {1, 2} < set(rounds)  # with room for two rows, one round, two, and more were needed
    assert any(rank.num_preemptions for rank in apart.engine.core.scheduler.ranks)


class Recorded:
    """Stands for the programs of one half: writes down what is started, and gives names of what comes of it."""

    def __init__(self, half, started):
        self.half, self.started, self.way = half, started, self

    def attend(self, params, cache, report, x, tokens, copies, layer):
        self.started.append(f"attend {self.half}{layer}")
        return cache + [f"{self.half}{layer}"], report, x, Routed("normed", "slots", "weights", "counts", None), "rows"

    def call(self, rows, counts, layer):
        self.started.append(f"compute {self.half}{layer}")

    def share(self, params, normed, layer):
        self.started.append(f"share {self.half}{layer}")

    def receive(self, params, x, shared, routed, returned, layer):
        self.started.append(f"receive {self.half}")
        return x + 1

    def returned(self, away):
        return away, 1


def test_of_two_halves_the_one_attends_while_experts_compute_the_other():
    started: list[str] = []
    both = CompiledPass([Recorded("a", started), Recorded("b", started)], [0, 1], waits=False)
    xs, cache, _ = both.run(PassInputs({}, [], {}, None, [0, 10], [None, None]))
    assert (xs, cache) == ([2, 12], ["a0", "b0", "a1", "b1"]), "each half's entries after those of the half before"
    on_attention = [name for name in started if not name.startswith("compute")]
    first_of_b = started.index("compute b0")
    assert started.index("attend b0") > started.index("compute a0")
    assert started[first_of_b + 2 : first_of_b + 4] == ["receive a", "attend a1"]  # behind b's shared experts
    assert on_attention[-2:] == ["receive a", "receive b"]
