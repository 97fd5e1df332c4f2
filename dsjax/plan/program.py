"""Which dry runs say something of a plan: of which layout's memory, and of dsjax's own steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsjax.model.parameter_counts import parameter_counts
from dsjax.plan.compiled import DryRun
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.precision import BF16
from dsjax.plan.workload import Asked, PlanOptions
from dsjax.texts import filled


def refusal(run: DryRun, asked: Asked) -> str | None:
    """Why a dry run says nothing of a plan's model, device and precision; None where it does."""
    total, device = parameter_counts(asked.config)["main_model"], asked.cluster.hardware.key
    precision = asked.options.precision
    if run.parameters.total != total:
        return f"it is of a model of {run.parameters.total:,} parameters, the plan's has {total:,}"
    if run.target != device:
        return f"it was compiled for {run.target}, the cluster has {device}"
    if run.weights != precision.weights:
        return f"its weights are {run.weights}, the plan's precision is {precision.name}"
    if run.kv_cache_dtype != ("bfloat16" if precision.cache == BF16 else "float8_e4m3fn"):
        return f"its cache is {run.kv_cache_dtype}, the plan's has {precision.cache:g} bytes a value"
    return None


def time_refusal(run: DryRun, options: PlanOptions) -> str | None:
    """Why a plan cannot take a dry run's time; None where it can."""
    if options.engine.name != "dsjax":
        return f"it is a program of dsjax, and the plan is for {options.engine.name}"
    if run.halves and options.overlap != "on":
        return "the program computes the step in two halves, and the plan's does not: give --two-batch-overlap on"
    return None if run.timeline else "it has no timeline: give dsjax dryrun --timeline too"


@dataclass(frozen=True)
class DryRunUsage:
    """What a plan took from a dry run; `used` is False where it took nothing. text: what, or why not."""

    run: DryRun
    used: bool
    text: str

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        run = self.run
        about = {"file": run.file, "mesh": run.mesh, "target": run.target, "step": run.step}
        return about | {"used": self.used, "what": self.text}


def usage(run: DryRun, question: Asked, weights: Mapping[InstanceLayout, int]) -> DryRunUsage:
    """What a plan over these layouts (of units, with their weights' bytes) takes from a dry run."""
    reason, layout = refusal(run, question), run.layout(question.config)
    if reason is None and layout not in weights:
        reason = f"no layout of this plan is {layout} of {layout.devices} devices"
    if reason:
        return DryRunUsage(run, False, reason)
    about = {"beyond": weights[layout] - run.device_bytes.weights_total, "other": time_refusal(run, question.options)}
    return DryRunUsage(run, True, filled("texts", "dry_run.txt", run=run, **about))
