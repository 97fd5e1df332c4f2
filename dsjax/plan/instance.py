"""One instance of a layout: its memory, its steps, and what it does in the static modes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property, partial

from dsjax.config import ModelConfig
from dsjax.plan.apart import apart_models
from dsjax.plan.cluster import Cluster
from dsjax.plan.compiled import DryRun
from dsjax.plan.curves import Curve
from dsjax.plan.dry_runs import halves_refusal, runs_of, wire_refusal
from dsjax.plan.figure import Figure, unless_settled
from dsjax.plan.fit import planned_launch, set_aside
from dsjax.plan.host_time import HOST_TIMES
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.measured_step import MeasuredStep
from dsjax.plan.memory import Memory, memory
from dsjax.plan.stages import through_stages
from dsjax.plan.step import StepModel
from dsjax.plan.workload import PlanOptions, Workload

_LADDER = sorted({*(2**i for i in range(12)), *(3 * 2**i for i in range(10))})
"""Batches of a DP rank that are tried."""


@dataclass(frozen=True)
class Instance:
    """A layout on a cluster, asked about a workload.

    only_middle: times are middle values without intervals and derivations, which the search compares.
    steps: of its unit, shared by the layouts that are made of it; `steps["shared"]`: of all layouts on the cluster.
    """

    config: ModelConfig
    cluster: Cluster
    layout: InstanceLayout
    options: PlanOptions
    workload: Workload
    steps: dict = field(default_factory=dict, compare=False, repr=False)
    only_middle: bool = False

    @cached_property
    def middle(self) -> Instance:
        """An equal instance of which only the middle values of times are worked out."""
        if self.only_middle:
            return self
        steps = self.steps.setdefault("middle", {"shared": self.steps.setdefault("shared", {})})
        if "stage" in self.steps:
            steps.setdefault("stage", self.steps["stage"])
        return dataclasses.replace(self, only_middle=True, steps=steps)

    @cached_property
    def stage(self) -> Instance | None:
        """The whole model on the devices of one stage, where there are several, whose batches take turns (`stages.py`); else None."""
        mesh = self.layout.mesh
        if mesh.pp_size == 1:
            return None
        steps = self.steps.setdefault("stage", {"shared": self.steps.setdefault("shared", {})})
        layout = dataclasses.replace(self.layout, mesh=mesh.stage)
        whole = dataclasses.replace(self, layout=layout, steps=steps, only_middle=False)
        return whole.middle if self.only_middle else whole

    def requests(self, batch: float) -> float:
        """Running requests of a DP rank, of all batches that its stages take in turn."""
        return batch * self.layout.mesh.pp_size

    @cached_property
    def memory(self) -> Memory:
        """What the memory of one device holds."""
        bytes_of_device = self.cluster.hardware.visible_bytes
        precision, drafts = self.options.precision, self.options.drafts > 0
        beside = self.cluster.experts
        there = beside.hardware.visible_bytes if beside else None
        launch = planned_launch(self.options, bytes_of_device, self.layout, math.ceil(self.workload.held))
        aside = set_aside(self.config, self.layout, precision, launch)
        return memory(
            self.config,
            self.layout,
            precision,
            bytes_of_device,
            aside,
            drafts,
            self.dry_runs,
            self.places_by_load,
            there,
        )

    @property
    def places_by_load(self) -> bool:
        """Whether experts are moved after their load while serving: with redundant experts, wherever the engine can.

        That of dsjax cannot where stages are in several processes, one on each host.
        """
        layout, engine = self.layout, self.options.engine
        apart = layout.mesh.pp_size > 1 and layout.devices > self.cluster.devices_per_host and engine.name == "dsjax"
        return engine.balances and not apart and layout.redundant > 0 and layout.expert_mesh.ep_size > 1

    @cached_property
    def dry_runs(self) -> tuple[DryRun, ...]:
        """Those that were compiled for this layout."""
        options = self.options
        if self.layout.experts or self.layout.mesh.pp_size > 1:
            return ()
        return runs_of(options.compiled, self.layout, self.config, self.cluster, options.precision)

    @cached_property
    def replicas(self) -> int:
        """DP ranks, each counted once for each stage: as many batches of it are under way."""
        return self.layout.mesh.dp_size * self.layout.mesh.pp_size

    @cached_property
    def max_batch(self) -> int:
        """Requests of a DP rank that the cache holds."""
        return self.memory.max_batch(self.workload.held)

    def batches(self) -> list[int]:
        """Batches of a DP rank to try, up to what memory holds."""
        most = min(self.max_batch, _LADDER[-1])
        return sorted({b for b in _LADDER if b <= most} | ({most} if most else set()))

    def step_models(self) -> list[StepModel]:
        """With and without two-batch overlap, as the options allow; the faster one counts."""
        if "models" not in self.steps:
            options = self.options
            arguments = (self.config, self.cluster, self.layout.unit, options.precision, options.skew)
            usable = [run for run in self.dry_runs if wire_refusal(run, options.dispatch, options.precision) is None]
            programs = tuple(run for run in usable if not run.halves)
            in_halves = any(run.halves for run in usable)
            shared = self.steps.setdefault("shared", {})
            choices = {"auto": (False, True), "on": (True,), "off": (False,)}[options.overlap]
            if (
                options.engine.name == "dsjax"
            ):  # it has to be asked for, as --enable-dbo; thresholds then choose the faster
                choices = (False, True) if options.overlap == "on" else (False,)
            if (
                self.layout.mesh.ep_size == 1 or (programs and not in_halves) or not options.engine.overlaps
            ):  # nothing to overlap; or the program that was compiled does not
                choices = (False,)
            make = partial(MeasuredStep, measured=options.measured) if options.measured else StepModel
            alike = {
                "dispatch": options.dispatch,
                "shared": shared,
                "operators": options.operators,
                "host": HOST_TIMES[options.host],
                "eager": options.engine.eager,
                "shared_beside": options.engine.shared_beside,
                "captured": options.engine.captured,
                "gathers": options.engine.gathers,
                "absorbs_below": 0 if self.cluster.hardware.is_blackwell else options.engine.absorbs_below,
                "fp8_mla": options.engine.fp8_mla,
                "fp8_rate": options.engine.fp8_rate if self.cluster.hardware.is_blackwell else None,
                "balancing": self.places_by_load,
                "middle": self.only_middle,
            }
            if self.layout.experts:
                published = options.engine.name != "dsjax"
                counts = (1, 2, 3) if published else (1, options.afd_stages)
                self.steps["models"] = apart_models(*arguments, counts, published=published, **alike)
                return self.steps["models"]
            self.steps["models"] = [
                make(*arguments, overlap=overlap, dry_runs=() if overlap else programs, **alike) for overlap in choices
            ]
        return self.steps["models"]

    def decode_step(self, batch: float) -> Figure:
        """Seconds of one decode step, with the overlap that makes it faster."""
        key = ("decode", batch)
        if key not in self.steps and self.stage is not None:
            drafts = self.options.drafts
            self.steps[key] = self.staged(self.stage.decode_step(batch), batch * (1 + drafts), True), None
        elif key not in self.steps:
            context, uneven = self.workload.context, self.workload.uneven
            times = [
                (
                    self._paced(m.decode(batch, context, drafts=self.options.drafts, uneven=uneven), True, m.overlap),
                    m,
                )
                for m in self.step_models()
            ]
            self.steps[key] = min(times, key=lambda one: one[0].value)
        return self.steps[key][0]

    @property
    def decode_curve(self) -> Curve:
        """Seconds of a decode step over the batch, straight between those that are tried."""
        if not self.only_middle:
            return self.middle.decode_curve
        if "decode curve" not in self.steps:
            tried = [float(batch) for batch in _LADDER if batch <= max(self.max_batch, 1)]
            self.steps["decode curve"] = Curve((batch, self.decode_step(batch).value) for batch in tried)
        return self.steps["decode curve"]

    def pace(self, decode: bool, halves: bool = False) -> Figure | None:
        """With dsjax's own engine and a dry run of such a step: how much longer the program's timeline is than the estimate. Else None.

        halves: of a step in two halves. Where only the other kind was compiled, it tells.
        """
        if self.options.engine.name != "dsjax":
            return None
        key = ("pace", decode, halves)
        if key not in self.steps:
            known = [run for run in self.dry_runs if not halves_refusal(run, self.options.overlap)]
            runs = [run for run in known if run.timeline and (run.step == "decode") == decode]
            runs.sort(key=lambda run: run.halves != halves)
            name = "timeline ÷ published operations"
            self.steps[key] = (
                (unless_settled(runs[0].timeline) / self.compiled_step(runs[0])).named(name) if runs else None
            )
        return self.steps[key]

    def _paced(self, step: Figure, decode: bool, halves: bool) -> Figure:
        pace = self.pace(decode, halves)
        return step if pace is None else (step * pace).named("step", "s")

    def compiled_step(self, run: DryRun) -> Figure:
        """Seconds of the step that was compiled: the same rows and context, whole or in halves as that is."""
        models = self.step_models()
        model = next((one for one in models if one.overlap == run.halves), models[0])
        if run.step == "decode":
            return model.decode(run.rows, run.context)
        return model.prefill(run.step_tokens, prompt=run.row_tokens, cached=run.context - run.row_tokens)

    def overlapped(self, batch: float) -> bool:
        """Whether `decode_step` overlaps two half batches."""
        return self.batches_in_turn(batch) > 1

    def batches_in_turn(self, batch: float) -> int:
        """Micro-batches that `decode_step` has: 1, 2, or where attention and experts are apart up to 3, and `--num-afd-stages` of dsjax."""
        if self.stage is not None:
            return self.stage.batches_in_turn(batch)
        self.decode_step(batch)
        model: StepModel = self.steps["decode", batch][1]
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
        self.prefill_step(tokens)
        return self.steps["prefill", tokens, 1.0][2] and self.config.is_moe

    def tpot(self, batch: float) -> Figure:
        """`static_gen`: seconds between a request's tokens when nothing but decoding happens."""
        return (self.decode_step(batch) / self.options.tokens_a_step).named("time of a token in decode", "s")

    def prefill_step(self, tokens: float, busy: float = 1.0) -> Figure:
        """`static_ctx`: seconds of one prefill step of `tokens` prompt tokens on each DP rank, or on this share of them."""
        return self._prefill(tokens, busy)[0]

    def launch_slack(self, tokens: float, busy: float = 1.0) -> float:
        """Seconds of such a prefill step in which the device waits for launches: decodes in the same program may fill them."""
        return self._prefill(tokens, busy)[1]

    def _prefill(self, tokens: float, busy: float) -> tuple[Figure, float, bool]:
        key = ("prefill", tokens, busy)
        if key not in self.steps and self.stage is not None:
            step, slack, halved = self.stage._prefill(tokens, busy)
            self.steps[key] = self.staged(step, tokens, False), slack, halved
        elif key not in self.steps:
            computed, work = self.workload.computed, self.workload
            prompt = computed * (1 + work.input.variation**2)
            steps = []
            for model in self.step_models():
                device, rows = model.prefill_device(
                    tokens, prompt=prompt, cached=work.cached, busy=busy, drafts=self.options.drafts
                )
                slack = max(0.0, model.launches(tokens).value - device.value)
                step = self._paced(model.launched(device, tokens, rows), False, model.overlap)
                steps.append((step, slack, model.overlap))
            self.steps[key] = min(steps, key=lambda one: one[0].value)
        return self.steps[key]

    def staged(self, step: Figure, tokens: float, decode: bool) -> Figure:
        """Seconds of a step through all stages, given those of the whole model on one stage's devices. tokens: of a DP rank."""
        drafts, own = self.options.drafts > 0, self.options.engine.name == "dsjax"
        return through_stages(step, self.config, self.cluster, self.layout.mesh, tokens, decode, drafts, own)

    @property
    def ahead(self) -> bool:
        """Whether a step is planned while the one before computes."""
        return HOST_TIMES[self.options.host].ahead

    def decode_attention(self, batch: float) -> Figure:
        """Seconds of the attention of a decode step's layers."""
        key = ("attention", batch)
        if key not in self.steps:
            context, verified = self.workload.context, 1 + self.options.drafts
            layer = self.step_models()[0].attention(batch * verified, batch * context, context, True)
            self.steps[key] = layer * self.config.num_hidden_layers
        return self.steps[key]

    def drafting(self, batch: float) -> float:
        """Seconds of a decode step in which it makes its drafts; the middle value."""
        drafts, key = self.options.drafts, ("drafting", batch)
        if drafts and key not in self.steps:
            model, work = self.middle.step_models()[0], self.workload
            parts = model.drafting(batch, work.context, drafts=drafts, uneven=work.uneven)
            self.steps[key] = sum(part.value for part in parts.values())
        return self.steps[key] if drafts else 0.0

    def prefill_sizes(self, chunks: bool = False) -> list[float]:
        """Prompt tokens of a DP rank in a step to try: one prompt, and more of them while they fit the step's limit; chunks too."""
        most = self.options.prefill_tokens
        # Temporaries are known up to the step that was compiled, and grow with it.
        most = min(most, max((run.step_tokens for run in self.dry_runs if run.step == "prefill"), default=most))
        one = min(self.workload.computed, most)
        sizes = {one} | {float(n) for n in (1024, 2048, 4096, 8192, 16384, 32768) if one < n <= most}
        if chunks:
            sizes |= {float(n) for n in (1024, 2048, 4096, 8192) if n < one}
        return sorted(sizes | {float(max(one, min(most, one * (most // one))))})

    def prompt_seconds(self, tokens: float) -> Figure:
        """Seconds of the whole instance that one prompt of one DP rank costs, in steps of `tokens` a rank."""
        return self.prefill_step(tokens) * (self.workload.computed / tokens)
