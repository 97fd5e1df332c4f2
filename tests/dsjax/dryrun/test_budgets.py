"""The budgets: how many collectives of which kind along which axes the step may run, and how many bytes they send.

A collective more than is written down fails, whoever brought it in: the model, the dispatch, or XLA's partitioner. Where the change is
meant, write the new figures down: ``python tests/dsjax/dryrun/test_budgets.py``, and say why in the commit.
"""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # all together

BUDGETS = Path(__file__).with_name("collective_budgets.json")
BY_DATA = {"moe_dense_tp_size": 1, "enable_dp_lm_head": True}
OPTIONS = {
    "dense by data": BY_DATA,
    "all by data": BY_DATA | {"enable_shared_experts_fusion": True},
    "hierarchical": {"dispatch": "hierarchical"},
}
"""What stands behind a mesh → the options that it names."""
LAYOUTS = ("dp=32", "dp=4,tp=8", "tp=8", "tp=8,ep=1", "dp=32,ep=8", "dp=8,ep=2,etp=4")
LAYOUTS += tuple(f"dp=4,tp=8, {options}" for options in OPTIONS) + ("dp=32, hierarchical",)
STEPS = ("decode", "prefill")


def budget(layout: str, step: str, directory: Path) -> dict[str, list[float]]:
    """``kind over axes, dtype`` → times in a step, bytes sent by a device, of a small model of V3's structure in bf16."""
    from layouts import TINY

    from dsjax.dryrun.arguments import DryRunArgs
    from dsjax.dryrun.run import dry_run
    from dsjax.engine.setup.args import EngineArgs

    (directory / "config.json").write_text(json.dumps(TINY | {"torch_dtype": "bfloat16"}))
    mesh, _, named = layout.partition(", ")
    options = {"dispatch": "padded", "prefill_chunk": 16, "page_size": 4} | OPTIONS.get(named, {})
    engine = EngineArgs(model=str(directory), mesh=mesh, **options)
    report = dry_run(DryRunArgs(engine=engine, step=step, batch=8, context=64))
    found: dict[str, list[float]] = {}
    for one in report.collectives:
        entry = found.setdefault(f"{one.kind} over {one.participants}, {one.operand[0].dtype}", [0, 0])
        entry[0] += one.times
        entry[1] += one.times * one.bytes_sent
    return dict(sorted(found.items()))


# Both steps: over data-parallel ranks, over tensor-parallel ones, over both, and with experts whose width is split.
RUNS = [("dp=32,ep=8", "prefill"), ("dp=4,tp=8", "prefill"), ("tp=8,ep=1", "decode"), ("dp=8,ep=2,etp=4", "decode")]
RUNS += [("dp=4,tp=8, all by data", "decode"), ("dp=32, hierarchical", "decode")]


@pytest.mark.parametrize(("layout", "step"), RUNS)
def test_a_step_runs_no_collective_beyond_its_budget(layout, step, tmp_path):
    assert budget(layout, step, tmp_path) == json.loads(BUDGETS.read_text())[layout][step]


@pytest.mark.parametrize("step", STEPS)
def test_only_dispatch_communicates_and_with_tensor_parallelism_each_part_of_the_model_once(step):
    budgets = json.loads(BUDGETS.read_text())
    for layout in ("dp=32", "dp=32,ep=8"):
        # Two MoE layers, one exchange there and one back.
        found = budgets[layout][step]
        assert {name.split(" over ")[0] for name in found} == {"all-to-all"}
        assert sum(times for times, _ in found.values()) == 4
    for layout in ("dp=4,tp=8", "tp=8", "tp=8,ep=1"):
        times = {name: times for name, (times, _) in budgets[layout][step].items()}
        # Sums over heads and widths: the embedding, three layers' attention, one dense MLP, two layers' shared experts.
        assert times.pop("all-reduce over tp, bf16") == 1 + 3 + 1 + 2
        # The greedy token of a vocabulary that is spread out: largest and smallest logit, first place of the largest.
        assert times.pop("all-reduce over tp, f32") + times.pop("all-reduce over tp, s32") == 3
        # Two MoE layers: there, back, and the parts of a replica's tokens together again.
        assert sum(times.values()) == 2 * 3, "XLA re-shards something: see Step._whole"


def test_tokens_split_over_tp_halve_what_a_dense_layer_sends_over_it():
    budgets = json.loads(BUDGETS.read_text())
    for step in STEPS:
        usual, dense, everything = (
            {name.split(",")[0]: entry for name, entry in budgets[f"dp=4,tp=8{named}"][step].items() if "bf16" in name}
            for named in ("", ", dense by data", ", all by data")
        )
        each = usual["all-reduce over tp"][1] / 7  # of a sum that every device gets
        # The dense layer: two sums, or one that is scattered and then gathered.
        assert dense["all-reduce over tp"] == [5, 5 * each]
        assert dense["reduce-scatter over tp"] == [1, each / 2]
        assert dense["all-gather over tp"] == [3, 3 * each / 2]
        # With the shared expert on each device all layers are so; what is left is the embedding.
        assert everything["all-reduce over tp"] == [1, each]
        assert everything["reduce-scatter over tp"] == everything["all-gather over tp"] == [3, 3 * each / 2]
        assert dense["all-to-all over ep×tp"] == everything["all-to-all over ep×tp"] == usual["all-to-all over ep×tp"]


def test_in_two_stages_a_row_crosses_to_each_host_once():
    budgets = json.loads(BUDGETS.read_text())
    for step in STEPS:
        one, two = budgets["dp=32"][step], budgets["dp=32, hierarchical"][step]
        for dtype in ("bf16", "u16"):
            times, sent = one[f"all-to-all over ep, {dtype}"]
            away = sent * 24 / 31  # to the devices of the other three hosts
            crossing = two[f"all-to-all over 4 hosts, {dtype}"]
            assert crossing[0] == two[f"all-to-all over 8 of a host, {dtype}"][0] == times == 2
            if step == "decode":  # of so few tokens there is room for all on each rank, and on each host
                assert crossing[1] == away / 8
            assert crossing[1] < away / 2


def write(folder: Path) -> None:
    found = {layout: {step: budget(layout, step, folder) for step in STEPS} for layout in LAYOUTS}
    BUDGETS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    import sys
    import tempfile

    sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]
    import conftest  # noqa: F401  32 emulated devices, before JAX starts

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
