"""Which dry runs say something of a plan, and times of what a compiled program does: exchanges, sums, products beyond the model's own."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dsjax.config import ModelConfig
from dsjax.config.layers import kinds_of
from dsjax.model.layer_costs import attention_cost, values_beside
from dsjax.model.parameter_counts import expert_parameters, parameter_counts
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import Cluster
from dsjax.plan.compiled import DryRun
from dsjax.plan.figure import assumption
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.network import all_reduce, exchanged_rows, xla_collective
from dsjax.plan.precision import BF16
from dsjax.plan.workload import Asked, PlanOptions
from dsjax.texts import filled


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
    sent = sum(sent.times * sent.size for sent in run.collectives)
    about = {
        "beyond": weights[layout] - run.weight_bytes,
        "sent": sent,
        "count": sum(one.times for one in run.collectives),
    }
    about["other"] = wire_refusal(run, question.options) or halves_refusal(run, question.options)
    return DryRunUsage(run, True, filled("texts", "dry_run.txt", run=run, flops=sum(run.flops.values()), **about))


def nearest(runs: Iterable[DryRun], decode: bool, tokens: float) -> DryRun | None:
    """The dry run of that phase whose tokens a device are nearest."""
    same_step = [run for run in runs if (run.step == "decode") == decode]
    return min(same_step, key=lambda run: abs(math.log(run.tokens / tokens)), default=None)


def exchange_run(runs: Iterable[DryRun], decode: bool, method: str, tokens: float) -> DryRun | None:
    """The dry run whose exchanges a step of so many tokens a device has, by this method."""
    return nearest((run for run in runs if run.method == method), decode, tokens)


def exchanges(
    cluster: Cluster, run: DryRun, layers: int, top_k: int, ranks: int, tokens: float, slowest: float
) -> tuple[float, float]:
    """(there, back) of one layer: the collectives that were compiled, their bytes scaled to other tokens by the method's rows.

    `ragged`: the program tells the most that rows can be; even routing's share of it, and the busiest rank, are reckoned.
    """
    rows = exchanged_rows(run.method, tokens, top_k, ranks)
    if run.method == "ragged":
        factor = rows / (run.tokens * top_k / ranks) * slowest
    else:
        factor = rows / exchanged_rows(run.method, run.tokens, top_k, ranks)
    times = []
    for sent in run.exchanges:
        each = run.figure(sent.size / (sent.ranks - 1), "bytes to each rank", "B") * factor
        # Rows cross between hosts alone where a dispatch has two stages.
        near, of = (1, ranks) if run.method == "hierarchical" and not sent.inside else (None, None)
        kind = sent.kind.replace("-", "_")
        times.append(xla_collective(cluster, sent.ranks, each, kind=kind, near=near, of=of) * (sent.times / layers))
    half = len(times) - len(times) // 2
    return sum(times[:half]), sum(times[half:])


def tensor_parallel_sums(cluster: Cluster, run: DryRun, tokens: float) -> float:
    """All collectives of a step that `exchanges` leaves: bytes and times as compiled, bytes in proportion to tokens.

    Where no whole experts are spread, the dispatch's own are sums over `tp` too.
    """
    time = 0.0
    for sent in run.collectives:
        if not sent.dispatches or run.mesh.ep_size == 1:
            # As the operand of an all-reduce, which sends 2 (n - 1) ÷ n of it.
            operand = sent.size * sent.ranks / (2 * (sent.ranks - 1)) * tokens / run.tokens
            time += all_reduce(cluster, sent.ranks, run.figure(operand, "summed bytes", "B")) * sent.times
    return time


def needed_flops(config: ModelConfig, run: DryRun) -> float:
    """Operations of matrix products that a device has to do in the step that was compiled, under even routing."""
    tp, width, expert = run.mesh.tp_size, config.hidden_size, expert_parameters(config)
    work = {"rows": run.rows, "chunk": run.row_tokens, "context": run.context, "tp": tp}
    kinds = kinds_of(config.layer_runs)
    attention = sum(attention_cost(config, kind.attention, run.form, **work).flops * count for kind, count in kinds)
    beside = run.step_tokens * sum(values_beside(config, kind, tp) * count for kind, count in kinds)
    experts = run.tokens * config.num_experts_per_tok * expert * (config.num_moe_layers if config.is_moe else 0)
    head = run.rows * width * (config.vocab_size // tp)
    return attention + 2.0 * (beside + experts + head)


def excess(chip: Chip, config: ModelConfig, run: DryRun, tokens: float) -> float | None:
    """Seconds of a step's products beyond those that the model needs: padded buffers, experts that are masked out.

    None where the program counts no more than `needed_flops`; a loop of unknown length counts once, so that it can be less.
    """
    beyond = (sum(run.flops.values()) - needed_flops(config, run)) * tokens / run.tokens
    if beyond <= 0:
        return None
    return beyond / (assumption("XLA's products, share of peak") * chip.hardware.bf16_flops)
