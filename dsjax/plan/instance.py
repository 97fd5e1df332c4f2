"""`Instance`: a layout on a cluster with a workload, with its memory and the seconds of its steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from dsjax.config import ModelConfig
from dsjax.config.layers import kinds_of
from dsjax.plan.apart import ApartStep
from dsjax.plan.cluster import Cluster
from dsjax.plan.compiled import DryRun
from dsjax.plan.curves import Curve
from dsjax.plan.figure import Draw, Figure, assumption, drawing, drawn, spread
from dsjax.plan.fit import planned_launch, set_aside
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.measured_step import MeasuredStep
from dsjax.plan.memory import Memory, memory
from dsjax.plan.moves import fullest_stage, hand_over
from dsjax.plan.operator_tables import cached_in
from dsjax.plan.program import refusal, time_refusal
from dsjax.plan.step import MODULE, WAITING, StepModel
from dsjax.plan.step_basis import tables_of
from dsjax.plan.workload import PlanOptions, Workload

_LADDER = sorted({*(2**i for i in range(12)), *(3 * 2**i for i in range(10))})
"""Batches of a DP rank that the search tries."""


class PricedStep(NamedTuple):
    """Seconds of a step with the fastest `StepModel` that the options allow."""

    seconds: float
    model: StepModel
    waiting: float  # seconds in which the device waits for launches


@dataclass(frozen=True)
class Instance:
    """A layout on a cluster with a workload. steps: cache of prices for layouts with the same unit; `steps["shared"]`: for all layouts."""

    config: ModelConfig
    cluster: Cluster
    layout: InstanceLayout
    options: PlanOptions
    workload: Workload
    steps: dict = field(default_factory=dict, compare=False, repr=False)

    def on(self, cluster: Cluster, shared: dict, concurrency: float | None = None) -> Instance:
        """Return this instance on a cluster without cached prices, which another draw changes. Values from operator tables are kept.

        shared: cache for all instances on that cluster in that draw. concurrency: requests in flight instead of the workload's.
        """
        work = self.workload
        if concurrency is not None:
            work = dataclasses.replace(work, concurrency=concurrency, rate=None)
        key = tables_of(self.options.operators)
        table_values = self.steps.get("shared", {}).get(key)
        if table_values is not None and cluster.hardware is self.cluster.hardware:
            shared.setdefault(key, table_values)
        key = ("steps", self.layout.unit, self.layout.mesh.pp_size)
        steps = shared.setdefault(key, {"shared": shared}) if concurrency is None else {}
        if cluster is self.cluster and "decode curve" in self.steps:  # see `decode_curve`
            most = float(max(self.max_batch, 1))
            with drawing(Draw()):  # the middle values: the step may not be priced yet
                steps.setdefault("usual curve", (self.steps["decode curve"], most, self.decode_step(most)))
        return dataclasses.replace(self, cluster=cluster, workload=work, steps=steps)

    def requests(self, batch: float) -> float:
        """Running requests of a DP rank: one batch for each pipeline stage."""
        return batch * self.layout.mesh.pp_size

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of `make`, computed once for all layouts with the same unit."""
        if key not in self.steps:
            self.steps[key] = make()
        return self.steps[key]

    @cached_property
    def memory(self) -> Memory:
        """The memory of one device."""
        device = self.cluster.hardware.visible_bytes
        options = self.options
        launch = planned_launch(options, device, self.layout, math.ceil(self.workload.held))
        aside = set_aside(self.config, self.layout, options.precision, launch)  # all but weights and cache
        about = (aside, options.drafts > 0, self.dry_runs, self.places_by_load)
        return memory(self.config, self.layout, options.precision, device, *about)

    @cached_property
    def cache_tokens(self) -> Figure:
        """Tokens of a DP rank's KV cache, with an interval."""
        [tokens] = spread(lambda: [self.on(self.cluster, {}).memory.cache_tokens])  # `on` drops `memory`
        low = max(0.0, tokens.low) if tokens > 0 else tokens.low
        return Figure(tokens, low, tokens.high, tokens.kinds, unit="tokens")

    @property
    def places_by_load(self) -> bool:
        """Whether experts are rebalanced by load while serving. dsjax does not rebalance if pipeline stages span several processes."""
        layout = self.layout
        engine = self.options.engine
        spanning = layout.mesh.pp_size > 1 and layout.devices > self.cluster.devices_per_host and engine.name == "dsjax"
        return engine.balances and not spanning and layout.redundant > 0 and layout.expert_mesh.ep_size > 1

    @cached_property
    def dry_runs(self) -> tuple[DryRun, ...]:
        """The dry runs of this layout's unit that the plan can use."""
        options = self.options
        if self.layout.experts or self.layout.mesh.pp_size > 1:
            return ()
        # Copies of the experts do not communicate, so all of them run the unit's program.
        usable = (run for run in options.compiled if refusal(run, self) is None)
        return tuple(run for run in usable if run.layout(self.config) == self.layout.unit)

    @cached_property
    def replicas(self) -> int:
        """DP ranks × pipeline stages: batches that are computed at the same time."""
        return self.layout.mesh.dp_size * self.layout.mesh.pp_size

    @cached_property
    def max_batch(self) -> int:
        """Requests that the cache of a DP rank holds."""
        return self.memory.max_batch(self.workload.held)

    def rows(self, batch: float) -> float:
        """Requests of the fullest DP rank, which all ranks wait for: the mean `batch`, rounded up. A single rank has the mean."""
        return max(1.0, batch) if self.layout.mesh.dp_size == 1 else float(math.ceil(batch - 1e-9))

    def batches(self) -> list[int]:
        """Batches of a DP rank to try, up to the largest that memory holds."""
        most = min(self.max_batch, _LADDER[-1])
        return sorted({b for b in _LADDER if b <= most} | ({most} if most else set()))

    @cached_in("steps")
    def step_models(self) -> list[StepModel]:
        """Cost models to choose the fastest from: with and without two-batch overlap, or with each number of micro-batches (AFD)."""
        options = self.options
        engine = options.engine
        is_dsjax = engine.name == "dsjax"
        args = (self.config, self.cluster, self.layout.unit)
        kwargs = {"shared": self.steps.setdefault("shared", {}), "balancing": self.places_by_load}
        if self.layout.experts:
            return [
                ApartStep(*args, options, overlap=n > 1, micro_batches=n, **kwargs) for n in (1, options.afd_stages)
            ]
        choices = {"auto": (False, True), "on": (True,), "off": (False,)}[options.overlap]
        if is_dsjax:  # only with `--enable-dbo`; its thresholds then choose the faster one
            choices = (False, True) if options.overlap == "on" else (False,)
        if self.layout.mesh.ep_size == 1 or not engine.overlaps:
            choices = (False,)
        make = MeasuredStep if options.measured else StepModel
        return [make(*args, options, overlap=overlap, **kwargs) for overlap in choices]

    def _priced(self, key: tuple, parts_of: Callable[[StepModel], dict], tokens: float, decode: bool) -> PricedStep:
        """Price a step with each of `step_models` and keep the fastest, once for a key. parts_of: a model's parts. tokens: of a DP rank."""
        if key not in self.steps:
            candidates = []
            for model in self.step_models():
                parts = parts_of(model)
                seconds = model.seconds(parts) * self.pace(decode, model.overlap)
                candidates.append(PricedStep(self.staged(seconds, tokens, decode), model, parts.get(WAITING, 0.0)))
            self.steps[key] = min(candidates, key=lambda one: one.seconds)
        return self.steps[key]

    def _decode_parts(self, model: StepModel, batch: float) -> dict[str, float]:
        work = self.workload
        return model.decode_parts(batch, work.context, drafts=self.options.drafts, uneven=work.uneven)

    def _decode(self, batch: float) -> PricedStep:
        batch = self.rows(batch)
        tokens = batch * (1 + self.options.drafts)
        return self._priced(("decode", batch), lambda model: self._decode_parts(model, batch), tokens, decode=True)

    def _prefill(self, tokens: float, busy: float = 1.0) -> PricedStep:
        parts_of = lambda model: model.prefill_parts(tokens, busy=busy, **self._prompts)  # noqa: E731
        return self._priced(("prefill", tokens, busy), parts_of, tokens, decode=False)

    def decode_step(self, batch: float) -> float:
        """Seconds of one decode step."""
        return self._decode(batch).seconds

    def decode_parts(self, batch: float) -> dict[str, float]:
        """Seconds of the parts of `decode_step`, which add up to it."""
        step = self._decode(batch)
        return _with_rest(self._decode_parts(step.model, batch), step.seconds)

    def prefill_step(self, tokens: float, busy: float = 1.0) -> float:
        """Seconds of one prefill step (`static_ctx`) with `tokens` prompt tokens on each DP rank. busy: share of the ranks with prompts."""
        return self._prefill(tokens, busy).seconds

    def launch_slack(self, tokens: float, busy: float = 1.0) -> float:
        """Seconds of `prefill_step` in which the device waits for kernel launches. Decodes in the same program can use this time."""
        return self._prefill(tokens, busy).waiting

    def prefill_parts(self, tokens: float) -> dict[str, float]:
        """Seconds of the parts of `prefill_step`, which add up to it."""
        step = self._prefill(tokens)
        return _with_rest(step.model.prefill_parts(tokens, **self._prompts), step.seconds)

    @cached_property
    def _prompts(self) -> dict[str, float]:
        """Arguments of `prefill_parts` for the workload's prompts. The mean length is over tokens: long prompts have more of them."""
        work = self.workload
        mean_length = work.computed * (1 + work.input.variation**2)
        return {"prompt": mean_length, "cached": work.cached, "drafts": self.options.drafts}

    @property
    def decode_curve(self) -> Curve:
        """Seconds of a decode step over the batch, linear between the batches that the search tries."""
        if "usual curve" in self.steps:  # of the middle values, from `on`: one step of this draw scales it
            curve, most, usual = self.steps["usual curve"]
            return curve.times(self.decode_step(most) / usual)
        if "decode curve" not in self.steps:
            tried = [float(batch) for batch in _LADDER if batch <= max(self.max_batch, 1)]
            self.steps["decode curve"] = Curve((batch, self.decode_step(batch)) for batch in tried)
            self.decode_step(float(max(self.max_batch, 1)))  # `on` reads this step too
        return self.steps["decode curve"]

    @cached_in("steps")
    def pace(self, decode: bool, halves: bool = False) -> float:
        """Return a dry run's timeline ÷ the estimate of the same step; 1 without a dry run, and for engines other than dsjax.

        halves: prefer dry runs of a step with two-batch overlap.
        """
        usable_runs = (run for run in self.dry_runs if not time_refusal(run, self.options))
        runs = [run for run in usable_runs if (run.step == "decode") == decode]
        run = min(runs, key=lambda run: run.halves != halves, default=None)
        return drawn(run.timeline) / self.compiled_step(run) if run else 1.0

    def compiled_step(self, run: DryRun) -> float:
        """Estimated seconds of the step of a dry run."""
        models = self.step_models()
        model = next((one for one in models if one.overlap == run.halves), models[0])
        if run.step == "decode":
            return model.decode(run.batch, run.context)
        return model.prefill(run.step_tokens, prompt=run.chunk, cached=run.context - run.chunk)

    def overlapped(self, batch: float) -> bool:
        """Whether `decode_step` overlaps micro-batches."""
        return self.batches_in_turn(batch) > 1

    def batches_in_turn(self, batch: float) -> int:
        """Micro-batches of `decode_step`: 1, 2, or with AFD up to `--num-afd-stages`."""
        model = self._decode(batch).model
        return getattr(model, "micro_batches", 1 + model.overlap) if self.config.is_moe else 1  # `ApartStep` has it

    def halved_from(self, most: int) -> int | None:
        """Return the fewest tokens per DP rank from which two-batch overlap speeds up decode steps of up to ``most`` requests, or None."""
        least = None
        for batch in sorted({one for one in self.batches() if one < most} | {most}, reverse=True):
            if not self.overlapped(batch):
                break
            least = batch * (1 + self.options.drafts)
        return least

    def halved(self, tokens: float) -> bool:
        """Whether `prefill_step` overlaps two half batches."""
        return self._prefill(tokens).model.overlap and self.config.is_moe

    def tpot(self, batch: float) -> float:
        """Return the seconds between two tokens of a request while no prompts run (`static_gen`)."""
        return self.decode_step(batch) / self.options.tokens_a_step

    def staged(self, step: float, tokens: float, decode: bool) -> float:
        """Seconds of a step through all stages. step: seconds of all layers on the devices of one stage. tokens: of a DP rank."""
        config, mesh = self.config, self.layout.mesh
        is_dsjax = self.options.engine.name == "dsjax"
        if mesh.pp_size == 1:
            return step
        hand_over_seconds = hand_over(self.cluster, mesh, tokens, config.hidden_size, is_dsjax)
        # A decode batch is rescheduled when its results arrive. With one batch per stage, nothing hides the host's time.
        host_seconds = assumption("host, decode, not overlapped") if decode else 0.0
        return step * fullest_stage(config, mesh.pp_size, self.options.drafts > 0) + hand_over_seconds + host_seconds

    @cached_in("steps")
    def decode_attention(self, batch: float) -> float:
        """Seconds of attention in all layers of a decode step."""
        context = self.workload.context
        tokens = batch * (1 + self.options.drafts)
        model = self.step_models()[0]
        kinds = kinds_of(self.config.layer_runs)
        return sum(
            model.attention(tokens, batch * context, context, True, kind.attention) * count for kind, count in kinds
        )

    @cached_in("steps")
    def drafting(self, batch: float) -> float:
        """Return the seconds that drafting takes in a decode step."""
        if not self.options.drafts:
            return 0.0
        parts = self._decode_parts(self.step_models()[0], batch)
        return sum(parts.get(name, 0.0) for name in MODULE)

    def prefill_sizes(self, chunks: bool = False) -> list[float]:
        """Return the prompt tokens per DP rank and step to try: one or more prompts within a step's limit. chunks: also prompt chunks."""
        # A dry run's temporaries say nothing about larger steps.
        compiled = [run.step_tokens for run in self.dry_runs if run.step == "prefill"]
        most = min(self.options.prefill_tokens, max(compiled, default=math.inf))
        one_prompt = min(self.workload.computed, most)
        sizes = {one_prompt} | {float(n) for n in (1024, 2048, 4096, 8192, 16384, 32768) if one_prompt < n <= most}
        if chunks:
            sizes |= {float(n) for n in (1024, 2048, 4096, 8192) if n < one_prompt}
        return sorted(sizes | {float(max(one_prompt, min(most, one_prompt * (most // one_prompt))))})  # whole prompts

    def prompt_seconds(self, tokens: float) -> float:
        """Return the seconds that the instance takes for one prompt per DP rank, in steps of `tokens` tokens per rank."""
        return self.prefill_step(tokens) * (self.workload.computed / tokens)


def _with_rest(parts: dict[str, float], step: float) -> dict[str, float]:
    """Return the parts of a step plus the rest: pipeline stages, or engine time outside its operations."""
    rest = step - sum(parts.values())
    return parts if abs(rest) < 1e-9 * step else {**parts, "beyond single operations, and stages": rest}
