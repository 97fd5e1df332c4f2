"""Sampling parameters end to end on a mesh with every axis: what is scored, what fails alone, text of a form, and nothing compiles for it.
These are the tests of `device/launch_rows.py` and `device/launch_results.py` too."""

import json
import re
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from worded_checkpoint import VOCABULARY, write_worded_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.device import buckets
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.device.launch_results import NO_TOKEN_ALLOWED
from dsjax.engine.schedule.request import FinishReason
from dsjax.model.softmax import log_softmax

pytestmark = pytest.mark.slow  # all together
FREE = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def compilations():
    """Counts what XLA compiles, from whatever asks for it."""
    counts = Counter()
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: counts.update([name]))
    return lambda: counts["/jax/core/compile/backend_compile_duration"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory, compilations, no_programs_on_disk):
    directory = str(write_worded_checkpoint(tmp_path_factory.mktemp("worded")))
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "prefill_chunk": 16, "page_size": 4}
    with LLM(directory, mesh="dp=2,tp=2", dtype="float32", **sizes) as made, pytest.MonkeyPatch.context() as patch:
        made.executor.buckets = Buckets(decode=(4,), prefill=(Rectangle(4, 16),), mixed=False)
        patch.setattr(buckets, "SCORED_CHUNK", 8)  # a chunk of a prompt is scored in two pieces
        made.logits([[1]])
        made.warm_up()
        assert compilations() >= len(made.executor.programs.compiled) > 5
        yield made


@pytest.fixture(scope="module")
def logprobs_of():
    """Logits of up to 40 positions to their log-probabilities, as the engine computes them, by one program for all lengths."""
    made = jax.jit(log_softmax).lower(jax.ShapeDtypeStruct((40, VOCABULARY), np.float32)).compile()
    return lambda logits: np.asarray(made(np.pad(logits, ((0, 40 - len(logits)), (0, 0)))))[: len(logits)]


@pytest.fixture(autouse=True)
def _nothing_compiles_and_no_page_is_kept(llm, compilations):
    before = compilations()
    yield
    assert compilations() == before
    assert llm.executor.counts().compilations_after_warm_up == 0
    assert [rank.pool.num_used for rank in llm.engine.core.scheduler.ranks] == [0, 0]


def prompt(length: int, seed: int = 0) -> dict:
    return {"prompt_token_ids": np.random.default_rng([seed, length]).integers(2, VOCABULARY - 1, size=length).tolist()}


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_prompt_logprobs_are_those_of_the_logits_at_every_position(llm, logprobs_of, kernels):
    prompts, plain = ([prompt(length, seed) for length in (1, 2, 16, 17, 40)] for seed in (0, 1))
    scored, free = replace(FREE, prompt_logprobs=3, logprobs=0), FREE
    outputs = llm.generate(prompts + plain, [scored] * 5 + [free] * 5)
    assert [output.prompt_logprobs for output in outputs[5:]] == [None] * 5
    for output in outputs[:5]:
        tokens, found = output.prompt_token_ids, output.prompt_logprobs
        assert len(found) == len(tokens)
        assert found[0] is None
        (logits,) = llm.logits([tokens])
        expected = logprobs_of(logits)
        for position, entry in enumerate(found[1:]):
            row, actual = expected[position], tokens[position + 1]
            assert next(iter(entry)) == actual
            assert 3 <= len(entry) <= 4
            assert entry[actual].rank == 1 + np.sum(row > row[actual])
            assert {one.rank for one in entry.values()} >= {1, 2, 3}
            for token, one in entry.items():
                assert one.logprob == row[token]
    assert tokens_of(llm.generate(prompts, free)) == tokens_of(outputs[:5])


@pytest.mark.parametrize("scored", [{}, {"prompt_logprobs": 1}], ids=["plain", "scored"])
def test_a_prompt_that_is_not_finite_fails_at_its_first_chunk_and_alone(llm, monkeypatch, scored):
    good = [prompt(20, 2), prompt(5, 2)]
    expected = tokens_of(llm.generate(good, FREE))
    clean, poison = llm.executor.params["embed.weight"], 329
    poisoned = np.asarray(clean).copy()
    poisoned[poison] = np.nan
    monkeypatch.setitem(llm.executor.params, "embed.weight", jax.device_put(poisoned, clean.sharding))
    steps, step = [], llm.engine.core.step
    monkeypatch.setattr(llm.engine.core, "step", lambda *given, **how: steps.append(step(*given, **how)) or steps[-1])
    bad = {"prompt_token_ids": [5, poison, *prompt(90)["prompt_token_ids"]]}
    output, *others = llm.generate([bad, *good], [replace(FREE, **scored), FREE, FREE])
    [failed] = output.outputs
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, "non_finite_values")
    assert "not finite" in failed.stop_reason
    assert any(update.finish_reason is FinishReason.ERROR for update in steps[0])
    assert tokens_of(others) == expected
    monkeypatch.undo()
    assert tokens_of(llm.generate(good, FREE)) == expected


FORMS = [
    ({"regex": r"[0-9]{2,4}(-[a-f]+)?!"}, lambda text: re.fullmatch(r"[0-9]{2,4}(-[a-f]+)?!", text)),
    ({"choice": ["yes", "no", 'may"be']}, lambda text: text in ("yes", "no", 'may"be')),
    ({"json": {"enum": [1, 22, "x"]}}, lambda text: json.loads(text) in (1, 22, "x")),
    ({"grammar": 'start: "(" start ")" | /[ab]{1,3}/'}, lambda text: re.fullmatch(r"(\()*[ab]{1,3}(\))*", text)),
]


def test_text_has_the_form_asked_for_beside_rows_that_are_free(llm):
    usual = {"seed": 3, "n": 2, "max_tokens": 64, "min_tokens": 60}
    structured = [SamplingParams(**usual, structured_outputs=StructuredOutputs(**form)) for form, _ in FORMS]
    free = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    alone = llm.generate(prompt(12), free)
    outputs = llm.generate([prompt(7)] * len(FORMS) + [prompt(12)], [*structured, free])
    assert tokens_of(outputs[-1:]) == tokens_of(alone)
    for (form, holds), output in zip(FORMS, outputs[:-1], strict=True):
        for completion in output.outputs:
            assert completion.finish_reason is FinishReason.STOP or "grammar" in form
            if completion.finish_reason is FinishReason.STOP:
                assert holds(completion.text), completion.text
                assert len(completion.token_ids) < 60 or "grammar" in form
    assert sum(c.finish_reason is FinishReason.STOP for output in outputs[:-1] for c in output.outputs) >= 5


def test_a_request_that_comes_to_no_legal_token_fails_alone_and_says_why(llm):
    impossible = replace(FREE, allowed_token_ids=[5], structured_outputs=StructuredOutputs(choice=["zzz"]))
    expected = tokens_of(llm.generate(prompt(9), FREE))
    output, well = llm.generate([prompt(8), prompt(9)], [impossible, FREE])
    [failed] = output.outputs
    assert (failed.finish_reason, failed.stop_reason) == (FinishReason.ERROR, NO_TOKEN_ALLOWED)
    assert (failed.error, failed.token_ids) == ("structured_output_failed", [])
    assert tokens_of([well]) == expected
