"""Two-batch overlap: what a step takes whose half batches compute and communicate in turn.

As published, all of a step's computation overlaps all of its communication; dsjax's own program has them window by window
(``dsjax/model/two_batch.py``).
"""

from __future__ import annotations

import math

from dsjax.plan.figure import assumption
from dsjax.plan.network import exchanged_rows
from dsjax.plan.operations import H800_SMS
from dsjax.plan.step_basis import StepBasis

HALVES = "layers, two halves overlapped"
"""The part of a step that says that it was priced in halves."""
_LAUNCHES = 32, 7
"""Small operations that a layer has more of for each half: in attention and routing (beside `small kernels`), and in the experts' part."""


def overlapped_layers(step: StepBasis, decode: bool, half: dict[str, float]) -> float:
    """Seconds of layers whose halves overlap as published: the longer of work and exchanges, and what is not hidden of the shorter."""
    talk = 2 * (half["dispatch"] + half["combine"])
    work = 2 * sum(half.values()) - talk
    if not decode:
        work = work / (1 - _communicating(step))
    elif (
        step.cluster.hardware.platform == "cuda"
    ):  # low-latency kernels leave the multiprocessors free only while rows travel
        work = work + talk * assumption("share of an exchange that is copies")
    return max(work, talk) + min(work, talk) * (1 - assumption("share of the shorter that is hidden"))


def windowed_layers(step: StepBasis, tokens: float, decode: bool, layers: int, half: dict[str, float]) -> float:
    """Seconds of so many layers with experts: of each of a layer's four windows the longer counts, what travels or what computes.

    tokens: of the whole step; half: the layers' parts for one half.
    """
    there, back = half["dispatch"], half["combine"]
    experts = half["experts"] + half.get("shared experts", 0.0)
    first = sum(half.values()) - there - back - experts
    if step.cluster.hardware.platform == "cuda":
        launch = assumption("a launch more of a half") * layers
        first, experts = (time + launch * more for time, more in zip((first, experts), _LAUNCHES, strict=True))
    if not decode:
        experts, first = (time / (1 - _communicating(step)) for time in (experts, first))
    windows = sum(max(*pair) for pair in ((back, first), (there, first), (there, experts), (back, experts)))
    return windows + (there + back + experts) * (2 * further_rounds(step, tokens))  # beside these nothing runs


def further_rounds(step: StepBasis, tokens: float) -> int:
    """Rounds to the busiest rank that halves of so many tokens have beyond those of the whole, which are left out of both."""
    mesh, top_k = step.layout.mesh, step.config.num_experts_per_tok
    needed = []
    for each, halved in ((tokens / mesh.tp_size / 2, True), (tokens / mesh.tp_size, False)):
        if step.own_method(each, halved) not in ("padded", "hierarchical"):
            needed.append(1)
            continue
        rows = each * top_k * mesh.expert_width_shards
        load = step.slowest(rows)
        room = exchanged_rows("padded", each, top_k, mesh.ep_size, halved)
        needed.append(math.ceil(load * exchanged_rows("ragged", each, top_k, mesh.ep_size) / room))
    return max(0, needed[0] - needed[1])


def _communicating(step: StepBasis) -> float:
    """The share of a GPU that communicates in prefill and does not compute."""
    if step.cluster.hardware.platform != "cuda":
        return 0.0
    who = "multiprocessors that NCCL takes" if step.in_windows else "multiprocessors that communicate"
    return assumption(who) / H800_SMS
