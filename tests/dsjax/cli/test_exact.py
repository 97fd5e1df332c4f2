"""`dsjax doctor --exact`: which runs it makes, and what it says of an answer."""

import json

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner
from v4_models import write_v4_checkpoint

from dsjax.cli import app, exact
from dsjax.cli.exact import MESHES, PAIRS, VARIED, Answer, ExactOptions, difference
from dsjax.errors import UserError
from dsjax.options import OptionError

ONES = Answer(np.ones((1, 4)), [[3]], [[-1.0]], exact=True)


def test_every_mesh_meets_every_dispatch_and_pair_of_forms_and_slices_share_them_out():
    runs = ExactOptions().runs
    assert len(runs) == (15 * 5 + 2) * len(PAIRS)
    assert {run[0] for run in runs} == set(MESHES)
    assert sorted(run for number in range(1, 8) for run in ExactOptions(slice=f"{number}/7").runs) == sorted(runs)
    varied = ExactOptions(mesh=["dp=8"], dispatch=["auto"], mla=["CC/A_CC"], vary=list(VARIED)).runs
    assert len({names for _, _, _, names in varied}) == len(varied) == 2 ** len(VARIED)


@pytest.mark.parametrize(
    "given", [{"slice": "0/3"}, {"slice": "4/3"}, {"vary": ["dbo"]}, {"mla": ["CC"]}, {"mla": ["CC/XX"]}]
)
def test_options_that_cannot_be_are_refused(given):
    (name,) = given
    with pytest.raises(OptionError, match=f"--{name} is"):
        _ = ExactOptions(**given).runs


@pytest.mark.parametrize(("found", "said"), [
    (ONES, None),
    (Answer(np.full((1, 4), 2.0), [[3]], [[-1.0]], exact=True), "logits differ by"),
    (Answer(np.full((1, 4), 1 + 1e-7), [[3]], [[-1.0]], exact=True), "logits differ by"),
    (Answer(np.full((1, 4), 1 + 1e-7), [[3]], [[-1.1]]), None),  # rounding, where products are not exact
    (Answer(None, [[3]], [[-1.1]], exact=True), "prompt 0: logprobs"),
    (Answer(None, [[4]], [[-1.0]]), "prompt 0: tokens"),
])  # fmt: skip
def test_exact_answers_are_equal_to_the_bit_and_others_but_for_rounding(found, said):
    verdict = difference(found, ONES)
    assert verdict is None if said is None else verdict.startswith(said)


def test_an_exact_answer_is_held_to_one_devices_with_the_same_arithmetic(monkeypatch):
    asked = []

    def answer(model, mesh, dispatch, prefill, decode, **options):
        asked.append((mesh, prefill, decode, options["kernels"], options.get("enable_shared_experts_fusion", False)))
        return Answer(np.ones((1, 4)), [[3]], exact=options["kernels"] != "plain")

    monkeypatch.setattr(exact, "answer", answer)
    options = ExactOptions(mesh=["tp=8"], dispatch=["auto"], mla=["CC/A_CC_ME"], vary=["enable-shared-experts-fusion"])
    found = exact.sweep(options, Console())
    assert [row["verdict"] for row in found] == ["equal", "equal"]
    one = sorted(row for row in asked if row[0] == "dp=1")
    assert one == [("dp=1", "CC", "A_CC_ME", *how) for how in (("auto", False), ("auto", True), ("plain", False))]


@pytest.mark.slow
def test_a_model_without_mla_is_compared_in_its_own_form(tmp_path):
    """DeepSeek-V4's."""
    model = write_v4_checkpoint(tmp_path, "ch")
    options = ExactOptions(model=str(model), mesh=["dp=2", "tp=2"], dispatch=["auto"], mla=["own"])
    assert [(row["verdict"], row["exact"]) for row in exact.sweep(options, Console())] == [("equal", True)] * 2


@pytest.mark.parametrize(("answers", "code", "said"), [
    ({}, 0, "2 of 2 equal to one device, 2 of them to the bit; 0 left out"),
    ({"tp=8": UserError("no room")}, 0, "tp=8 auto CC/A_CC: left out: no room"),
    ({"tp=8": Answer(None, [[4]], [[-1.0]], exact=True)}, 1, "instead of"),
    ({"tp=8": Answer(None, [[3]], [[-1.0]], exact=True, rebalances=0)}, 1, "no expert moved"),
    ({"tp=8": UserError("no room"), "dp=8": UserError("no room")}, 1, "0 of 0 equal"),
])  # fmt: skip
def test_it_ends_with_1_where_an_answer_differs_or_none_was_made(monkeypatch, tmp_path, answers, code, said):
    def answer(model, mesh, *forms, **options):
        if isinstance(made := answers.get(mesh, ONES), Exception):
            raise made
        return made

    monkeypatch.setattr(exact, "answer", answer)
    words = ["--exact", "--mesh", "dp=8", "--mesh", "tp=8", "--dispatch", "auto", "--mla", "CC/A_CC"]
    ended = CliRunner().invoke(app, ["doctor", *words, "--json", str(tmp_path / "runs")])
    assert ended.exit_code == code, ended.output
    assert said in ended.output.replace("\n", " ")
    assert [row["mesh"] for row in json.loads((tmp_path / "runs").read_text())] == ["dp=8", "tp=8"]


def test_what_exact_compares_is_refused_without_it():
    ended = CliRunner().invoke(app, ["doctor", "--mesh", "dp=8"])
    assert isinstance(ended.exception, OptionError)
