"""Speculative decoding gives the text of decoding without drafts, whatever a request asks for and whatever happens to it.

The module of this tiny model often agrees with the model and often does not (``drafting_checkpoint.py``), and every comparison says
that drafts were accepted and refused in it. More meshes, dispatches and forms: ``tools/check_layouts.py``.

These are the tests of `device/programs.py` too.
"""

import dataclasses
import functools
import string
from collections import Counter

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from layouts import MODELS

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.sampling_params import OutputKind
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.stats import DraftCounts
from dsjax.serve.answers import UsageCounter

TABLE = ((1, 1, 4), (2, 3, 0), (4, 8, 2))
"""Drafts by running requests."""
TOKENS = 24


def load(directory, mesh: str, speculation: dict | None, dtype: str = "float32", weights: str = "auto") -> LLM:
    llm = LLM(
        str(directory),
        mesh=mesh,
        dtype=dtype,
        weights=weights,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        prefill_chunk=16,
        page_size=4,
        speculative_config=speculation,
    )
    llm.executor.buckets = Buckets(
        decode=(4,), prefill=(Rectangle(4, 16),), mixed=False, speculation=llm.args.speculation
    )
    return llm


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The checkpoint of each model, written when it is first asked for."""
    return functools.cache(
        lambda model: write_drafting_checkpoint(tmp_path_factory.mktemp("drafting"), **MODELS[model])
    )


@pytest.fixture(scope="module")
def checkpoint(checkpoints):
    return checkpoints("v3")


@pytest.fixture(scope="module")
def plain(checkpoint):
    """An engine without the module."""
    llm = load(checkpoint, "dp=1", None)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def llm(checkpoint):
    """An engine that can draft up to 4 tokens; `drafting` says how many it drafts."""
    given = {"method": "mtp", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": TABLE}
    made = load(checkpoint, "dp=1", given)
    yield made
    made.shutdown()


class Watch:
    """What came of an engine's drafts: of each completion the drafts verified and accepted, and of each step its counts."""

    def __init__(self, llm: LLM, patch: pytest.MonkeyPatch):
        self.verified, self.accepted, self.tokens = Counter(), Counter(), Counter()
        self.steps: list[DraftCounts] = []
        self.widths: list[int] = []
        core = llm.engine.core
        step = core.step

        def watched(*arguments, **keywords):
            updates = step(*arguments, **keywords)
            for request, result, _ in updates:
                if result is not None:
                    self.verified[request.request_id] += result.num_drafts
                    self.accepted[request.request_id] += max(0, len(result.token_ids) - 1)
                    self.tokens[request.request_id] += len(result.token_ids)
            if updates and core.stats().drafts is not None:
                self.steps.append(core.stats().drafts)
            return updates

        schedule = core.scheduler.schedule

        def scheduled(*arguments):
            plan = schedule(*arguments)
            if not plan.is_empty:
                self.widths.append(plan.num_drafts)
            return plan

        patch.setattr(core, "step", watched)
        patch.setattr(core.scheduler, "schedule", scheduled)

    def assert_both(self):
        """Drafts were accepted, and refused."""
        verified, accepted = sum(self.verified.values()), sum(self.accepted.values())
        assert 0 < accepted < verified, (accepted, verified)


@pytest.fixture
def watch(llm, monkeypatch):
    return Watch(llm, monkeypatch)


def drafting(llm: LLM, count: int) -> None:
    """How many tokens the engine drafts from now on, from a cold cache; −1: as its table has it."""
    speculation = None
    if count:
        table = TABLE if count < 0 else None
        speculation = SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=4 if count < 0 else count,
            num_speculative_tokens_per_batch_size=table,
        )
    scheduler = llm.engine.core.scheduler
    scheduler.config = dataclasses.replace(scheduler.config, speculation=speculation)
    llm.engine.core.flush_prefix_cache()


def prompts(count: int, seed: int = 3) -> list[dict]:
    rng = np.random.default_rng(seed)
    lengths = (1, 5, 9, 17, 30, 3)
    return [{"prompt_token_ids": rng.integers(2, 290, size=lengths[i % 6]).tolist()} for i in range(count)]


def told(outputs) -> list:
    """Everything that a user is told, log-probabilities apart."""
    return [
        [(one.text, list(one.token_ids), one.finish_reason, one.stop_reason) for one in output.outputs]
        for output in outputs
    ]


def both(llm: LLM, given: list[dict], params) -> tuple[list, list]:
    """Outputs without drafts, and with two."""
    drafting(llm, 0)
    without = llm.generate(given, params)
    drafting(llm, 2)
    return without, llm.generate(given, params)


GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


def told_greedily(plain: LLM) -> list:
    outputs = plain.generate(prompts(6), GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 6
    return told(outputs)


@pytest.fixture(scope="module")
def greedy(plain):
    return told_greedily(plain)


@pytest.fixture
def greedy_of(checkpoints, request):
    """What a model's engine without the module tells."""

    def made(model):
        if model == "v3":
            return request.getfixturevalue("greedy")
        plain = load(checkpoints(model), "dp=1", None)
        try:
            return told_greedily(plain)
        finally:
            plain.shutdown()

    return made


@pytest.mark.parametrize("count", [2, 4])
def test_greedy_tokens_are_those_of_an_engine_without_the_module(llm, watch, greedy, count):
    drafting(llm, count)
    assert told(llm.generate(prompts(6), GREEDY)) == greedy
    watch.assert_both()
    assert set(watch.widths) == {count}
    assert all(len(counts.accepted_per_position) <= count for counts in watch.steps)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "count"), [("v3", "dp=2,tp=2", 2), ("v3", "dp=4", 1), ("v3.2", "tp=2", 2)])
def test_greedy_tokens_are_the_same_on_other_meshes(checkpoints, monkeypatch, greedy_of, model, mesh, count):
    other = load(checkpoints(model), mesh, {"method": "mtp", "num_speculative_tokens": count})
    try:
        watch = Watch(other, monkeypatch)
        assert told(other.generate(prompts(6), GREEDY)) == greedy_of(model)
        watch.assert_both()
    finally:
        other.shutdown()


def test_without_asynchronous_scheduling_it_is_the_same_text(llm, watch, greedy, monkeypatch):
    monkeypatch.setattr(llm.engine.core, "_most_under_way", 1)
    drafting(llm, 2)
    assert told(llm.generate(prompts(6), GREEDY)) == greedy
    watch.assert_both()


KINDS = {
    "temperature": {},
    "hot": {"temperature": 1.8},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "greedy penalties": {"temperature": 0, "frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {70: 3.0, 71: -100.0, 72: 2.0}},
    "allowed": {"allowed_token_ids": list(range(34, 60))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(34, 120)), "max_tokens": 20},
    "bad words": {"bad_words": list(string.ascii_uppercase)},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
}


@pytest.fixture(scope="module")
def sampled(llm):
    """Each kind without drafts and with two, and what came of its drafts."""
    params = [
        SamplingParams(**{"temperature": 1.0, "seed": 40 + i, "max_tokens": 40, "ignore_eos": True, **kind})
        for i, kind in enumerate(KINDS.values())
    ]
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(llm, patch)
        without, drafted = both(llm, prompts(len(KINDS)), params)
    return {
        kind: (a, b, watch.verified[f"{b.request_id}"], watch.accepted[f"{b.request_id}"])
        for kind, a, b in zip(KINDS, without, drafted, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_text_is_the_same(sampled, kind):
    without, drafted, verified, accepted = sampled[kind]
    assert told([drafted]) == told([without])
    assert verified > accepted
    if kind not in ("allowed", "hot"):  # the module knows nothing of what is allowed
        assert accepted > 0


@pytest.mark.slow
def test_kinds_do_what_they_say(sampled):
    def text(kind):
        return sampled[kind][1].outputs[0]

    assert set(text("allowed").token_ids) <= set(range(34, 60))
    assert not set(text("bad words").text) & set(string.ascii_uppercase)
    assert set(text("temperature").text) & set(string.ascii_uppercase)
    assert 71 not in text("logit_bias").token_ids
    assert text("min_tokens").finish_reason == "stop"
    assert len(text("min_tokens").token_ids) == 10


@pytest.mark.slow
def test_logprobs_are_of_each_token_of_a_run_and_equal_to_the_bit(kernels, sampled):
    without, drafted, _, accepted = sampled["logprobs"]
    assert accepted > 0
    assert drafted.outputs[0].logprobs == without.outputs[0].logprobs
    assert drafted.outputs[0].cumulative_logprob == without.outputs[0].cumulative_logprob
    assert len(drafted.prompt_logprobs) == len(drafted.prompt_token_ids)
    assert drafted.prompt_logprobs == without.prompt_logprobs


def test_a_run_of_accepted_drafts_ends_at_max_tokens(llm, watch):
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in range(1, 13)]
    without, drafted = both(llm, prompts(1) * 12, params)
    assert told(drafted) == told(without)
    assert [len(output.outputs[0].token_ids) for output in drafted] == list(range(1, 13))
    assert {output.outputs[0].finish_reason for output in drafted} == {"length"}
    watch.assert_both()


def test_text_ends_at_a_stop_token_and_a_stop_string_within_a_run(llm, watch):
    drafting(llm, 0)
    (whole,) = told(llm.generate(prompts(1), GREEDY))
    (text, tokens, _, _) = whole[0]
    params = [
        SamplingParams(temperature=0, max_tokens=TOKENS, stop_token_ids=[token], ignore_eos=True)
        for token in tokens[:8]
    ]
    params += [
        SamplingParams(
            temperature=0, max_tokens=TOKENS, stop=[text[at : at + 2]], include_stop_str_in_output=at % 2 == 0
        )
        for at in range(8)
    ]
    without, drafted = both(llm, prompts(1) * 16, params)
    assert told(drafted) == told(without)
    assert {output.outputs[0].finish_reason for output in drafted} == {"stop"}
    made = [watch.tokens[output.request_id] for output in drafted]
    kept = [len(output.outputs[0].token_ids) for output in drafted]
    assert made[:8] == kept[:8], "the scheduler ends a run at a stop token"
    assert any(m > k for m, k in zip(made[8:], kept[8:], strict=True)), "no stop string ended within a run"


def test_the_end_of_sequence_counts_within_a_run_unless_it_is_ignored(llm, watch):
    bias = {llm.tokenizer.eos_id: 12.0}
    params = [
        SamplingParams(temperature=0, max_tokens=TOKENS, logit_bias=bias, ignore_eos=ignore) for ignore in (False, True)
    ]
    without, drafted = both(llm, prompts(1) * 2, params)
    assert told(drafted) == told(without)
    assert drafted[0].outputs[0].finish_reason == "stop"
    assert drafted[1].outputs[0].finish_reason == "length"


def test_several_completions_of_a_prompt(llm, watch):
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=TOKENS, ignore_eos=True)
    without, drafted = both(llm, prompts(2), params)
    assert told(drafted) == told(without)
    assert len({one.text for one in drafted[0].outputs}) == 3
    watch.assert_both()


