"""Which dry runs a plan uses, for the memory of a layout and for the time of dsjax's own steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsjax.model.parameter_counts import parameter_counts
from dsjax.plan import rules
from dsjax.plan.compiled import DryRun
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.workload import Asked, PlanOptions
from dsjax.texts import filled


def refusal(run: DryRun, asked: Asked) -> str | None:
    """Return why a plan cannot use a dry run (another model, device or precision), or None if it can."""
    about = {"device": asked.cluster.hardware.key, "precision": asked.options.precision}
    return rules.refusal("dry_run", run=run, total=parameter_counts(asked.config)["main_model"], **about)


def time_refusal(run: DryRun, options: PlanOptions) -> str | None:
    """Return why a plan cannot use the time of a dry run, or None if it can."""
    return rules.refusal("dry_run_time", run=run, o=options)


@dataclass(frozen=True)
class DryRunUsage:
    """Use of a dry run by a plan."""

    run: DryRun
    used: bool
    text: str  # the figures that the plan took, or the reason that it took none

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        run = self.run
        about = {"file": run.file, "mesh": run.mesh, "target": run.target, "step": run.step}
        return about | {"used": self.used, "what": self.text}


def usage(run: DryRun, question: Asked, weights: Mapping[InstanceLayout, int]) -> DryRunUsage:
    """Return how a plan uses a dry run. weights: `InstanceLayout.unit` of each layout of the plan → bytes of its weights."""
    reason = refusal(run, question)
    layout = run.layout(question.config)
    if reason is None and layout not in weights:
        reason = f"no layout of this plan is {layout} of {layout.devices} devices"
    if reason:
        return DryRunUsage(run, used=False, text=reason)
    about = {"beyond": weights[layout] - run.device_bytes.weights_total, "other": time_refusal(run, question.options)}
    return DryRunUsage(run, used=True, text=filled("texts", "dry_run.txt", run=run, **about))
