"""The published recipes: every option of them is written, or there is a reason; and the page says what is written today."""

import dataclasses

import pytest

from dsjax.engine.experts.eplb import EplbConfig
from tools.recipes_table import PAGE, alike, page, problems, recipes, rows


def test_every_option_that_differs_has_a_reason_and_no_reason_is_left_over():
    assert problems() == []


def test_the_page_says_what_is_written_today():
    assert PAGE.read_text(encoding="utf-8") == page(), "python tools/recipes_table.py"


def test_all_published_recipes_are_there_with_their_layouts():
    layouts = {name: [side["mesh"] for side in recipe["sides"]] for name, recipe in recipes().items()}
    assert layouts == {
        "vllm-dep16": ["dp=16", "dp=16"],
        "sglang-tep8-dep8": ["tp=8", "dp=8"],
        "sglang-tep16-dep16": ["tp=16", "dp=16"],
        "tensorrt-llm-gb200-36": ["dp=4", "dp=32"],
        "vllm-h20-32": ["dp=32"],
    }


@pytest.mark.parametrize(
    ("recipe", "side", "option", "value"),
    [
        ("vllm-dep16", "decode", "--max-num-seqs", "512"),
        ("vllm-dep16", "decode", "--dbo-decode-token-threshold", "32"),
        ("vllm-dep16", "prefill", "--eplb-config", None),
        ("vllm-h20-32", "prefill and decode", "--api-server-count", "8"),
        ("vllm-h20-32", "prefill and decode", "--eplb-step-interval", "3000"),
        ("tensorrt-llm-gb200-36", "prefill", "max_seq_len", "1227"),
        ("tensorrt-llm-gb200-36", "decode", "max_seq_len", "2251"),
        ("tensorrt-llm-gb200-36", "decode", "stream_interval", "20"),
    ],
)
def test_what_the_planner_writes_is_the_recipe_s_value(recipe, side, option, value):
    (found,) = [row for row in rows(recipes()[recipe]) if (row.side, row.option) == (side, option)]
    assert alike(found.there, found.ours)
    assert value is None or found.ours == value


def test_what_a_recipe_gives_its_pods_is_there_and_what_ours_have():
    found = {
        (name, row.option): (row.there, row.own)
        for name, recipe in recipes().items()
        for row in rows(recipe)
        if row.option in ("sharedMemorySize", "storage")
    }
    published = ["sglang-tep16-dep16", "sglang-tep8-dep8", "tensorrt-llm-gb200-36", "vllm-dep16"]
    assert found == {
        **{(name, "sharedMemorySize"): ("80Gi", "16Gi") for name in published[:2]},
        **{(name, "storage"): ("1500Gi", "810Gi") for name in published},
    }


def test_no_reason_denies_an_option_that_the_engine_has():
    fields = {field.name for field in dataclasses.fields(EplbConfig)}
    for recipe in recipes().values():
        for reason in recipe["why_dsjax"].values():
            assert (
                not {word for word in reason.partition(" is no option")[0].split() if " is no option" in reason}
                & fields
            )


def test_a_value_that_drifts_apart_and_a_reason_in_vain_are_found():
    row = next(row for row in rows(recipes()["vllm-dep16"]) if row.option == "--max-num-seqs" and row.side == "decode")
    assert not list(row.problems)
    assert list(dataclasses.replace(row, ours="256").problems) == [
        "decode --max-num-seqs is '512', and dsjax plan has '256' and no reason"
    ]
    assert "a reason and the same value" in next(dataclasses.replace(row, why="because").problems)


def test_numbers_truth_and_json_are_compared_by_what_they_mean():
    assert alike("", "true")
    assert alike('{"a": 1, "b": 2}', '{"b": 2, "a": 1}')
    assert not alike("512", "256")
