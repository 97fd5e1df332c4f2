"""Options of vLLM and SGLang are taken for ours, or explained: `configs/engines/other-engines.csv`."""

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.cli.other_engines import TRANSLATIONS, advice, rows, unread_variables

RUNNER = CliRunner()
ROOT = Path(__file__).parents[3]
WIDE = re.compile(
    r"parallel-(?!loading)|^--(dp|tp|pp|ep)(-size)?$|-(dp|tp|pp|ep|cp)-size$|^--(dcp|cp)-|nnodes|node-rank|headless|eplb|redundant|dbo|ubatch"
    r"|batch-overlap|tbo|speculative-|^--spec-(method|model|tokens)|kv-transfer|disaggregation-(mode|transfer|bootstrap)|^--quantization"
    r"|deepep|moe-(a2a|runner|backend|dp|data|dense)|all2all|(dsa|nsa)-.*backend|deterministic"
)
"""Names of parallelism, EPLB, overlap, drafts, KV transfer and number formats: what a deployment of DeepSeek's models passes."""


def _options(command: str) -> set[str]:
    made = typer.main.get_command(app).get_command(None, command)
    return {name for one in made.params for name in (*one.opts, *one.secondary_opts)}


def refused(*words: str) -> str:
    """What a command says that its command line cannot be."""
    found = RUNNER.invoke(app, words)
    assert found.exit_code == 2
    return found.output


def test_every_counterpart_is_an_option_of_serve_and_no_option_of_serve_is_taken_for_anothers() -> None:
    known = _options("serve")
    assert {row.ours for row in rows().values()} - {""} <= known
    assert not known & set(rows())
    assert all("=" in row.value or row.value in TRANSLATIONS for row in rows().values() if row.value)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_option_of_a_wide_deployment_that_their_parsers_take_today_is_answered(engine: str) -> None:
    parser = json.loads((ROOT / "configs" / "engines" / "options" / f"{engine}.json").read_text(encoding="utf-8"))
    wide = {name for name in parser["options"] if WIDE.search(name)}
    assert len(wide) > 30
    known = _options("serve")
    unanswered = {name for name in wide - known if not advice([name], known)}
    assert not unanswered


def test_the_command_of_the_h20_plan_and_old_names_of_vllm_are_answered() -> None:
    words = "--num-redundant-experts 32 --eplb-window-size=1000 --eplb-step-interval 3000 --eplb-log-balancedness --headless"
    lines = advice(words.split(), _options("serve"))
    assert [line.split()[0] for line in lines] == re.findall(r"--[a-z-]+", words)
    assert lines[1] == """--eplb-window-size is --eplb-config '{"window_size": N}'"""
    assert "is not needed" in lines[-1]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--speculative-draft-model-path", "is not needed: .*MTP module"),  # and not the config
        ("--speculative-algorithm NEXTN", "is --speculative-config "),
        ("--dcp-size 8", "^--dcp-size is without counterpart here: "),
    ],
)
def test_an_option_is_answered_with_what_does_its_work_here(words: str, answer: str) -> None:
    (line,) = advice(words.split(), _options("serve"))
    assert re.search(answer, line)


def test_their_variables_are_named_where_set_without_their_option_and_a_command_warns_before_it_runs(monkeypatch):
    known, on = _options("serve"), {"VLLM_BATCH_INVARIANT": "1"}
    (line,) = unread_variables(["--model", "demo"], known, on)
    assert line == "VLLM_BATCH_INVARIANT is set, but dsjax does not read it; give --batch-invariant, or unset it"
    for words in (["--batch-invariant"], ["--no-batch-invariant"]):
        assert unread_variables(words, known, on) == []
    assert unread_variables([], known, {"VLLM_BATCH_INVARIANT": "0"}) == []
    assert unread_variables([], {"--model"}, on) == []
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    found = RUNNER.invoke(app, ["serve", "--disaggregation-mode", "prefill"])  # refused before anything is loaded
    assert found.stderr.startswith("warning: " + line.partition(", or")[0])


def test_all_of_them_on_a_command_line_are_explained_at_once_and_a_model_without_its_option_too():
    output = refused("serve", "-tp", "8", "--max-running-requests=8", "--enable-dp-attention", "--trust-remote-code")
    answers = ("--max-running-requests is --max-num-seqs: of a DP rank", "--enable-dp-attention is --mesh dp=N")
    for line in (*answers, "--trust-remote-code is not needed"):
        assert line in output
    assert "give the model as --model MODEL" in refused("serve", "deepseek-ai/DeepSeek-R1")


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_an_option_for_tls_is_answered_with_the_cluster_key_and_the_encryption_of_bulk(command: str) -> None:
    output = refused(command, "--cluster-tls-cert", "a.pem", "--cluster-tls-key=b.pem")
    for name in ("--cluster-tls-cert", "--cluster-tls-key"):
        assert re.search(f"{name} is removed: .*--cluster-key-file.*--encrypt-bulk", output)
    assert _options(command) >= {"--cluster-key-file", "--encrypt-bulk"}


def test_a_command_says_nothing_of_what_it_has_no_counterpart_for() -> None:
    assert advice(["--tp", "8"], known={"--model"}) == []
    assert advice(["--model", "demo", "--mesh", "tp=8"], known={"--model", "--mesh"}) == []
    assert "--mesh" in refused("serve", "--mehs", "dp=2")  # the nearest of ours
