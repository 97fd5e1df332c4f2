"""Two-batch overlap: what a step takes whose half batches compute and communicate in turn.

As published, all of a step's computation overlaps all of its communication; dsjax's own program has them window by window
(``dsjax/model/two_batch.py``).
"""

from __future__ import annotations

import math

from dsjax.plan.figure import assumed
from dsjax.plan.network import exchanged_rows
from dsjax.plan.operations import DEEPEP, H800_SMS, NORMAL_SMS
from dsjax.plan.step_basis import StepBasis

HALVES = "layers, two halves overlapped"
"""The part of a step that says that it was priced in halves."""
_LAUNCHES = 32, 7
"""Small operations that a layer has more of for each half: in attention and routing (beside `small_kernels`), and in the experts' part."""


def overlapped_layers(step: StepBasis, decode: bool, half: dict[str, float]) -> float:
    """Seconds of layers whose halves overlap as published: the longer of work and exchanges, and what is not hidden of the shorter."""
    talk = 2 * (half["dispatch"] + half["combine"])
    work = 2 * sum(half.values()) - talk
    if not decode:
        work = work / (1 - _communicating(step))
    elif (
        step.cluster.hardware.platform == "cuda"
    ):  # low-latency kernels leave the multiprocessors free only while rows travel
        why = "sending and receiving take 0.06 of 0.17 ms of a dispatch, as published"
        work = work + talk * assumed(0.35, 0.25, 0.5, "share of an exchange that is copies", why)
    name, why = "share of the shorter that is hidden", "first and last halves have no partner"
    return max(work, talk) + min(work, talk) * (1 - assumed(0.9, 0.7, 1.0, name, why))


def windowed_layers(step: StepBasis, tokens: float, decode: bool, layers: int, half: dict[str, float]) -> float:
    """Seconds of so many layers with experts: of each of a layer's four windows the longer counts, what travels or what computes.

    tokens: of the whole step; half: the layers' parts for one half.
    """
    there, back = half["dispatch"], half["combine"]
    experts = half["experts"] + half.get("shared experts", 0.0)
    first = sum(half.values()) - there - back - experts
    launches = _more_launches(step, layers)
    first, experts = first + launches[0], experts + launches[1]
    if not decode:
        experts, first = (time / (1 - _communicating(step)) for time in (experts, first))
    windows = sum(max(*pair) for pair in ((back, first), (there, first), (there, experts), (back, experts)))
    return windows + (there + back + experts) * (2 * further_rounds(step, tokens))  # beside these nothing runs


def further_rounds(step: StepBasis, tokens: float) -> int:
    """Rounds to the busiest rank that halves of so many tokens have beyond those of the whole, which are left out of both."""
    mesh, top_k, experts = step.layout.mesh, step.config.num_experts_per_tok, step.config.n_routed_experts
    needed = []
    for each, halved in ((tokens / mesh.tp_size / 2, True), (tokens / mesh.tp_size, False)):
        if step.own_method(each, halved) not in ("padded", "hierarchical"):
            needed.append(1)
            continue
        rows = each * top_k * mesh.expert_width_shards
        load = step.skew.slowest(step.expert_slots, experts, rows, step.places_by_load)
        room = exchanged_rows("padded", each, top_k, mesh.ep_size, halved)
        needed.append(math.ceil(load * exchanged_rows("ragged", each, top_k, mesh.ep_size) / room))
    return max(0, needed[0] - needed[1])


def _communicating(step: StepBasis) -> float:
    """The share of a GPU that communicates in prefill and does not compute."""
    if step.cluster.hardware.platform != "cuda":
        return 0.0
    if step.in_windows:
        ends, name, why = (
            (16, 8, 32),
            "multiprocessors that NCCL takes",
            "not measured: a block a channel, 8 to 32 of 132",
        )
        return assumed(*(end / H800_SMS for end in ends), name, why)
    why = f"{DEEPEP}: 24 of 132 by default"
    return assumed(NORMAL_SMS / H800_SMS, 0.1, 0.2, "multiprocessors that communicate", why)


def _more_launches(step: StepBasis, layers: int) -> tuple[float, float]:
    """Seconds of what a half launches more in so many layers with experts: in attention and routing, and in the experts' part."""
    if step.cluster.hardware.platform != "cuda":
        return 0.0, 0.0
    why = (
        "counted in the programs compiled for dp=32 of H200s, 128 rows (docs/dryrun.md, two half batches): 64 operations a layer take no "
        "more than their launch in the whole step, 149 in two halves; 1 to 4 µs each"
    )
    each = assumed(2e-6, 1e-6, 4e-6, "a launch more of a half", why) * layers
    return each * _LAUNCHES[0], each * _LAUNCHES[1]
