"""Workloads have the lengths, the shared prefixes and the times that they promise."""

import functools
import json
from collections import Counter

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dsjax.bench.serve import prompts as forms_of_prompts
from dsjax.bench.serve.datasets import Dataset, DatasetError
from dsjax.bench.serve.options import WorkloadOptions
from dsjax.bench.serve.prompts import PromptSource, TextPrompts, TokenPrompts, UnmakablePromptError, count_tokens
from dsjax.bench.serve.server_facts import ServerFacts
from dsjax.options import OptionError

TOKENS = TokenPrompts(1000, special_ids=frozenset(range(10)))
NO_LENGTHS = {"dataset_name": "prefix-repetition", "prefix_repetition_prefix_len": 0, "prefix_repetition_suffix_len": 0}


def dataset_of(name="random", prompts=TOKENS, tokenizer=None, **options):
    """A workload of the options that begin with its name, given here without it."""
    short = name.replace("-", "_")
    named = {key if key == "dataset_path" else f"{short}_{key}": value for key, value in options.items()}
    return Dataset(WorkloadOptions(dataset_name=name, **named), prompts, PromptSource(tokenizer, 1000))


@pytest.fixture(scope="module")
def demo_tokenizer():
    return forms_of_prompts.read_tokenizer("demo")


def test_random_lengths_fill_their_range_and_another_draw_has_the_same_ones_and_other_prompts():
    requests = dataset_of(input_len=100, output_len=20, range_ratio=0.5).requests(400, 1)
    inputs, outputs = [len(r.prompt) for r in requests], [r.output_tokens for r in requests]
    assert inputs == [r.prompt_tokens for r in requests]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (10, 30)
    assert min(min(r.prompt) for r in requests) >= 10, "special tokens are not drawn"
    assert {len(r.prompt) for r in dataset_of(input_len=7, output_len=1).requests(5, 1)} == {7}
    dataset = dataset_of(input_len=100, output_len=20, range_ratio=0.5, prefix_len=8)
    first, again, other = (dataset.requests(50, seed) for seed in (1, 1, 2))
    assert first == again
    assert [(r.prompt_tokens, r.output_tokens) for r in first] == [(r.prompt_tokens, r.output_tokens) for r in other]
    assert not {tuple(r.prompt[:16]) for r in first} & {tuple(r.prompt[:16]) for r in other}
    assert len({tuple(r.prompt[:8]) for r in first}) == 1


def test_prefix_repetition_shares_its_prefixes_evenly():
    dataset = dataset_of("prefix-repetition", prefix_len=32, suffix_len=8, num_prefixes=4, output_len=5)
    requests = dataset.requests(42, 1)
    assert sorted(Counter(tuple(r.prompt[:32]) for r in requests).values()) == [10, 10, 11, 11]
    assert len({tuple(r.prompt) for r in requests}) == 42
    assert {(len(r.prompt), r.output_tokens) for r in requests} == {(40, 5)}
    assert dataset.cached_share_bound(42) == pytest.approx(0.8 * 38 / 42)


@pytest.mark.parametrize("count", [1, 37, 500])
def test_text_prompts_have_the_tokens_that_were_drawn(demo_tokenizer, count):
    prompts = TextPrompts(demo_tokenizer)
    text, length = prompts.assemble(prompts.draw(np.random.default_rng(0), count))
    assert length == count == count_tokens(demo_tokenizer, text)


def test_text_prompts_share_their_prefix_as_text(demo_tokenizer):
    lengths = {"prefix_len": 64, "suffix_len": 8, "num_prefixes": 2, "output_len": 1}
    requests = dataset_of("prefix-repetition", TextPrompts(demo_tokenizer), **lengths).requests(6, 1)
    ids = [demo_tokenizer.encode(r.prompt, add_special_tokens=False).ids for r in requests]
    assert len({tuple(i[:64]) for i in ids}) == 2
    assert {len(i) for i in ids} == {72}


def test_a_tokenizer_without_words_still_gives_text():
    alphabet = {character: number for number, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    prompts = TextPrompts(backend)
    text, length = prompts.assemble(prompts.draw(np.random.default_rng(0), 20))
    assert len(text) == length == 20


def test_sharegpt_takes_first_turns_that_fit(tmp_path, demo_tokenizer):
    def talk(*turns):
        return {"conversations": [{"from": "human", "value": turn} for turn in turns]}

    good = [talk(f"def function_{n}(x, y): return", "x plus y and so on", "more") for n in range(5)]
    bad = [talk("alone in the world"), talk("a", "too short a prompt"), talk("def f(x): " * 2000, "too long, this one")]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(bad + good + [{}]))
    sharegpt = functools.partial(dataset_of, "sharegpt", tokenizer=demo_tokenizer, dataset_path=str(path))
    requests = sharegpt().requests(100, 1)
    assert sorted(r.prompt for r in requests) == [f"def function_{n}(x, y): return" for n in range(5)]
    assert {r.output_tokens for r in requests} == {count_tokens(demo_tokenizer, "x plus y and so on")}
    assert {r.output_tokens for r in sharegpt(output_len=9).requests(2, 1)} == {9}
    path.write_text('{"a": 1}')
    with pytest.raises(DatasetError, match="no ShareGPT file"):
        sharegpt().requests(1, 1)


