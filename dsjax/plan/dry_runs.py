"""Which dry runs say something of a plan: of its model, device, precision, layout and dispatch; and what was taken of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsjax.model.parameter_counts import parameter_counts
from dsjax.plan.compiled import DryRun
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.precision import BF16
from dsjax.plan.workload import Asked, PlanOptions


def refusal(run: DryRun, asked: Asked) -> str | None:
    """Why a dry run says nothing of a plan's model, device and precision; None where it does."""
    total, device = parameter_counts(asked.config)["main_model"], asked.cluster.hardware.key
    precision = asked.options.precision
    if run.parameters != total:
        return f"it is of a model of {run.parameters:,} parameters, the plan's has {total:,}"
    if run.target != device:
        return f"it was compiled for {run.target}, the cluster has {device}"
    if run.weights != precision.weights:
        return f"its weights are {run.weights}, the plan's precision is {precision.name}"
    if run.kv_cache_dtype != ("bfloat16" if precision.cache == BF16 else "float8_e4m3fn"):
        return f"its cache is {run.kv_cache_dtype}, the plan's has {precision.cache:g} bytes a value"
    return None


def wire_refusal(run: DryRun, options: PlanOptions) -> str | None:
    """Why a plan cannot take a dry run's exchanges; None where it can, or where there are none."""
    dispatch = options.dispatch
    if dispatch == "deepep":
        return "the plan has DeepEP's kernels (--dispatch deepep), the program dsjax's own"
    if run.method and dispatch not in ("auto", run.method):
        return f"the program's dispatch is {run.method}, the plan's {dispatch}"
    wire = "compute" if options.precision.wire == BF16 else "fp8"
    if run.method and run.wire != wire:
        return f"the program's wire is {run.wire}, the plan's {wire}: compile with --dispatch-wire {wire}"
    return None


def halves_refusal(run: DryRun, options: PlanOptions) -> str | None:
    """Why a plan of dsjax cannot take the time of a dry run in two halves; None where it can, or where the step is whole."""
    if run.halves and options.overlap != "on":
        return "the program computes the step in two halves, and the plan's does not: give --two-batch-overlap on"
    return None


@dataclass(frozen=True)
class DryRunUsage:
    """What a plan took from a dry run; `used` is False where it took nothing. text: what, or why not."""

    run: DryRun
    used: bool
    text: str

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        run = self.run
        about = {"file": run.file, "mesh": str(run.mesh), "target": run.target, "step": run.step}
        return about | {"used": self.used, "what": self.text}


def usage(run: DryRun, question: Asked, weights: Mapping[InstanceLayout, int]) -> DryRunUsage:
    """What a plan over these layouts (of units, with their weights' bytes) takes from a dry run."""
    reason, layout = refusal(run, question), run.layout(question.config)
    if reason is None and layout not in weights:
        reason = f"no layout of this plan is {layout} of {layout.devices} devices"
    if reason:
        return DryRunUsage(run, False, reason)
    beyond = weights[layout] - run.weight_bytes
    agree = f"to within {beyond:+,} bytes" if beyond else "to the byte"
    if other := wire_refusal(run, question.options) or halves_refusal(run, question.options):
        taken = f"not its exchanges and operations: {other}"
    elif run.halves:
        timed = f"its time, {run.timeline * 1e3:.4g} ms" if run.timeline else "no time: it has no timeline"
        taken = f"of a step in two halves {timed}"
    else:
        count = sum(sent.times for sent in run.collectives)
        sent = sum(sent.times * sent.size for sent in run.collectives)
        taken = f"{count:g} collectives that send {sent / 1e9:.3g} GB; {sum(run.flops.values()):.3g} operations"
    memory = f"temporaries {run.temporaries / 1e9:.2f} GB; its weights agree with the plan's {agree}"
    return DryRunUsage(run, True, f"{memory}; {taken}")