STRUCTURES = {
    "regex": StructuredOutputs(regex="[ -Z]{12,24}"),
    "everything": StructuredOutputs(regex="[ -~]{20,30}"),
    "choice": StructuredOutputs(choice=["def main(): return", "import numpy as np"]),
    "json": StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}}}),
}


def test_drafts_are_checked_by_the_grammar(llm, watch):
    params = [
        SamplingParams(seed=i, temperature=1.0, max_tokens=40, structured_outputs=outputs)
        for i, outputs in enumerate(STRUCTURES.values())
    ]
    params += [
        SamplingParams(seed=9, temperature=1.0, max_tokens=TOKENS, bad_words=["def", "ab"], ignore_eos=True),
        SamplingParams(seed=10, temperature=1.0, max_tokens=TOKENS, ignore_eos=True),
    ]
    without, drafted = both(llm, prompts(len(params)), params)
    assert told(drafted) == told(without)
    watch.assert_both()
    accepted = {kind: watch.accepted[output.request_id] for kind, output in zip(STRUCTURES, drafted, strict=False)}
    assert accepted["everything"] > 0, accepted
    assert all(output.outputs[0].finish_reason in ("stop", "length") for output in drafted)
    assert drafted[2].outputs[0].text in ("def main(): return", "import numpy as np")


def test_a_cached_prefix_changes_no_text(llm, watch, greedy):
    drafting(llm, 2)
    assert told(llm.generate(prompts(6), GREEDY)) == greedy
    again = llm.generate(prompts(6), GREEDY)
    assert told(again) == greedy
    assert max(output.num_cached_tokens for output in again) >= 16
    watch.assert_both()


def test_preemption_changes_no_text(llm, watch, greedy):
    drafting(llm, 2)
    pool = llm.engine.core.scheduler.ranks[0].pool
    held = pool.allocate(pool.num_usable - 20)
    try:
        outputs = llm.generate(prompts(6), GREEDY)
    finally:
        pool.release(held)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert told(outputs) == greedy
    assert pool.num_used == 0
    watch.assert_both()


def test_the_number_of_drafts_follows_the_running_requests(llm, watch, greedy):
    drafting(llm, -1)
    params = [dataclasses.replace(GREEDY, max_tokens=count) for count in (24, 20, 16, 12, 8, 4)]
    outputs = told(llm.generate(prompts(6), params))
    for (one,), (expected,), wanted in zip(outputs, greedy, params, strict=True):
        assert one[1] == expected[1][: wanted.max_tokens]
    assert set(watch.widths) == {0, 2, 4}
    accepted_last = sum(sum(counts.accepted_per_position) for counts in watch.steps[-3:])
    assert accepted_last > 0, "nothing was accepted behind the holes"
    watch.assert_both()


