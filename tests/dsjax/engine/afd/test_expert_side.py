"""Experts on devices of their own change no bit of what one device gives: the tests of `afd/layer_programs.py`, too."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from layouts import answer, prompts, write_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.engine.afd.layer_programs import CompiledPass, OnHost
from dsjax.engine.schedule.page_events import BlockRemoved, BlockStored
from dsjax.engine.setup.expert_location import ExpertLocation
from dsjax.model.apart import Passing, Routed
from sharding import MeshError
from sharding.dispatch import between
from sharding.dispatch.between import Between

DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
SIDES = {"attention_mesh": "dp=2", "expert_mesh": "ep=3", "redundant_experts": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("apart"), mtp=True)


@pytest.mark.slow  # compiles two engines
def test_prompts_in_chunks_decodes_drafts_micro_batches_and_rounds_are_those_of_one_device_to_the_bit(
    checkpoint, monkeypatch
):
    rounds = []
    own = Between.rounds
    monkeypatch.setattr(Between, "rounds", lambda self, counts: rounds.append(own(self, counts)) or rounds[-1])
    monkeypatch.setattr(between, "default_capacity", lambda tokens, *_, **__: min(tokens, 2))
    options = DRAFTS | {
        "cache_tokens": 140
    }  # a third of what all take; in one form: what is computed again is a prompt
    one = answer(checkpoint, "dp=1", "auto", "CC", "CC", new_tokens=6, **options)
    halved = {
        "enable_dbo": True,
        "dbo_decode_token_threshold": 2,
        "dbo_prefill_token_threshold": 2,
        "num_afd_stages": 3,
    }
    apart = answer(checkpoint, "dp=2", "auto", "CC", "CC", new_tokens=6, **options, **SIDES, **halved)
    assert one.exact
    assert apart.exact
    assert {1, 2} < set(rounds)  # with room for two rows, one round, two, and more were needed
    np.testing.assert_array_equal(apart.logits, one.logits)
    assert apart.tokens == one.tokens
    assert apart.logprobs == one.logprobs


class Told:
    """An event sink that keeps what it is told."""

    def __init__(self):
        self.events = []

    def publish(self, rank, events):
        self.events += [(rank, event) for event in events]

    def close(self):
        pass


def scored(checkpoint, **options):
    """Log-probabilities of prompts, made tokens, events of pages, and the places of experts, of an engine whose cache is too small."""
    told = Told()
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "cache_tokens": 64}
    llm = LLM(str(checkpoint), dtype="float32", event_sink=told, redundant_experts=4, **sizes, **options)
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=2
    )
    try:
        assert llm.executor.model.is_exact
        outputs = llm.generate(prompts()[4:], params)
        scores = [
            [entry and {token: one.logprob for token, one in entry.items()} for entry in output.prompt_logprobs]
            for output in outputs
        ]
        made = [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]
        return scores, made, told.events, llm.executor.device.model.placement.physical_to_logical
    finally:
        llm.shutdown()


@pytest.mark.slow  # compiles two engines
def test_prompt_scores_events_of_pages_and_experts_placed_by_a_file_are_those_of_one_device(checkpoint, tmp_path):
    rows = np.stack([np.random.default_rng(layer).permutation([*range(32), 1, 5, 5, 30]) for layer in range(2)])
    path = tmp_path / "location.json"
    path.write_text(json.dumps(ExpertLocation("tiny", None, rows).to_json()))
    one = scored(checkpoint)
    apart = scored(checkpoint, attention_mesh="dp=1", expert_mesh="ep=4", init_expert_location=str(path))
    np.testing.assert_array_equal(apart[3][:2], rows)
    assert (one[3][:2] != rows).any()
    assert apart[:3] == one[:3]
    assert {type(event) for _, event in one[2]} == {BlockStored, BlockRemoved}
    assert all(
        len(scores) == len(prompt["prompt_token_ids"]) for scores, prompt in zip(one[0], prompts()[4:], strict=True)
    )


def test_each_side_has_its_own_parameters_and_no_others(checkpoint):
    llm = LLM(str(checkpoint), attention_mesh="dp=2", expert_mesh="ep=4", max_num_seqs=1, max_model_len=32)
    try:
        executor, facts = llm.executor, llm.facts
        side = executor.device.model.apart
        assert {device for array in side.params.values() for device in array.devices()} == set(side.mesh.devices.flat)
        assert not set(side.mesh.devices.flat) & set(executor.device.model.mesh.devices.flat)
        assert all(".moe.experts." in path for path in side.params)
        assert not any(".moe.experts." in path for path in executor.params)
        assert (facts.mesh, facts.expert_mesh, facts.physical_experts_per_device) == ("dp=2", "ep=4", 8)
        assert "routed experts" not in facts.weight_bytes
        assert facts.expert_weight_bytes > 0
    finally:
        llm.shutdown()


def test_what_does_not_fit_the_experts_side_is_said_before_anything_is_loaded(checkpoint):
    with pytest.raises(MeshError, match="least number of redundant experts that fits is 1"):
        LLM(str(checkpoint), attention_mesh="dp=2", expert_mesh="ep=3")
    with pytest.raises(MeshError, match="want 9999 devices"):
        LLM(str(checkpoint), attention_mesh="dp=9967", expert_mesh="ep=32")


class Recorded:
    """Stands for the programs of one half: writes down what is started, and gives names of what comes of it."""

    def __init__(self, half: str, started: list[str]):
        self.half, self.started, self.way = half, started, self

    def attend(self, params, cache, report, x, tokens, copies, layer):
        self.started.append(f"attend {self.half}{layer}")
        return cache + [f"{self.half}{layer}"], report, x, Routed("normed", "slots", "weights", "counts"), "rows"

    def call(self, rows, counts, layer):
        self.started.append(f"compute {self.half}{layer}")

    def share(self, params, normed, layer):
        self.started.append(f"share {self.half}{layer}")

    def receive(self, x, shared, slots, returned):
        self.started.append(f"receive {self.half}")
        return x + 1

    def returned(self, away):
        return away, 1


def test_of_two_halves_the_one_attends_while_experts_compute_the_other():
    started: list[str] = []
    both = CompiledPass([Recorded("a", started), Recorded("b", started)], [0, 1], waits=False)
    xs, cache, _ = both.run(Passing({}, [], {}, None, [0, 10], [None, None]))
    assert (xs, cache) == (
        [2, 12],
        ["a0", "b0", "a1", "b1"],
    )  # two layers, each half's entries after those of the half before
    on_attention = [name for name in started if not name.startswith("compute")]
    first_of_b = started.index("compute b0")
    assert started.index("attend b0") > started.index("compute a0")
    assert started[first_of_b + 2 : first_of_b + 4] == ["receive a", "attend a1"]  # behind b's shared experts
    assert on_attention[-2:] == ["receive a", "receive b"]


def test_several_threads_that_want_an_array_on_the_host_copy_it_once():
    copies = []

    class Slow:
        def __array__(self, dtype=None, copy=None):
            copies.append(1)
            time.sleep(0.02)
            return np.arange(3)

    counts = OnHost(Slow())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: counts.values, range(4)))
    assert len(copies) == 1
    assert all(values is found[0] for values in found)
