"""Writes docs/layout-plans.md: the best plans for 32 H200 and 32 H20 as whole batches, in halves, with attention and experts apart, and
with the widths of experts over DP ranks, and in stages; decode steps by an objective; the batch below which halving loses; more devices for
the experts.

    python tools/layout_plans.py
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dsjax.errors import UserError
from dsjax.plan.arguments import PlanArgs, StepArgs
from dsjax.plan.candidate import Candidate
from dsjax.plan.instance import Instance
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.search import instances, search
from sharding import MeshError, MeshSpec

PAGE = ROOT / "docs" / "layout-plans.md"
CLUSTERS = ("h200-32", "h20-32")
WORK = "--input 2000 --output 500 --ttft-ms 4000 --tpot-ms 100"
ETP = tuple(
    f"dp={dp}" + (f",tp={tp}" if tp > 1 else "") + f",ep={dp * tp // etp},etp={etp}"
    for dp, tp in ((8, 1), (4, 2), (16, 1), (8, 2), (32, 1), (16, 2))
    for etp in (2, 4, 8)
    if dp * tp >= etp and etp >= tp and dp * tp // etp in (1, 2, 4, 8, 16)
)
"""Meshes in which DP ranks share the width of an expert, of one host to four."""
STAGED = tuple(
    f"pp={pp},{mesh}"
    for pp in (2, 4)
    for mesh in ("tp=4", "dp=4", "tp=8", "dp=2,tp=4", "dp=4,tp=2", "dp=8", "dp=16", "dp=8,tp=2", "dp=4,tp=4")
    if pp * math.prod(int(size.partition("=")[2]) for size in mesh.split(",")) <= 32
)
"""Meshes of two or four stages, each of half a host to two."""
BOUNDS = (30, 50, 100)
BATCHES = (8, 16, 32, 48, 64, 96, 128, 256)
CONTEXT = 4096


def plan_of(arguments: str) -> PlanArgs | StepArgs:
    """Options as a command line has them."""
    words, given = arguments.split(), {}
    made = StepArgs if "static_gen" in words else PlanArgs
    kinds = {field.name: field for field in dataclasses.fields(made)}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        name = {"--input": "input_tokens", "--output": "output_tokens"}.get(flag, flag[2:].replace("-", "_"))
        kind = str(kinds[name].type)
        given[name] = int(value) if "int" in kind else float(value) if "float" in kind else value
    return made(**given)


def best(arguments: str) -> Candidate | None:
    """The winner of a plan; None where no layout fits, or none meets the objectives."""
    try:
        question = plan_of(arguments).question()
        return search(question).winner
    except (UserError, MeshError):  # the mesh is none of this model's
        return None


def services(cluster: str) -> list[str]:
    """Rows of the services of one cluster."""
    rows = []
    for engine in ("dsjax", "published"):
        base = f"--cluster {cluster} --engine {engine} {WORK}"
        ways = [
            ("whole batches", f"{base} --two-batch-overlap off"),
            ("two halves", f"{base} --two-batch-overlap on"),
            ("attention and experts apart", f"{base} --afd on"),
        ]
        for name, arguments in ways:
            rows.append(_row(engine, name, best(arguments), arguments))
        whole = f"{base} --two-batch-overlap off"
        etp = [f"{whole} --{side}mesh {mesh}" for mesh in ETP for side in ("", "decode-")]
        rows.append(_best_row(engine, "widths over DP ranks", etp))
        rows.append(_best_row(engine, "stages", [f"{whole} --mesh {mesh}" for mesh in STAGED]))
    return rows


def _best_row(engine: str, name: str, ways: list[str]) -> str:
    found = [(won, arguments) for arguments in ways if (won := best(arguments)) is not None]
    won, arguments = max(found, key=lambda one: one[0].throughput.value, default=(None, ways[0]))
    return _row(engine, name, won, arguments)


def _row(engine: str, name: str, won: Candidate | None, arguments: str) -> str:
    if won is None:
        return f"| {engine} | {name} | none meets both | | | | `dsjax plan {arguments}` |"
    rate, tpot = won.throughput, won.tpot
    return (
        f"| {engine} | {name} | {won.name().replace('|', 'and')} | {won.batch:g} | {tpot.value * 1e3:.0f} ({tpot.low * 1e3:.0f} – "
        f"{tpot.high * 1e3:.0f}) | **{rate.value:,.0f}** ({rate.low:,.0f} – {rate.high:,.0f}) | `dsjax plan {arguments}` |"
    )


def largest(instance: Instance, bound: float) -> int:
    """The most requests of a DP rank whose decode step is no longer than a bound; 0 where there are none."""
    low, high = 0, instance.max_batch
    while low < high:
        middle = (low + high + 1) // 2
        if instance.middle.tpot(middle).value <= bound:
            low = middle
        else:
            high = middle - 1
    return low


def fastest(arguments: str, bound: float) -> tuple[float, Instance, int] | None:
    """(tokens a second a device, layout, batch) of the decode steps within a bound that make most of a device."""
    question = plan_of(arguments).question()
    rates = []
    for instance in instances(question)[1]:
        if batch := largest(instance, bound):
            rate = batch * instance.replicas / instance.middle.tpot(batch).value / instance.layout.devices
            rates.append((rate, instance, batch))
    return max(rates, key=lambda one: one[0], default=None)


def decodes(cluster: str) -> Iterator[str]:
    """Rows of decode steps alone, by the objective."""
    for engine, overlap in (("dsjax", "on"), ("published", "auto")):
        base = (
            f"--cluster {cluster} --engine {engine} --mode static_gen --context {CONTEXT} --two-batch-overlap {overlap}"
        )
        for bound in BOUNDS:
            whole, apart = (fastest(f"{base} --afd {afd}", bound / 1e3) for afd in ("off", "on"))
            gain = f"{apart[0] / whole[0] - 1:+.0%}" if whole and apart else "–"
            yield f"| {engine} | {bound} | {_cell(whole)} | {_cell(apart)} | {gain} | {_static(base, whole)}<br>{_static(base, apart)} |"


def _cell(found: tuple[float, Instance, int] | None) -> str:
    if found is None:
        return "none"
    rate, instance, batch = found
    return f"**{rate:,.0f}** {instance.layout}, {batch} rows, {instance.batches_in_turn(batch)} in turn"


def _static(base: str, found: tuple[float, Instance, int] | None) -> str:
    if found is None:
        return ""
    _, instance, batch = found
    layout = instance.layout
    mesh = (
        f"--attention-mesh {layout.mesh} --expert-mesh ep={layout.experts}"
        if layout.experts
        else f"--mesh {layout.mesh}"
    )
    return f"`dsjax plan step {base} {mesh} --redundant-experts {layout.redundant} --batch {batch}`"


def halving(cluster: str, mesh: str) -> Iterator[str]:
    """Rows of the time in halves ÷ the time as a whole, by the batch."""
    for precision in ("bf16", "fp8"):
        base = (
            f"--cluster {cluster} --mode static_gen --context {CONTEXT} --two-batch-overlap on --precision {precision}"
        )
        question = plan_of(f"{base} --expert-skew uniform --mesh {mesh}").question()
        instance = question.instance(InstanceLayout(MeshSpec.parse(mesh)), {})
        if len(models := instance.middle.step_models()) < 2:
            continue
        ratios = [models[1].decode(n, CONTEXT).value / models[0].decode(n, CONTEXT).value for n in BATCHES]
        losing = [n for n, ratio in zip(BATCHES, ratios, strict=True) if ratio >= 1]
        least = next((n for n in BATCHES if n > max(losing, default=0)), "none of these")
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        yield f"| {cluster}, {mesh}, {precision} | {cells} | {least} |"


def more_experts(cluster: str, hosts: int, attention: str) -> Iterator[str]:
    """Rows of decode steps with more and more devices for the experts."""
    for experts in range(8, 8 * hosts - MeshSpec.parse(attention).num_devices + 1, 8):
        cells = []
        for bound in BOUNDS:
            arguments = (
                f"--cluster {cluster} --hosts {hosts} --engine published --mode static_gen --context {CONTEXT} "
                f"--attention-mesh {attention} --expert-mesh ep={experts}"
            )
            found = fastest(arguments, bound / 1e3)
            cells.append(f"{found[0]:,.0f} ({found[2]})" if found else "–")
        yield f"| {experts} | {' | '.join(cells)} |"


def page() -> str:
    """The page."""
    parts: list[str] = [_HEAD]
    for cluster in CLUSTERS:
        parts += [f"## Services on {cluster}", "", _SERVICES, *services(cluster), ""]
        parts += [f"## Decode steps on {cluster}", "", _DECODES, *decodes(cluster), ""]
    parts += [
        "## Decode steps on h800-32",
        "",
        "The cluster of the published figures.",
        "",
        _DECODES,
        *decodes("h800-32"),
        "",
    ]
    parts += [_DEAD_ZONE, "", _EXPERTS, *more_experts("h800-32", 8, "dp=16"), ""]
    parts += [_HALVING, "", _table("", *map(str, BATCHES), "gains from here on"), *_halvings(), ""]
    return "\n".join(parts)


def _halvings() -> list[str]:
    return [
        row
        for cluster, mesh in (("h200-32", "dp=32"), ("h20-32", "dp=32"), ("h200-8", "dp=8"))
        for row in halving(cluster, mesh)
    ]


def _table(*names: str) -> str:
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


_SERVICES = _table("engine", "", "deployment", "batch", "TPOT, ms", "tokens/s", "")
_DECODES = _table("engine", "TPOT within, ms", "one mesh: tokens/s a device", "apart: tokens/s a device", "", "")
_EXPERTS = _table("devices with experts", *(f"within {bound} ms" for bound in BOUNDS))
_HEAD = """# The best plans, by how a layer is laid out

