"""Layers of a step that dsjax computes in two halves, by the windows of its program (``dsjax/model/two_batch.py``)."""

from __future__ import annotations

import math

from dsjax.plan.figure import assumed
from dsjax.plan.network import exchanged_rows
from dsjax.plan.step_basis import StepBasis

HALVES = "layers, two halves overlapped"
"""The part of a step that says that it was priced in halves."""
_LAUNCHES = 32, 7
"""Small operations that a layer has more of for each half: in attention and routing (beside `small_kernels`), and in the experts' part."""


def halved_layers(
    step: StepBasis, tokens: float, decode: bool, layers: int, whole: dict[str, float], half: dict[str, float]
) -> dict[str, float]:
    """All layers of a step: of each of the four windows of a layer with experts the longer counts, what travels or what computes.

    layers: with experts. whole: parts of the other layers; half: parts of those with experts, of one half.
    """
    there, back = half["dispatch"], half["combine"]
    experts = sum([part for name, part in half.items() if name in ("experts", "shared experts")])
    first = sum(
        [part for name, part in half.items() if name not in ("experts", "shared experts", "dispatch", "combine")]
    )
    launches = more_launches(step, layers)
    first, experts = first + launches[0], experts + launches[1]
    share = None if decode else step.beside_communication()
    if share:
        experts, first = experts / (1 - share), first / (1 - share)
    windows = [max(*pair) for pair in ((back, first), (there, first), (there, experts), (back, experts))]
    if rounds := further_rounds(step, tokens):
        windows.append((there + back + experts) * (2 * rounds))  # nothing runs beside these
    return whole | {HALVES: sum(windows)}


def further_rounds(step: StepBasis, tokens: float) -> int:
    """Rounds to the busiest rank that halves of so many tokens have beyond those of the whole, which are left out of both."""
    mesh, top_k = step.layout.mesh, step.config.num_experts_per_tok
    ranks, needed = mesh.ep_size, []
    for each, halved in ((tokens / mesh.tp_size / 2, True), (tokens / mesh.tp_size, False)):
        if step.own_method(each, halved) not in ("padded", "hierarchical"):
            needed.append(1)
            continue
        rows, experts = each * top_k * mesh.expert_width_shards, step.config.n_routed_experts
        load = step.skew.slowest(step.expert_slots, experts, rows, step.places_by_load)
        room = exchanged_rows("padded", each, top_k, ranks, halved)
        needed.append(math.ceil(load * exchanged_rows("ragged", each, top_k, ranks) / room))
    return max(0, needed[0] - needed[1])


def more_launches(step: StepBasis, layers: int) -> tuple[float, float]:
    """Seconds of what a half launches more in so many layers with experts: in attention and routing, and in the experts' part."""
    if step.cluster.hardware.platform != "cuda":
        return 0.0, 0.0
    why = (
        "counted in the programs compiled for dp=32 of H200s, 128 rows (docs/dryrun.md, two half batches): 64 operations a layer take no "
        "more than their launch in the whole step, 149 in two halves; 1 to 4 µs each"
    )
    each = assumed(2e-6, 1e-6, 4e-6, "a launch more of a half", why) * layers
    return each * _LAUNCHES[0], each * _LAUNCHES[1]
