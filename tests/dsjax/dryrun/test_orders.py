"""Which sums of a step could depend on the layout or the batch, which are explained, and what a step compiled otherwise says of them."""

import dataclasses
import json

import pytest
from layouts import TINY
from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.known_orders import KNOWN_ORDERS, KnownOrder
from dsjax.dryrun.orders import order_report, place_of, variant
from dsjax.dryrun.program.reductions import Reduction
from dsjax.dryrun.run import dry_run
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError

pytestmark = pytest.mark.slow  # all together

ARGS = DryRunArgs(engine=EngineArgs(model="demo", mesh="dp=2", page_size=4, prefill_chunk=16), batch=8, context=64)


def norm(order="tile 1×64", *, depends=("compiler",), is_complete=True, op_name="jit(run)/norm/reduce_sum"):
    return Reduction("r.1", op_name, "reduce", "terms", "f32", 64, order, is_complete, depends, "why")


def only(found, against=None, known=KNOWN_ORDERS):
    others = {"batch=1": {"step": against}} if against is not None else {}
    (row,) = order_report({"step": found}, others, known).sums
    return row


def test_what_the_compiler_chose_is_open_until_another_program_of_its_kind_has_the_same():
    fixed = norm("in sequence", depends=())
    untold = [norm(is_complete=False)]
    assert only([norm()]).could_depend
    assert not only([norm()], against=[norm()]).could_depend
    assert only(untold, against=untold).could_depend, "equal words, but not all of the order"
    assert not only([fixed]).could_depend
    row = only([fixed], against=[dataclasses.replace(fixed, depth=8)])
    assert row.could_depend, "what another program makes otherwise depends even where each order is fixed"
    assert row.otherwise == {"batch=1": ("reduce terms of 8 in f32, in sequence",)}
    for depends in (("mesh",), ("rows",), ("values",), ("timing", "rows"), ("library", "rows")):
        assert only([norm(depends=depends)], against=[norm(depends=depends)]).could_depend
    report = order_report({"step": []}, {"mesh=tp=2": {"step": [norm("in sequence", depends=())]}})
    (row,) = report.sums
    assert (row.times, row.could_depend) == (0.0, True)
    assert row.otherwise == {"mesh=tp=2": ("reduce terms of 64 in f32, in sequence",)}
    (row,) = order_report({"step": [norm(), dataclasses.replace(norm(), times=58.0)]}, {}).sums
    assert row.times == 59
    report = order_report({"step": [norm()], "drafts": [norm()]}, {"step=prefill": {"step": [norm()]}})
    assert {row.program: row.could_depend for row in report.sums} == {"step": False, "drafts": True}


def test_an_unexplained_sum_fails_and_an_entry_explains_neither_another_carrier_nor_another_place():
    indexer = norm(op_name="jit(run)/indexer/reduce_sum")
    with pytest.raises(UserError, match=r"1 sums could .*indexer/reduce_sum of the step .*known_orders\.py"):
        order_report({"step": [indexer]}, {}).check()
    entry = KnownOrder("why", ("reduce",), "terms", "indexer/reduce_sum", "Because.", "nothing.")
    order_report({"step": [indexer]}, {}, (entry,)).check()
    order_report({"step": [dataclasses.replace(indexer, depends=())]}, {}).check()
    entry = dataclasses.replace(entry, places="norm/reduce_sum")
    assert only([norm()], known=(entry,)).known is entry
    assert only([norm(op_name="jit(run)/draft/mtp_8/norm/reduce_sum")], known=(entry,)).known is entry
    assert only([norm(op_name="jit(run)/inner_norm/reduce_sum")], known=(entry,)).known is None
    assert only([dataclasses.replace(norm(), carrier="scatter")], known=(entry,)).known is None


@pytest.mark.parametrize(
    ("place", "carrier", "what", "reason"),
    [
        ("compressed_project/dense_splits/reduce_sum", "reduce", "terms", "product-splits"),
        ("compressed_output/dot_general", "product", "dot", "compiled-products"),
        ("compressed_output/psum", "collective", "all-reduce", "tp-partials"),
        ("cache_write/vmap()/reduce_sum", "reduce", "terms", "entry-norms"),
        ("head/reduce_sum", "reduce", "terms", "row-sums"),
        ("cache_write/dot_general", "product", "dot", None),
        ("head/scatter-add", "scatter", "terms", None),
    ],
)
def test_sums_of_v4_have_their_reasons_and_others_in_its_places_none(place, carrier, what, reason):
    row = only([dataclasses.replace(norm(op_name=f"jit(run)/{place}"), carrier=carrier, what=what)])
    assert (row.place, row.known and row.known.name) == (place, reason)


