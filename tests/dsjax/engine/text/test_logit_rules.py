"""A request's rules on the host: masks that ban what would complete a word, and follow a grammar."""

import numpy as np
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.device.sampler import allowed
from dsjax.engine.text.logit_rules import LogitRules, ThinkingBudget
from dsjax.engine.text.structured import GrammarCompiler

V = 70  # no multiple of 32


def test_masks_ban_what_the_output_and_each_draft_before_would_complete():
    rules = LogitRules(SamplingParams(allowed_token_ids=list(range(60))), V, frozenset(), ((7,), (1, 2, 9), (9, 9)))
    assert rules.needs_tokens
    masks = rules.masks([4, 1], [2, 9])
    banned = [set(np.flatnonzero(~np.asarray(allowed(mask, V))).tolist()) for mask in masks]
    above = set(range(60, V))
    assert banned == [above, above | {9}, above | {9}]
    assert [entry[0] for entry in rules.biases().tolist()] == [7]  # a single token needs none before it
    assert rules.follow([4, 4]) == (2, None)


TOKENIZER = tiny_tokenizer()
(A,), (B,) = (TOKENIZER.encode(letter, add_special_tokens=False) for letter in "ab")


def following(regex: str, **params) -> LogitRules:
    """The rules of a request whose text has this form."""
    eos, size = TOKENIZER.eos_id, TOKENIZER.vocab_size
    constraint = GrammarCompiler(TOKENIZER, size, [eos]).compile(StructuredOutputs(regex=regex))
    return LogitRules(SamplingParams(**params), size, frozenset({eos}), constraint=constraint)


def test_masks_of_a_grammar_hold_the_end_back_unless_the_form_is_complete():
    rules, eos = following("a{1,2}", min_tokens=9, max_tokens=20), TOKENIZER.eos_id
    may_end = lambda made: [bool(allowed(mask, TOKENIZER.vocab_size)[eos]) for mask in rules.masks(made, [])]  # noqa: E731
    assert len(rules.biases()) == 0
    assert rules.follow([A]) == (1, None)
    assert may_end([A]) == [False]  # the form allows an end, the least number of tokens does not
    assert rules.follow([A]) == (1, None)
    assert may_end([A, A]) == [True]  # nothing but the end can follow


def test_rules_follow_tokens_until_the_grammar_cannot_go_on():
    rules = following("aaa")
    count, error = rules.follow([A, B, A])
    assert count == 1
    assert "cannot go on" in error
    assert not rules.masks([A], []).any()


def test_reasoning_ends_when_its_budget_is_used_also_behind_drafts():
    begin, end = 5, 6
    rules = LogitRules(SamplingParams(), V, thinking=ThinkingBudget(3, (begin, end), [1, begin, 2, end, begin]))
    assert rules.needs_tokens
    only_end = lambda drafts: [np.flatnonzero(allowed(mask, V)).tolist() == [end] for mask in rules.masks([], drafts)]  # noqa: E731
    assert only_end([7, 8, 9, 9]) == [False, False, False, True, True]
    assert only_end([7, end, 8, 9, 9]) == [False] * 6
    assert rules.follow([7, 8]) == (2, None)
    assert only_end([9, end, 9]) == [False, True, False, False]
    assert rules.follow([9, end]) == (2, None)
    assert only_end([begin, 7, 7, 7]) == [False, False, False, False, True]


def test_a_budget_of_none_at_all_lets_no_reasoning_begin():
    rules = LogitRules(SamplingParams(), V, thinking=ThinkingBudget(0, (5, 6), [5]))
    assert [np.flatnonzero(allowed(mask, V)).tolist() for mask in rules.masks([], [])] == [[6]]
