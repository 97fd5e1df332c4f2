"""Sampling parameters end to end on a mesh with every axis: the text is what they mean, and nothing compiles for it.

These are the tests of `device/launch_rows.py` too.
"""

import json
import re

import jax
import numpy as np
import pytest
from published_logits import published
from worded_checkpoint import VOCABULARY, write_worded_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.sampling_params import OutputKind, SamplingError
from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.device import buckets
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.device.launch_rows import NOTHING_ALLOWED
from dsjax.engine.schedule.request import FinishReason
from dsjax.model.softmax import log_softmax

MESH = "dp=2,tp=2"


class Compilations:
    """Counts what XLA compiles, from whatever asks for it."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, name: str, *_, **__) -> None:
        self.count += name == "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def compilations():
    return Compilations()


@pytest.fixture(scope="module")
def llm(tmp_path_factory, compilations, no_programs_on_disk):
    made = LLM(
        str(write_worded_checkpoint(tmp_path_factory.mktemp("worded"))),
        mesh=MESH,
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        prefill_chunk=16,
        page_size=4,
    )
    made.executor.buckets = Buckets(decode=(4,), prefill=(Rectangle(4, 16),), mixed=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "SCORED_CHUNK", 8)  # a chunk of a prompt is scored in two pieces
        made.logits([[1]])
        made.warm_up()
        assert compilations.count >= len(made.executor.programs.compiled) > 5
        yield made
    made.shutdown()


@pytest.fixture(scope="module")
def logprobs_of():
    """Logits of up to 40 positions to their log-probabilities, as the engine computes them, by one program for all lengths."""
    made = jax.jit(log_softmax).lower(jax.ShapeDtypeStruct((40, VOCABULARY), np.float32)).compile()
    return lambda logits: np.asarray(made(np.pad(logits, ((0, 40 - len(logits)), (0, 0)))))[: len(logits)]


@pytest.fixture(autouse=True)
def _nothing_compiles_and_no_page_is_kept(llm, compilations):
    before = compilations.count
    yield
    assert compilations.count == before
    assert llm.executor.counts().compilations_after_warm_up == 0
    assert [rank.pool.num_used for rank in llm.engine.core.scheduler.ranks] == [0, 0]


def prompt(length: int, seed: int = 0) -> dict:
    return {"prompt_token_ids": np.random.default_rng([seed, length]).integers(2, VOCABULARY - 1, size=length).tolist()}


@pytest.mark.slow
def test_prompt_logprobs_are_those_of_the_logits_at_every_position(llm, logprobs_of, kernels):
    lengths = (1, 2, 16, 17, 40)
    prompts = [prompt(length) for length in lengths]
    plain = [prompt(length, 1) for length in lengths]
    scored = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=3, logprobs=0)
    free = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
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
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, free)] == [
        o.outputs[0].token_ids for o in outputs[:5]
    ]


def test_prompt_logprobs_come_once_in_a_stream_and_with_a_token(llm):
    params = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=0, output_kind=OutputKind.DELTA
    )
    llm.engine.add_request("a", prompt(40), params)
    outputs = []
    while llm.engine.has_unfinished():
        outputs += llm.engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1, 1]
    assert [output.prompt_logprobs is None for output in outputs] == [False, True, True]
    assert len(outputs[0].prompt_logprobs) == 40


@pytest.mark.parametrize("scored", [{}, {"prompt_logprobs": 1}], ids=["plain", "scored"])
def test_a_prompt_that_is_not_finite_fails_at_its_first_chunk_and_alone(llm, scored):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    good = [prompt(20, 2), prompt(5, 2)]
    expected = [output.outputs[0].token_ids for output in llm.generate(good, params)]
    clean, poison = llm.executor.params["embed.weight"], 329
    poisoned = np.asarray(clean).copy()
    poisoned[poison] = np.nan
    llm.executor.params["embed.weight"] = jax.device_put(poisoned, clean.sharding)
    try:
        bad = {"prompt_token_ids": [5, poison, *prompt(90)["prompt_token_ids"]]}
        steps, step = [], llm.engine.core.step
        llm.engine.core.step = lambda *given, **how: steps.append(step(*given, **how)) or steps[-1]
        failed, *others = llm.generate(
            [bad, *good], [SamplingParams(temperature=0, max_tokens=3, **scored), params, params]
        )
        assert failed.outputs[0].finish_reason is FinishReason.ERROR
        assert "not finite" in failed.outputs[0].stop_reason
        assert failed.outputs[0].error == "non_finite_values"
        assert any(update.finish_reason is FinishReason.ERROR for update in steps[0])
        assert [output.outputs[0].token_ids for output in others] == expected
    finally:
        llm.engine.core.step = step
        llm.executor.params["embed.weight"] = clean
    assert [output.outputs[0].token_ids for output in llm.generate(good, params)] == expected


def test_the_greedy_token_s_logprob_is_the_greatest_and_ranks_first(llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
    for output in llm.generate([prompt(length) for length in (3, 9, 20)], params):
        for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            assert next(iter(entry)) == token
            assert entry[token].rank == 1
            assert entry[token].logprob == max(one.logprob for one in entry.values())


@pytest.mark.parametrize(
    "case",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0, "frequency_penalty": 0.5},
        {"logit_bias": {7: 30.0, 9: 29.5}, "frequency_penalty": 2.0},
        {"allowed_token_ids": [5, 32, 64, 329], "presence_penalty": 0.5},
        {"min_tokens": 8, "stop_token_ids": list(range(2, 200))},
    ],
    ids=lambda case: "+".join(case),
)
def test_greedy_tokens_are_the_greatest_of_the_changed_logits(llm, case):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **case)
    prompts = [prompt(length) for length in (1, 5, 18)]
    alongside = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=1)
    outputs = llm.generate(prompts + [prompt(11)] * 2, [params] * 3 + [alongside] * 2)[:3]
    numbers = dict(case)
    numbers["stop_ids"] = numbers.pop("stop_token_ids", ())
    for output in outputs:
        made = output.outputs[0].token_ids
        assert len(made) == 8
        (logits,) = llm.logits([output.prompt_token_ids + made])
        for count, token in enumerate(made):
            row = logits[len(output.prompt_token_ids) + count - 1]
            changed = published(row, output.prompt_token_ids, made[:count], **numbers)
            assert changed[token] >= changed.max() - 1e-4  # logits of another shape's program


def test_bad_words_never_come_and_would_have(llm):
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate(prompt(6), free)
    made = output.outputs[0].token_ids
    # A pair that the tokenizer gives back as these two tokens.
    texts = [(i, llm.tokenizer.decode(made[i : i + 2], skip_special_tokens=False)) for i in range(len(made) - 1)]
    word = next(
        text
        for i, text in texts
        if "�" not in text and text.strip() == text and llm.tokenizer.encode(text, False) == made[i : i + 2]
    )
    pair = llm.tokenizer.encode(word, False)
    (output,) = llm.generate(prompt(6), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, bad_words=[word]))
    found = output.outputs[0].token_ids
    assert pair not in [found[i : i + 2] for i in range(len(found) - 1)]


FORMS = [
    ({"regex": r"[0-9]{2,4}(-[a-f]+)?!"}, lambda text: re.fullmatch(r"[0-9]{2,4}(-[a-f]+)?!", text)),
    ({"choice": ["yes", "no", 'may"be']}, lambda text: text in ("yes", "no", 'may"be')),
    (
        {
            "json": {
                "type": "object",
                "properties": {"a": {"enum": [1, 22, "x"]}, "b": {"type": "boolean"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        },
        lambda text: set(json.loads(text)) == {"a", "b"} and json.loads(text)["a"] in (1, 22, "x"),
    ),
    ({"grammar": 'start: "(" start ")" | /[ab]{1,3}/'}, lambda text: re.fullmatch(r"(\()*[ab]{1,3}(\))*", text)),
]


def test_text_has_the_form_asked_for_beside_rows_that_are_free(llm):
    structured = [
        SamplingParams(
            temperature=1.0, seed=3, n=2, max_tokens=64, min_tokens=60, structured_outputs=StructuredOutputs(**form)
        )
        for form, _ in FORMS
    ]
    free = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    (alone,) = llm.generate(prompt(12), free)
    outputs = llm.generate([prompt(7)] * len(FORMS) + [prompt(12)], [*structured, free])
    assert outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    for (form, holds), output in zip(FORMS, outputs[:-1], strict=True):
        for completion in output.outputs:
            assert completion.finish_reason is FinishReason.STOP or "grammar" in form or "json" in form
            if completion.finish_reason is FinishReason.STOP:
                assert holds(completion.text), completion.text
                assert len(completion.token_ids) < 60 or "grammar" in form or "json" in form
    assert sum(c.finish_reason is FinishReason.STOP for output in outputs[:-1] for c in output.outputs) >= 5


def test_the_form_begins_behind_the_token_that_it_comes_after(llm):
    think = llm.tokenizer.encode("</think>", False)[-1]
    form = StructuredOutputs(regex="[0-9]{3}", structured_after=think)
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=60, structured_outputs=form, logit_bias={think: 4.0})
    found = [output.outputs[0] for output in llm.generate([prompt(5, seed) for seed in range(6)], params)]
    reached = [one for one in found if one.finish_reason is FinishReason.STOP and think in one.token_ids]
    assert reached
    assert any(one.token_ids.index(think) > 0 for one in reached)
    for one in reached:
        text = llm.tokenizer.decode(one.token_ids[one.token_ids.index(think) + 1 : -1], skip_special_tokens=False)
        assert re.fullmatch("[0-9]{3}", text)


def test_a_request_that_comes_to_no_legal_token_fails_alone_and_says_why(llm):
    impossible = SamplingParams(
        temperature=0, max_tokens=5, allowed_token_ids=[5], structured_outputs=StructuredOutputs(choice=["zzz"])
    )
    free = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = llm.generate(prompt(9), free)[0].outputs[0].token_ids
    failed, well = llm.generate([prompt(8), prompt(9)], [impossible, free])
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert failed.outputs[0].stop_reason == NOTHING_ALLOWED
    assert failed.outputs[0].error == "structured_output_failed"
    assert failed.outputs[0].token_ids == []
    assert well.outputs[0].token_ids == expected


def test_an_impossible_grammar_is_refused_and_nothing_of_it_stays(llm):
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a("))
    with pytest.raises(SamplingError, match="regex"):
        llm.generate([prompt(3), prompt(4)], params)
    assert not llm.engine.has_unfinished()


def test_recorded_experts_count_every_token_on_every_layer(llm):
    executor, config = llm.executor, llm.config
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    assert executor.expert_counts() is None
    executor.set_recording(True)
    try:
        lengths = (3, 21, 30)
        llm.generate([prompt(length, 4) for length in lengths], params)
        counts = executor.expert_counts()
        assert executor.counts().experts.rounds == counts.rounds, "what was read is told of every step from then on"
        assert (counts.logical_load == counts.tokens_per_expert).all(), "experts lie in order here"
        tokens = sum(lengths) + len(lengths) * 4  # the last token made is never computed
        assert counts.tokens_per_expert.shape == (config.num_moe_layers, config.n_routed_experts)
        assert (counts.tokens_per_expert.sum(axis=1) == tokens * config.num_experts_per_tok).all()
        assert counts.rounds >= config.num_moe_layers
        assert counts.dispatch_bytes > 0
        assert 0 <= counts.padding_share < 1
        assert len(counts.rows_sent) == 4
        llm.generate([prompt(2, 4)], params)
        assert executor.expert_counts().tokens_per_expert.sum() > counts.tokens_per_expert.sum()
        executor.set_recording(False)
        assert executor.expert_counts() is None
        executor.set_recording(True)
        assert executor.expert_counts() is None
    finally:
        executor.set_recording(False)