def test_a_place_is_the_models_scopes_and_the_operation_without_numbers_of_tokens():
    path = "jit(run)/mtp_512/while/body/closed_call/mla_project/shard_map/dense/pallas_call"
    assert place_of(norm(op_name=path)) == "mtp/mla_project/dense/pallas_call"
    assert place_of(norm(op_name="jit(run)/reduce_sum")) == "reduce_sum"
    assert place_of(norm(op_name="")) == "(terms)"


def test_one_thing_of_a_dry_run_is_changed_at_a_time():
    assert variant(ARGS, "batch=1").rows == 1
    assert variant(ARGS, "mesh=dp=4,tp=8").engine.mesh == "dp=4,tp=8"
    assert variant(ARGS, "context=128").row_tokens == 128
    prefill = variant(ARGS, "step=prefill")
    assert (prefill.step, prefill.decode, prefill.prefill) == ("prefill", None, (2048 // 16, 16))
    for wrong in ("batch=", "batch=few", "step=train", "mesh=", "rows=3", "batch", "batch=²"):
        with pytest.raises(UserError, match=r"--against .*expected batch=ROWS"):
            variant(ARGS, wrong)


def test_what_a_step_is_compared_with_has_the_context_of_the_step(monkeypatch):
    """The demo has 2,048 positions, fewer than the usual context."""
    read = []
    monkeypatch.setattr("dsjax.dryrun.run._read_mesh", lambda *given: read.append((given[0], given[-1])))
    usual = dataclasses.replace(ARGS, context=None)
    dry_run(usual, reductions=True, against=("batch=1", "mesh=tp=2", "step=prefill"))
    ((args, others),) = read
    assert [one.row_tokens for one in (args, *others.values())] == [2048] * 4
    for against, reductions, why in (
        ("context=4096", True, "context=4096: --context is 4096, but the model has 2048 positions"),
        ("mesh=tp=3", True, "mesh tp=3 does not fit the model"),
        ("batch=1", False, "give --reductions as well"),
    ):
        with pytest.raises(ValueError, match=why):
            dry_run(usual, reductions=reductions, against=(against,))
    assert len(read) == 1, "refused before anything is compiled"


def of(model, mesh, **options):
    return DryRunArgs(engine=EngineArgs(model=model, mesh=mesh, page_size=4, prefill_chunk=16), context=64, **options)


def test_a_step_on_the_cpu_is_compared_with_another_mesh(tiny):
    orders = dry_run(of(tiny, "dp=2", batch=8), reductions=True, against=("mesh=tp=2",)).orders
    assert orders.against == ("mesh=tp=2",)
    found = {row.place: row for row in orders.sums}
    # Of the heads of two devices, as of those of one, the collective adds two parts: one device alone has no such sum.
    partials = found["mla_output/psum"] if "mla_output/psum" in found else found["mla_output/dot_general"]
    assert "mesh=tp=2" in partials.otherwise
    assert any(row.sum.carrier == "collective" and row.sum.axes == ("tp",) and row.times == 0 for row in orders.sums)
    # The depth of the head's product is the model's width wherever it is multiplied.
    assert found["head/dot_general"].sum.depth == TINY["hidden_size"]


def test_the_command_prints_a_mixed_steps_sums_and_fails_for_those_that_nothing_explains(tiny, tmp_path, monkeypatch):
    report = dry_run(of(tiny, "dp=2", step="mixed", batch=4), reductions=True)
    assert [(group["rows"], group["chunk"]) for group in report.request["groups"]] == [(4, 1), (2048 // 16, 16)]
    assert report.request["tokens_per_device"] == 4 + 2048
    assert report.cache_tokens == (4 + 2048 // 16) * 64
    products = {row.place for row in report.orders.sums if row.sum.carrier == "product"}
    assert {"attend_CC/dot_general", "attend_A_CC_ME/dot_general"} <= products
    monkeypatch.setattr("dsjax.dryrun.run.dry_run", lambda *_, **__: report)
    command = ["dryrun", "--model", tiny, "--step", "mixed", "--reductions"]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert "sums whose order could depend on the layout or the batch; compared with no other program" in shown.output
    assert "compiled-products" in shown.output
    # The sums of attention's and the experts' plain forms are no accelerator's, and nothing explains them.
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "r.json")])
    found = json.loads((tmp_path / "r.json").read_text())["reductions"]
    assert found["unexplained"] > 0
    assert (done.exit_code, shown.exit_code) == (1, 1)
    open_ = [one for one in found["sums"] if one["could_depend"]]
    assert len(open_) == found["could_depend"]
    assert {one["place"].split("/")[0] for one in open_ if not one["known"]} >= {"(window)", "experts"}