def test_an_abort_in_the_middle_leaves_the_others_and_no_page(llm, watch, greedy):
    drafting(llm, 2)
    engine = llm.engine
    params = dataclasses.replace(GREEDY, output_kind=OutputKind.CUMULATIVE)
    for index, prompt in enumerate(prompts(6)):
        engine.add_request(f"a{index}", prompt, params)
    last, steps = {}, 0
    while engine.has_unfinished():
        for output in engine.step():
            last[output.request_id] = output
        steps += 1
        if steps == 5:
            engine.abort("a1")
            engine.abort("a5")
    assert last["a1"].outputs[0].finish_reason == "abort"
    for index in (0, 2, 3, 4):
        assert told([last[f"a{index}"]]) == greedy[index : index + 1]
    made = last["a1"].outputs[0].token_ids
    assert list(made) == greedy[1][0][1][: len(made)]
    assert engine.core.scheduler.ranks[0].pool.num_used == 0
    watch.assert_both()


def test_deltas_bring_several_tokens_and_add_up(llm, watch, greedy):
    drafting(llm, 2)
    engine = llm.engine
    params = dataclasses.replace(GREEDY, output_kind=OutputKind.DELTA, logprobs=1)
    engine.add_request("d", prompts(6)[4], params)
    tokens, text, sizes, usage = [], "", [], UsageCounter()
    while engine.has_unfinished():
        for output in engine.step():
            (one,) = output.outputs
            assert len(one.logprobs) == len(one.token_ids)
            tokens += one.token_ids
            text += one.text
            sizes.append(len(one.token_ids))
            usage.count(0, output)
    assert (text, tokens) == greedy[4][0][:2]
    assert max(sizes) > 1
    assert usage.usage()["completion_tokens"] == TOKENS


def test_a_row_at_its_last_tokens_asks_for_no_page_that_it_cannot_fill(llm, watch):
    """Six pages hold a token of prompt and 23 of the 24 that are made; with bounds of two steps under way a seventh was asked for."""
    drafting(llm, 2)
    pool = llm.engine.core.scheduler.ranks[0].pool
    held = pool.allocate(pool.num_usable - 6)
    try:
        for seed in range(4):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True)
            (output,) = llm.generate(prompts(1), params)
            assert output.metrics.num_preemptions == 0
    finally:
        pool.release(held)
    watch.assert_both()


@pytest.mark.slow
def test_in_bf16_tokens_are_the_same_wherever_the_two_largest_logits_are_apart(checkpoint, monkeypatch):
    """Each token is held to what an engine without drafts makes behind the very same text.

    Both round to 8 bits, in products of other shapes: that engine differs by 0.3 from itself in other batches. Apart is more than a
    32nd of the largest logit.
    """
    drafted, plain = (
        load(checkpoint, "dp=1", given, dtype="bfloat16", weights="fp8")
        for given in ({"method": "mtp", "num_speculative_tokens": 2}, None)
    )
    watch = Watch(drafted, monkeypatch)
    given = prompts(3)
    outputs = [output.outputs[0] for output in drafted.generate(given, dataclasses.replace(GREEDY, logprobs=2))]
    texts = [
        {"prompt_token_ids": prompt["prompt_token_ids"] + list(output.token_ids[:made])}
        for prompt, output in zip(given, outputs, strict=True)
        for made in range(TOKENS)
    ]
    alone = plain.generate(texts, dataclasses.replace(GREEDY, max_tokens=1, logprobs=2))
    bound = max(np.abs(logits).max() for logits in plain.logits([p["prompt_token_ids"] for p in given])) / 32
    apart = 0
    for index, output in enumerate(alone):
        of_run, place = outputs[index // TOKENS], index % TOKENS
        (best, first), (_, second) = sorted(output.outputs[0].logprobs[0].items(), key=lambda e: -e[1].logprob)[:2]
        if first.logprob - second.logprob > bound:
            apart += 1
            assert of_run.token_ids[place] == best, (index, first, second)
            assert abs(of_run.logprobs[place][best].logprob - first.logprob) < bound
    assert apart > len(alone) // 2, "most tokens are as good as tied"
    watch.assert_both()
    drafted.shutdown()
    plain.shutdown()