def test_mooncake_s_blocks_are_shared_by_hash_and_times_are_milliseconds(tmp_path):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [(9000, 1300, 7, [5, 6, 9]), (6000, 1100, 3, [5, 6, 7]), (7000, 10, 0, [1])]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(names, line, strict=True))) for line in lines) + "\n\n")
    for options, arrivals, lengths, outputs in (
        ({}, [0.0, 3.0], [1100, 1300], [3, 7]),
        ({"speed": 2.0, "length_scale": 0.125}, [0.0, 1.5], [138, 162], [1, 1]),
    ):
        first, second = dataset_of("trace", dataset_path=str(path), **options).requests(10, 1)
        assert [first.arrival, second.arrival] == arrivals
        assert [len(first.prompt), len(second.prompt)] == lengths
        assert [first.output_tokens, second.output_tokens] == outputs
        shared = round(1024 * options.get("length_scale", 1))
        assert first.prompt[:shared] == second.prompt[:shared]
        assert first.prompt[shared : lengths[0]] != second.prompt[shared : lengths[0]]


def test_burstgpt_s_columns(tmp_path):
    path, columns = tmp_path / "burst.csv", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    lines = ("5,ChatGPT,472,18,490,Conversation log", "45.5,ChatGPT,30,0,30,API log", "118,GPT-4,11,2,13,API log")
    path.write_text("\n".join((columns, *lines)) + "\n")
    requests = dataset_of("trace", dataset_path=str(path)).requests(10, 1)
    assert [(r.arrival, len(r.prompt), r.output_tokens) for r in requests] == [(0.0, 472, 18), (113.0, 11, 2)]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DatasetError, match="no trace"):
        dataset_of("trace", dataset_path=str(path)).requests(1, 1)


def test_what_the_server_cannot_take_is_left_out_and_said():
    lengths = {"random_input_len": 100, "random_output_len": 10, "random_range_ratio": 0.5}
    dataset = Dataset(WorkloadOptions(num_prompts=200, **lengths), TOKENS, PromptSource(None, 1000))
    kept, left_out = dataset.fitting_requests(1, 100)
    assert max(r.prompt_tokens + r.output_tokens for r in kept) <= 100
    assert len(kept) + left_out == 200
    assert left_out > 20
    with pytest.raises(DatasetError, match=r"the shortest has .* choose shorter lengths: --random-input-len"):
        dataset.fitting_requests(1, 12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataset_name": "sharegpt"}, "name it with --dataset-path"),
        ({"dataset_name": "trace", "dataset_path": "no-such.jsonl"}, "no-such.jsonl, which is no file"),
        ({"dataset_path": "trace.jsonl"}, "--dataset-name random reads no file"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio is 1.0, expected at least 0 and less than 1"),
        (NO_LENGTHS, "--prefix-repetition-prefix-len and -suffix-len are both 0"),
    ],
)
def test_files_that_are_not_there_and_lengths_that_cannot_be_are_found_before_a_server_is_asked(options, said):
    with pytest.raises(OptionError, match=said):
        WorkloadOptions(**options)


def test_a_file_that_went_away_since_then_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.touch()
    options = WorkloadOptions(dataset_name="trace", dataset_path=str(path))
    path.unlink()
    with pytest.raises(DatasetError, match=r"cannot read --dataset-path .*trace\.jsonl"):
        Dataset(options, TOKENS, PromptSource(None, 10)).fitting_requests(1, None)


def test_the_form_of_prompts():
    facts = ServerFacts("served", root="demo")
    source, nameless = PromptSource.find(None, None, facts), PromptSource.find(None, 50, ServerFacts("x"))
    for one, wanted, endpoint, forms in (
        (source, "auto", "completions", [TokenPrompts, TextPrompts]),
        (source, "auto", "chat", [TextPrompts]),
        (source, "text", "completions", [TextPrompts]),
        (nameless, "auto", "completions", [TokenPrompts]),
    ):
        assert [type(prompts) for prompts in one.forms(wanted, endpoint)] == forms
    with pytest.raises(UnmakablePromptError, match=r"--tokenizer .* or --vocab-size"):
        PromptSource.find(None, None, ServerFacts("nameless")).forms("auto", "completions")
    with pytest.raises(UnmakablePromptError, match="chat takes text only"):
        source.forms("tokens", "chat")
    with pytest.raises(UnmakablePromptError, match="found no tokenizer 'nowhere'"):
        PromptSource.find("nowhere", None, facts)
