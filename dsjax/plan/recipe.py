"""The winner as something to run: `dsjax serve` commands and a recipe file."""

from __future__ import annotations

import math
import shlex
from typing import Any

from dsjax.plan.candidate import Candidate
from dsjax.plan.instance import Instance
from dsjax.plan.precision import FP8_BLOCK
from dsjax.plan.search import Question


def serve_options(model: str, instance: Instance, batch: float, prefill_tokens: float) -> dict[str, str]:
    """Options of `dsjax serve` for one instance, as it names them."""
    work, options = instance.workload, instance.options
    length = math.ceil(
        work.input.mean * (1 + 3 * work.input.variation) + work.output.mean * (1 + 3 * work.output.variation)
    )
    seqs = max(1, math.ceil(batch))
    found = {
        "--model": model,
        "--mesh": str(instance.layout.mesh),
        "--max-num-seqs": str(seqs),
        "--max-model-len": str(min(length + 1, instance.config.max_position_embeddings)),
        "--max-num-batched-tokens": str(max(seqs, math.ceil(prefill_tokens))),
    }
    if options.precision.linear == FP8_BLOCK:
        found["--weights"] = "fp8"
    if instance.layout.mesh.ep_size > 1 and options.precision.wire < 2:
        found["--dispatch-wire"] = "fp8"
    if options.dispatch != "deepep":
        found["--dispatch"] = options.dispatch
    if instance.layout.redundant:
        found["--redundant-experts"] = str(instance.layout.redundant)
    return found


def command(options: dict[str, str]) -> str:
    """One line for a shell."""
    return shlex.join(["dsjax", "serve", *(word for pair in options.items() for word in pair)])


def notes(candidate: Candidate) -> list[str]:
    """What the estimate counts on that the commands do not switch on."""
    found = []
    if candidate.decode.options.dispatch == "deepep":
        found.append(
            "The estimate has DeepEP's kernels for dispatch; --dispatch auto reckons with dsjax serve's own instead."
        )
    found += _contradicted(candidate)
    if candidate.mode == "separated":
        found.append(
            "Prefill and decode are separate services: moving the cache between them is not an option of dsjax serve."
        )
    if candidate.decode.overlapped(candidate.batch):
        found.append("The estimate overlaps two half batches, which is not an option of dsjax serve.")
    if candidate.decode.options.drafts:
        found.append("The estimate drafts with the MTP module, which is not an option of dsjax serve.")
    if candidate.decode.options.precision.expert < 1:
        found.append("The estimate has FP4 experts, which dsjax does not load.")
    return found


def _contradicted(candidate: Candidate) -> list[str]:
    """Steps whose compiled program is predicted to take another time than the planner's interval."""
    found = []
    for instance in {id(i): i for i in (candidate.prefill, candidate.decode)}.values():
        for run in instance.dry_runs:
            ours, theirs = instance.compiled_step(run), run.timeline
            if theirs and not ours.low <= theirs.value <= ours.high:
                found.append(
                    f"The program that dsjax serve runs for {run.shape} takes {theirs.value * 1e3:,.0f} ms by its timeline; the "
                    f"planner, with published kernels for attention and experts, says {ours.value * 1e3:,.0f} ms "
                    f"[{ours.low * 1e3:,.0f} … {ours.high * 1e3:,.0f}]."
                )
    return found


def recipe(model: str, question: Question, candidate: Candidate) -> dict[str, Any]:
    """Everything needed to run and to check the winner again: the question, the services, the expected figures."""
    services = [_service(model, candidate.decode, candidate.batch, candidate.prefill_tokens, candidate.count)]
    services[0]["role"] = "prefill and decode" if candidate.mode == "aggregated" else "decode"
    if candidate.mode == "separated":
        other = _service(model, candidate.prefill, 1, candidate.prefill_tokens, candidate.prefill_count)
        services.insert(0, {**other, "role": "prefill"})
    work, objective = question.workload, question.objective
    return {
        "model": model,
        "cluster": question.cluster.name,
        "workload": {
            "input_tokens": work.input.mean,
            "output_tokens": work.output.mean,
            "concurrency": work.concurrency,
            "requests_per_s": work.rate,
            "prefix_hit": work.prefix_hit,
        },
        "objective": {
            "ttft_s": objective.ttft,
            "tpot_s": objective.tpot,
            "output_tokens_per_s": objective.throughput,
        },
        "services": services,
        "expected": candidate.to_json(),
        "notes": notes(candidate),
    }


def _service(model: str, instance: Instance, batch: float, tokens: float, count: int) -> dict[str, Any]:
    options = serve_options(model, instance, batch, tokens)
    return {
        "instances": count,
        "devices_each": instance.layout.devices,
        "command": command(options),
        "options": options,
    }
