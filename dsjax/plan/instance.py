"""One instance of a layout: its memory, its steps, and what it does in the static modes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
from dsjax.plan.operator_tables import kept as kept_in
from dsjax.plan.program import refusal, time_refusal
from dsjax.plan.step import MODULE, WAITING, StepModel
from dsjax.plan.step_basis import tables_of
from dsjax.plan.workload import PlanOptions, Workload

_LADDER = sorted({*(2**i for i in range(12)), *(3 * 2**i for i in range(10))})
"""Batches of a DP rank that are tried."""


@dataclass(frozen=True)
class Instance:
    """A layout on a cluster, asked about a workload. steps: prices of its unit; `steps["shared"]`: of all layouts on the cluster."""

    config: ModelConfig
    cluster: Cluster
    layout: InstanceLayout
    options: PlanOptions
    workload: Workload
    steps: dict = field(default_factory=dict, compare=False, repr=False)

    def on(self, cluster: Cluster, shared: dict, concurrency: float | None = None) -> Instance:
        """Ask the layout on a cluster anew, keeping nothing that was priced before but the tables of operations.

        shared: what instances on that cluster have in common. concurrency: requests in flight, in place of the workload's.
        """
        work = self.workload
        if concurrency is not None:
            work = dataclasses.replace(work, concurrency=concurrency, rate=None)
        key = tables_of(self.options.operators)
        known = self.steps.get("shared", {}).get(key)
        if known is not None and cluster.hardware is self.cluster.hardware:
            shared.setdefault(key, known)
        key = ("steps", self.layout.unit, self.layout.mesh.pp_size)
        steps = shared.setdefault(key, {"shared": shared}) if concurrency is None else {}
        if cluster is self.cluster and "decode curve" in self.steps:
            most = float(max(self.max_batch, 1))
            with drawing(Draw()):  # else a step that was not priced yet would take this draw's assumptions
                steps.setdefault("usual curve", (self.steps["decode curve"], most, self.decode_step(most)))
        return dataclasses.replace(self, cluster=cluster, workload=work, steps=steps)

    def requests(self, batch: float) -> float:
        """Running requests of a DP rank, of all batches that its stages take in turn."""
        return batch * self.layout.mesh.pp_size

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of `make`, computed once for all layouts of the same unit."""
        if key not in self.steps:
            self.steps[key] = make()
        return self.steps[key]

    @cached_property
    def memory(self) -> Memory:
        """What the memory of one device holds."""
        device, options = self.cluster.hardware.visible_bytes, self.options
        launch = planned_launch(options, device, self.layout, math.ceil(self.workload.held))
        aside = set_aside(self.config, self.layout, options.precision, launch)
        about = (aside, options.drafts > 0, self.dry_runs, self.places_by_load)
        return memory(self.config, self.layout, options.precision, device, *about)

    @cached_property
    def cache_tokens(self) -> Figure:
        """Tokens of a DP rank's cache, with their interval."""
        [tokens] = spread(lambda: [self.on(self.cluster, {}).memory.cache_tokens])
        low = max(0.0, tokens.low) if tokens > 0 else tokens.low
        return Figure(tokens, low, tokens.high, tokens.kinds, unit="tokens")

    @property
    def places_by_load(self) -> bool:
        """Whether experts are moved after their load while serving. dsjax does not where stages are in several processes, one a host."""
        layout, engine = self.layout, self.options.engine
        apart = layout.mesh.pp_size > 1 and layout.devices > self.cluster.devices_per_host and engine.name == "dsjax"
        return engine.balances and not apart and layout.redundant > 0 and layout.expert_mesh.ep_size > 1

    @cached_property
    def dry_runs(self) -> tuple[DryRun, ...]:
        """Those that were compiled for this layout."""
        options = self.options
        if self.layout.experts or self.layout.mesh.pp_size > 1:
            return ()
        # Copies of the experts never communicate, so a program of one copy is a program of all.
        mine = (run for run in options.compiled if refusal(run, self) is None)
        return tuple(run for run in mine if run.layout(self.config) == self.layout.unit)

    @cached_property
    def replicas(self) -> int:
        """DP ranks, each counted once for each stage: as many batches of it are under way."""
        return self.layout.mesh.dp_size * self.layout.mesh.pp_size

    @cached_property
    def max_batch(self) -> int:
        """Requests of a DP rank that the cache holds."""
        return self.memory.max_batch(self.workload.held)

    def rows(self, batch: float) -> float:
        """Requests of the fullest DP rank, for which a step's other ranks wait; a lone rank's batch may be a mean of whole ones."""
        return max(1.0, batch) if self.layout.mesh.dp_size == 1 else float(math.ceil(batch - 1e-9))

    def batches(self) -> list[int]:
        """Batches of a DP rank to try, up to what memory holds."""
        most = min(self.max_batch, _LADDER[-1])
        return sorted({b for b in _LADDER if b <= most} | ({most} if most else set()))

    @kept_in("steps")
    def step_models(self) -> list[StepModel]:
        """With and without two-batch overlap, as the options allow; the faster one counts."""
        options, engine = self.options, self.options.engine
        own, about = engine.name == "dsjax", (self.config, self.cluster, self.layout.unit)
        alike = {"shared": self.steps.setdefault("shared", {}), "balancing": self.places_by_load}
        if self.layout.experts:
            return [
                ApartStep(*about, options, overlap=n > 1, micro_batches=n, **alike) for n in (1, options.afd_stages)
            ]
        choices = {"auto": (False, True), "on": (True,), "off": (False,)}[options.overlap]
        if own:  # it has to be asked for, as --enable-dbo; thresholds then choose the faster
            choices = (False, True) if options.overlap == "on" else (False,)
        if self.layout.mesh.ep_size == 1 or not engine.overlaps:
            choices = (False,)
        make = MeasuredStep if options.measured else StepModel
        return [make(*about, options, overlap=halves, **alike) for halves in choices]

    def decode_step(self, batch: float) -> float:
        """Seconds of one decode step, with the overlap that makes it faster."""
        return self._decode(batch)[0]

    def _decode(self, batch: float) -> tuple[float, StepModel]:
        batch = self.rows(batch)
        found = self.steps.get(("decode", batch))
        if found is None:
            drafts, context, uneven = self.options.drafts, self.workload.context, self.workload.uneven
            times = []
            for model in self.step_models():
                step = model.decode(batch, context, drafts=drafts, uneven=uneven) * self.pace(True, model.overlap)
                times.append((self.staged(step, batch * (1 + drafts), True), model))
            found = self.steps["decode", batch] = min(times, key=lambda one: one[0])
        return found

    def decode_parts(self, batch: float) -> dict[str, float]:
        """Seconds of the parts of `decode_step`, which add up to it."""
        (step, model), work = self._decode(batch), self.workload
        parts = model.decode_parts(batch, work.context, drafts=self.options.drafts, uneven=work.uneven)
        return _with_rest(parts, step)

    def prefill_step(self, tokens: float, busy: float = 1.0) -> float:
        """`static_ctx`: seconds of one prefill step of `tokens` prompt tokens on each DP rank, or on this share of them."""
        return self._prefill(tokens, busy)[0]

    def launch_slack(self, tokens: float, busy: float = 1.0) -> float:
        """Seconds of such a prefill step in which the device waits for launches: decodes in the same program may fill them."""
        return self._prefill(tokens, busy)[1]

    def _prefill(self, tokens: float, busy: float = 1.0) -> tuple[float, float, StepModel]:
        key = ("prefill", tokens, busy)
        found = self.steps.get(key)
        if found is None:
            times = []
            for model in self.step_models():
                parts = model.prefill_parts(tokens, busy=busy, **self._prompts)
                step = model.seconds(parts) * self.pace(False, model.overlap)
                times.append((self.staged(step, tokens, False), parts.get(WAITING, 0.0), model))
            found = self.steps[key] = min(times, key=lambda one: one[0])
        return found

    def prefill_parts(self, tokens: float) -> dict[str, float]:
        """Seconds of the parts of `prefill_step`, which add up to it."""
        step, _, model = self._prefill(tokens)
        return _with_rest(model.prefill_parts(tokens, **self._prompts), step)

    @cached_property
    def _prompts(self) -> dict[str, float]:
        """What a prefill step is told of its prompts, whose new tokens are counted as one of them sees them: long prompts have more."""
        work = self.workload
        weighted = work.computed * (1 + work.input.variation**2)
        return {"prompt": weighted, "cached": work.cached, "drafts": self.options.drafts}

    @property
    def decode_curve(self) -> Curve:
        """Seconds of a decode step over the batch, straight between those that are tried."""
        if "usual curve" in self.steps:  # of the same instance before a draw, which moves it up or down
            curve, most, usual = self.steps["usual curve"]
            return curve.times(self.decode_step(most) / usual)
        if "decode curve" not in self.steps:
            tried = [float(batch) for batch in _LADDER if batch <= max(self.max_batch, 1)]
            self.steps["decode curve"] = Curve((batch, self.decode_step(batch)) for batch in tried)
            self.decode_step(float(max(self.max_batch, 1)))  # with which draws compare theirs, kept before any of them
        return self.steps["decode curve"]

    @kept_in("steps")
    def pace(self, decode: bool, halves: bool = False) -> float:
        """Timeline of a dry run of such a step ÷ the estimate; 1 without one, or of another engine than dsjax. halves: of a step in two
        halves; where only the other kind was compiled, it tells."""
        known = (run for run in self.dry_runs if not time_refusal(run, self.options))
        runs = [run for run in known if (run.step == "decode") == decode]
        run = min(runs, key=lambda run: run.halves != halves, default=None)
        return drawn(run.timeline) / self.compiled_step(run) if run else 1.0

    def compiled_step(self, run: DryRun) -> float:
        """Seconds of the step that was compiled: the same rows and context, whole or in halves as that is."""
        models = self.step_models()
        model = next((one for one in models if one.overlap == run.halves), models[0])
        if run.step == "decode":
            return model.decode(run.batch, run.context)
        return model.prefill(run.step_tokens, prompt=run.chunk, cached=run.context - run.chunk)

    def overlapped(self, batch: float) -> bool:
        """Whether `decode_step` overlaps two half batches."""
        return self.batches_in_turn(batch) > 1

    def batches_in_turn(self, batch: float) -> int:
        """Micro-batches that `decode_step` has: 1, 2, or where attention and experts are apart up to `--num-afd-stages`."""
        model = self._decode(batch)[1]
        return getattr(model, "micro_batches", 1 + model.overlap) if self.config.is_moe else 1

    def halved_from(self, most: int) -> int | None:
        """Least tokens of a DP rank whose decode step is faster in two halves, as are all above it up to ``most`` requests, or None."""
        least = None
        for batch in sorted({one for one in self.batches() if one < most} | {most}, reverse=True):
            if not self.overlapped(batch):
                break
            least = batch * (1 + self.options.drafts)
        return least

    def halved(self, tokens: float) -> bool:
        """Whether `prefill_step` overlaps two half batches."""
        return self._prefill(tokens)[2].overlap and self.config.is_moe

    def tpot(self, batch: float) -> float:
        """`static_gen`: seconds between a request's tokens when nothing but decoding happens."""
        return self.decode_step(batch) / self.options.tokens_a_step

    def staged(self, step: float, tokens: float, decode: bool) -> float:
        """Seconds of a step through all stages, given those of the whole model on one stage's devices. tokens: of a DP rank."""
        config, mesh, own = self.config, self.layout.mesh, self.options.engine.name == "dsjax"
        if mesh.pp_size == 1:
            return step
        moved = hand_over(self.cluster, mesh, tokens, config.hidden_size, own)
        # A batch of decodes is planned again when its results are there, and with as many batches as stages nothing hides the host.
        host = assumption("host, decode, not overlapped") if decode else 0.0
        return step * fullest_stage(config, mesh.pp_size, self.options.drafts > 0) + moved + host

    @kept_in("steps")
    def decode_attention(self, batch: float) -> float:
        """Seconds of the attention of a decode step's layers."""
        context, rows = self.workload.context, batch * (1 + self.options.drafts)
        model, kinds = self.step_models()[0], kinds_of(self.config.layer_runs)
        return sum(
            model.attention(rows, batch * context, context, True, kind.attention) * count for kind, count in kinds
        )

    @kept_in("steps")
    def drafting(self, batch: float) -> float:
        """Seconds of a decode step in which it makes its drafts."""
        drafts, work = self.options.drafts, self.workload
        if not drafts:
            return 0.0
        parts = self.step_models()[0].decode_parts(batch, work.context, drafts=drafts, uneven=work.uneven)
        return sum(parts.get(name, 0.0) for name in MODULE)

    def prefill_sizes(self, chunks: bool = False) -> list[float]:
        """Prompt tokens of a DP rank in a step to try: one prompt, and more of them while they fit the step's limit; chunks too."""
        # Temporaries are known up to the step that was compiled, and grow with it.
        compiled = [run.step_tokens for run in self.dry_runs if run.step == "prefill"]
        most = min(self.options.prefill_tokens, max(compiled, default=math.inf))
        one = min(self.workload.computed, most)
        sizes = {one} | {float(n) for n in (1024, 2048, 4096, 8192, 16384, 32768) if one < n <= most}
        if chunks:
            sizes |= {float(n) for n in (1024, 2048, 4096, 8192) if n < one}
        return sorted(sizes | {float(max(one, min(most, one * (most // one))))})

    def prompt_seconds(self, tokens: float) -> float:
        """Seconds of the whole instance that one prompt of one DP rank costs, in steps of `tokens` a rank."""
        return self.prefill_step(tokens) * (self.workload.computed / tokens)


def _with_rest(parts: dict[str, float], step: float) -> dict[str, float]:
    """The parts of a step, and what is beyond them: stages, or what a whole engine takes beside its operations."""
    rest = step - sum(parts.values())
    return parts if abs(rest) < 1e-9 * step else {**parts, "beyond single operations, and stages": rest}
