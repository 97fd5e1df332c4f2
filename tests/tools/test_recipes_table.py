"""The published recipes: every option of them is written, or there is a reason; and the page says what is written today."""

import dataclasses
import shlex

import pytest
from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.engine.experts.eplb import EplbConfig
from tools.recipes_table import PAGE, alike, command, mesh, page, planned, problems, read_command, recipes, rows


def test_every_option_that_differs_has_a_reason_and_no_reason_is_left_over():
    assert problems() == []


def test_the_page_says_what_is_written_today():
    assert PAGE.read_text(encoding="utf-8") == page(), "python tools/recipes_table.py"


def test_all_published_recipes_are_there_with_their_layouts():
    layouts = {name: [mesh(recipe, side["role"]) for side in recipe["sides"]] for name, recipe in recipes().items()}
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


def test_the_command_on_the_page_writes_the_script_whose_values_are_compared(tmp_path):
    for name in ("tensorrt-llm-gb200-36", "vllm-h20-32"):
        recipe, path = recipes()[name], tmp_path / f"{name}.sh"
        line = command(recipe)
        assert f"```\n{line}\n```" in PAGE.read_text(encoding="utf-8")
        result = CliRunner().invoke(app, [*shlex.split(line)[1:], "--recipe", str(path)])
        assert result.exit_code == 0, result.output
        script = path.read_text(encoding="utf-8")
        started = [one.removeprefix("exec ") for one in script.splitlines() if one.startswith("exec ")]
        for values in planned(recipe["engine"], line).values():
            found = [read_command(recipe["engine"], one) for one in started]
            shown = {key: value for key, value in values.items() if key.startswith("--")}
            assert any(shown.items() >= {k: v for k, v in one.items() if k.startswith("--")}.items() for one in found)


def test_the_planner_itself_finds_how_many_requests_a_cache_has_room_for():
    for name, option, requests in (("vllm-dep16", "--max-num-seqs", "440"), ("vllm-h20-32", "--max-num-seqs", "3")):
        assert "--concurrency" not in command(recipes()[name])
        assert requests in [row.ours for row in rows(recipes()[name]) if row.option == option]


def test_a_value_that_is_passed_on_names_an_argument_that_the_command_has():
    passed = {(name, row.passed) for name, recipe in recipes().items() for row in rows(recipe) if row.passed}
    assert ("vllm-dep16", "--decode-mesh") in passed
    assert all(argument in command(recipes()[name]) for name, argument in passed)


def test_a_line_for_a_shell_is_read_as_options_variables_and_a_model():
    line = "srun --nodes=8 trtllm-llmapi-launch env A_B=1 trtllm-serve the/model --tp_size 32 --flag --port 8002"
    assert read_command("tensorrt-llm", line) == {
        "A_B": "1",
        "MODEL": "the/model",
        "--tp_size": "32",
        "--flag": "",
        "--port": "8002",
    }


def test_what_a_recipe_gives_its_pods_is_there_and_what_ours_have():
    asked = ("sharedMemorySize", "storage", "accessModes", "rdma/ib", "cpu", "memory", "numNodes")
    found = {
        (name, row.option): (row.there, row.own)
        for name, recipe in recipes().items()
        for row in rows(recipe)
        if row.option in asked
    }
    published = ["sglang-tep16-dep16", "sglang-tep8-dep8", "tensorrt-llm-gb200-36", "vllm-dep16"]
    gb200 = {
        "sharedMemorySize": ("800Gi", "16Gi"),
        "cpu": ("130", "12"),
        "memory": ("850Gi", "32Gi"),
        "numNodes": ("9", "8"),
    }
    assert found == {
        **{(name, "sharedMemorySize"): ("80Gi", "16Gi") for name in published},
        **{(name, "storage"): ("1500Gi", "810Gi") for name in published},
        **{(name, "accessModes"): ("ReadWriteMany", "ReadWriteMany") for name in published},
        **{("tensorrt-llm-gb200-36", option): values for option, values in gb200.items()},
        ("vllm-dep16", "rdma/ib"): ("8", "1"),
    }


def test_options_that_another_section_names_are_there_with_the_place():
    found = {(name, row.option): row.where for name, recipe in recipes().items() for row in rows(recipe) if row.where}
    assert found["vllm-h20-32", "NCCL_NET_GDR_LEVEL"] == "5.2"
    assert found["vllm-h20-32", "--eplb-rebalance-freq"] == "5.2"
    assert "perf.sh" in found["vllm-dep16", "benchmark.concurrency"]
    assert ("vllm-h20-32", "--num-redundant-experts") not in found


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
    assert list(dataclasses.replace(row, ours="256", why="").problems) == [
        "decode --max-num-seqs is '512', and dsjax plan has '256' and no reason"
    ]
    assert "a reason and the same value" in next(dataclasses.replace(row, ours="512").problems)


def test_numbers_truth_and_json_are_compared_by_what_they_mean():
    assert alike("", "true")
    assert alike('{"a": 1, "b": 2}', '{"b": 2, "a": 1}')
    assert not alike("512", "256")