`python tools/layout_plans.py` writes this page; behind each row stands its command. All of it is predicted, and nothing of `dsjax` has run
on these devices. What a plan credits, and from where: [plan.md](plan.md#attention-and-experts-apart).

- **As dsjax moves rows, attention and experts apart win nowhere here.** In one process the host begins a copy for each pair of devices and
  layer; between processes rows go through the hosts' memory.
- **As papers move rows**, decode steps gain on InfiniBand between an objective that whole steps reach with batches too small for the
  experts (50 ms) and one that they reach with large ones; below, the way there and back is too long a part of a layer. Baidu Baige
  publishes up to 19 % at 100 ms.
- **Over 25 Gb/s a card** (h20-32) most of the gain is that a row crosses to a host once and not for each of its experts. Layouts whose DP
  ranks share the widths of experts (`etp`) have that too, in one mesh, and so has `dsjax`, whose dispatch goes in
  [two stages](dispatch.md#between-hosts) between hosts.
- **Rows with the same tokens/s** are held back by the same prefill instances; their decode instances have time to spare.
- **Halves** of `dsjax` gain with large batches (*2 in turn*), and over 25 Gb/s a card from 16 rows of `dp=32` on:
  [below](#where-halving-loses). So do those of published engines.
- **Stages** keep exchanges and sums inside a host. Over 25 Gb/s a card they give published engines half as much again as the best whole
  batches; where rows cross to a host once, and on InfiniBand, they give less than one mesh.
"""
_DEAD_ZONE = """## More devices for the experts

32 to 64 H800s, 16 of them with attention, as papers move rows: tokens a second of a device, and rows of a DP rank, with more and more
devices for the experts. Baidu's paper ([arXiv 2602.09721](https://arxiv.org/abs/2602.09721)) finds a dead zone on uniform clusters: more
devices for the experts raise nothing, since the network to the attention side stays as it is. Here a device makes less with each host
more, as soon as the experts are no longer what is waited for."""
_HALVING = """## Where halving loses

Time of a decode step of `dsjax` in two halves ÷ as a whole, by rows of a DP rank, even routing, at context 4,096 (`--two-batch-overlap on`
takes the faster of the two, and a recipe has the threshold). By compiled programs, for `dp=32` of H200s: 1.67 at 16 rows in bf16, and 1.01
at 128 in FP8; where rows go straight (`--dispatch padded`), 0.93 at 32 rows in bf16 and 0.80 at 128 in FP8
([dryrun.md](dryrun.md#two-half-batches))."""


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
