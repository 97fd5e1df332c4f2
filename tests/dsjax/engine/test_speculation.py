"""Speculative decoding gives the text of decoding without drafts, whatever a request asks for and whatever happens to it.

The module of this tiny model often agrees with the model and often does not (``drafting_checkpoint.py``), and every comparison says
that drafts were accepted and refused in it. More meshes, dispatches and forms: ``dsjax doctor --exact``.

`test_exactness.py` and `test_disaggregated.py` have drafts on several devices, with preemption and of a sparse model. These are the tests
of `device/programs.py` too.
"""

import dataclasses
import itertools
import string

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from watched_drafts import Watch

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.schedule.draft_choice import DraftChoice

pytestmark = pytest.mark.slow

TABLE = ((1, 1, 4), (2, 3, 0), (4, 8, 2))
"""Drafts by running requests."""
TOKENS = 24


def load(directory, speculation: dict | None) -> LLM:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "prefill_chunk": 16, "page_size": 4}
    llm = LLM(str(directory), mesh="dp=1", dtype="float32", speculative_config=speculation, **sizes)
    llm.executor.buckets = Buckets((4,), (Rectangle(4, 16),), mixed=False, speculation=llm.args.speculation)
    return llm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_drafting_checkpoint(tmp_path_factory.mktemp("drafting"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    """An engine that can draft up to 4 tokens; `drafting` says how many it drafts."""
    given = {"method": "mtp", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": TABLE}
    with load(checkpoint, given) as made:
        yield made


@pytest.fixture
def watch(llm, monkeypatch):
    return Watch(llm, monkeypatch)


def drafting(llm: LLM, count: int) -> None:
    """How many tokens the engine drafts from now on, from a cold cache; −1: as its table has it."""
    config = llm.args.speculation
    if count >= 0:
        config = SpeculativeConfig(method="mtp", num_speculative_tokens=count) if count else None
    scheduler = llm.engine.core.scheduler
    scheduler.config = dataclasses.replace(scheduler.config, speculation=config)
    llm.engine.core.flush_prefix_cache()


def prompts(count: int) -> list[dict]:
    rng, lengths = np.random.default_rng(3), (1, 5, 9, 17, 30, 3)
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


@pytest.fixture(scope="module")
def greedy(checkpoint):
    with load(checkpoint, None) as plain:
        outputs = plain.generate(prompts(6), GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 6
    return told(outputs)


@pytest.mark.parametrize("count", [2, 4])
def test_greedy_tokens_are_those_of_an_engine_without_the_module(llm, watch, greedy, count):
    drafting(llm, count)
    assert told(llm.generate(prompts(6), GREEDY)) == greedy
    watch.assert_both()
    assert set(watch.widths) == {count}
    assert all(len(counts.accepted_per_position) <= count for counts in watch.steps)


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
    counts = [(watch.verified[one.request_id], watch.accepted[one.request_id]) for one in drafted]
    return dict(zip(KINDS, zip(without, drafted, counts, strict=True), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_text_is_the_same(sampled, kind):
    without, drafted, (verified, accepted) = sampled[kind]
    assert told([drafted]) == told([without])
    assert verified > accepted
    if kind not in ("allowed", "hot"):  # the module knows nothing of what is allowed
        assert accepted > 0


def test_logprobs_are_of_each_token_of_a_run_and_equal_to_the_bit(kernels, sampled):
    without, drafted, _ = sampled["logprobs"]
    assert drafted.outputs[0].logprobs == without.outputs[0].logprobs
    assert drafted.outputs[0].cumulative_logprob == without.outputs[0].cumulative_logprob
    assert len(drafted.prompt_logprobs) == len(drafted.prompt_token_ids)
    assert drafted.prompt_logprobs == without.prompt_logprobs


def test_text_ends_at_a_stop_token_and_a_stop_string_within_a_run(llm, watch):
    drafting(llm, 0)
    [[(text, tokens, _, _)]] = told(llm.generate(prompts(1), GREEDY))
    ends = [{"stop_token_ids": [token]} for token in tokens[:8]]
    ends += [{"stop": [text[at : at + 2]], "include_stop_str_in_output": at % 2 == 0} for at in range(8)]
    without, drafted = both(llm, prompts(1) * 16, [dataclasses.replace(GREEDY, **end) for end in ends])
    assert told(drafted) == told(without)
    assert {output.outputs[0].finish_reason for output in drafted} == {"stop"}
    made = [watch.tokens[output.request_id] for output in drafted]
    kept = [len(output.outputs[0].token_ids) for output in drafted]
    assert made[:8] == kept[:8], "the scheduler ends a run at a stop token"
    assert any(m > k for m, k in zip(made[8:], kept[8:], strict=True)), "no stop string ended within a run"


def test_a_run_of_accepted_drafts_ends_at_max_tokens_and_at_the_end_of_sequence_unless_it_is_ignored(llm, watch):
    greedy = {"temperature": 0, "max_tokens": TOKENS, "logit_bias": {llm.tokenizer.eos_id: 12.0}}
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in range(1, 13)]
    params += [SamplingParams(**greedy), SamplingParams(**greedy, ignore_eos=True)]
    params.append(SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=TOKENS, ignore_eos=True))
    without, drafted = both(llm, prompts(1) * len(params), params)
    assert told(drafted) == told(without)
    assert [len(output.outputs[0].token_ids) for output in drafted[:12]] == list(range(1, 13))
    assert [output.outputs[0].finish_reason for output in drafted] == ["length"] * 12 + ["stop", "length", "length"]
    assert len({one.text for one in drafted[-1].outputs}) == 3
    watch.assert_both()


STRUCTURES = {
    "regex": StructuredOutputs(regex="[ -Z]{12,24}"),
    "everything": StructuredOutputs(regex="[ -~]{20,30}"),
    "choice": StructuredOutputs(choice=["def main(): return", "import numpy as np"]),
    "json": StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}}}),
}


def test_drafts_are_checked_by_the_grammar(llm, watch):
    asked = [{"structured_outputs": outputs, "max_tokens": 40} for outputs in STRUCTURES.values()]
    asked += [{"bad_words": ["def", "ab"], "max_tokens": TOKENS, "ignore_eos": True}]
    asked += [{"max_tokens": TOKENS, "ignore_eos": True}]
    params = [SamplingParams(seed=i, **one) for i, one in enumerate(asked)]
    without, drafted = both(llm, prompts(len(params)), params)
    assert told(drafted) == told(without)
    watch.assert_both()
    accepted = {kind: watch.accepted[output.request_id] for kind, output in zip(STRUCTURES, drafted, strict=False)}
    assert accepted["everything"] > 0, accepted
    assert all(output.outputs[0].finish_reason in ("stop", "length") for output in drafted)
    assert drafted[2].outputs[0].text in ("def main(): return", "import numpy as np")


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


def test_a_measured_number_of_drafts_changes_no_text(checkpoint, greedy, monkeypatch):
    given = {"method": "mtp", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": "auto"}
    with load(checkpoint, given) as llm:
        watch, numbers, core = Watch(llm, monkeypatch), itertools.cycle([2, 0, 0, 1, 2, 2, 0]), llm.engine.core
        monkeypatch.setattr(core.scheduler, "choose_drafts", lambda: next(numbers))
        assert told(llm.generate(prompts(6), GREEDY)) == greedy
        watch.assert_both()
        assert set(watch.widths) == {0, 1, 2}
        assert core.statistics()["draft_choice"] == core.part(DraftChoice).statistics() in (0, 1, 2)
