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
from dsjax.plan.figure import Figure, drawn, spread
from dsjax.plan.fit import planned_launch, set_aside
from dsjax.plan.host_time import HOST_TIMES
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.measured_step import MeasuredStep
from dsjax.plan.memory import Memory, memory
from dsjax.plan.stages import through_stages
from dsjax.plan.step import StepModel
from dsjax.plan.step_basis import tables_of
from dsjax.plan.workload import PlanOptions, Workload

_LADDER = sorted({*(2**i for i in range(12)), *(3 * 2**i for i in range(10))})
"""Batches of a DP rank that are tried."""


@dataclass(frozen=True)
class Instance:
    """A layout on a cluster, asked about a workload.

    steps: of its unit, shared by the layouts that are made of it; `steps["shared"]`: of all layouts on the cluster.
    """

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
        steps = shared.setdefault(("steps", self.layout.unit), {"shared": shared}) if concurrency is None else {}
        if cluster is self.cluster and "decode curve" in self.steps:
            most = float(max(self.max_batch, 1))
            steps.setdefault("usual curve", (self.steps["decode curve"], most, self.decode_step(most)))
        return dataclasses.replace(self, cluster=cluster, workload=work, steps=steps)

    @cached_property
    def stage(self) -> Instance | None:
        """The whole model on the devices of one stage, where there are several, whose batches take turns (`stages.py`); else None."""
        mesh = self.layout.mesh
        if mesh.pp_size == 1:
            return None
        steps = self.steps.setdefault("stage", {"shared": self.steps.setdefault("shared", {})})
        layout = dataclasses.replace(self.layout, mesh=mesh.stage)
        return dataclasses.replace(self, layout=layout, steps=steps)

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

    @cached_property
    def cache_tokens(self) -> Figure:
        """Tokens of a DP rank's cache, with their interval."""
        [tokens] = spread(lambda: [self.on(self.cluster, {}).memory.cache_tokens])
        return Figure(
            tokens, max(0.0, tokens.low) if tokens > 0 else tokens.low, tokens.high, tokens.kinds, unit="tokens"
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

    def rows(self, batch: float) -> float:
        """Requests of the fullest DP rank, for which a step's other ranks wait; a lone rank's batch may be a mean of whole ones."""
        return max(1.0, batch) if self.layout.mesh.dp_size == 1 else float(math.ceil(batch - 1e-9))

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

    def decode_step(self, batch: float) -> float:
        """Seconds of one decode step, with the overlap that makes it faster."""
        batch = self.rows(batch)
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
            self.steps[key] = min(times, key=lambda one: one[0])
        return self.steps[key][0]

    def decode_parts(self, batch: float) -> dict[str, float]:
        """Seconds of the parts of `decode_step`, which add up to it."""
        step, work = self.decode_step(batch), self.workload
        if self.stage is not None:
            parts = self.stage.decode_parts(batch)
        else:
            model: StepModel = self.steps["decode", self.rows(batch)][1]
            parts = model.decode_parts(batch, work.context, drafts=self.options.drafts, uneven=work.uneven)
        return _with_rest(parts, step)

    def prefill_parts(self, tokens: float) -> dict[str, float]:
        """Seconds of the parts of `prefill_step`, which add up to it."""
        step, work = self.prefill_step(tokens), self.workload
        if self.stage is not None:
            return _with_rest(self.stage.prefill_parts(tokens), step)
        halved, prompt = self.steps["prefill", tokens, 1.0][2], work.computed * (1 + work.input.variation**2)
        model = next(one for one in self.step_models() if one.overlap == halved)
        parts, rows = model.prefill_parts(tokens, prompt=prompt, cached=work.cached, drafts=self.options.drafts)
        waits = {"waiting for launches": slack} if (slack := self.launch_slack(tokens)) else {}
        return _with_rest({**parts, **waits, **model.beside(tokens, rows, False)}, step)

    @property
    def decode_curve(self) -> Curve:
        """Seconds of a decode step over the batch, straight between those that are tried."""
        if "usual curve" in self.steps:  # of the same instance before a draw, which moves it up or down
            curve, most, usual = self.steps["usual curve"]
            return curve.times(self.decode_step(most) / usual)
        if "decode curve" not in self.steps:
            tried = [float(batch) for batch in _LADDER if batch <= max(self.max_batch, 1)]
            self.steps["decode curve"] = Curve((batch, self.decode_step(batch)) for batch in tried)
        return self.steps["decode curve"]

    def pace(self, decode: bool, halves: bool = False) -> float | None:
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
            self.steps[key] = drawn(runs[0].timeline) / self.compiled_step(runs[0]) if runs else None
        return self.steps[key]

    def _paced(self, step: float, decode: bool, halves: bool) -> float:
        pace = self.pace(decode, halves)
        return step if pace is None else step * pace

    def compiled_step(self, run: DryRun) -> float:
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
        model: StepModel = self.steps["decode", self.rows(batch)][1]
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

    def tpot(self, batch: float) -> float:
        """`static_gen`: seconds between a request's tokens when nothing but decoding happens."""
        return self.decode_step(batch) / self.options.tokens_a_step

    def prefill_step(self, tokens: float, busy: float = 1.0) -> float:
        """`static_ctx`: seconds of one prefill step of `tokens` prompt tokens on each DP rank, or on this share of them."""
        return self._prefill(tokens, busy)[0]

    def launch_slack(self, tokens: float, busy: float = 1.0) -> float:
        """Seconds of such a prefill step in which the device waits for launches: decodes in the same program may fill them."""
        return self._prefill(tokens, busy)[1]

    def _prefill(self, tokens: float, busy: float) -> tuple[float, float, bool]:
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
                slack = max(0.0, model.launches(tokens) - device)
                step = self._paced(model.launched(device, tokens, rows), False, model.overlap)
                steps.append((step, slack, model.overlap))
            self.steps[key] = min(steps, key=lambda one: one[0])
        return self.steps[key]

    def staged(self, step: float, tokens: float, decode: bool) -> float:
        """Seconds of a step through all stages, given those of the whole model on one stage's devices. tokens: of a DP rank."""
        drafts, own = self.options.drafts > 0, self.options.engine.name == "dsjax"
        return through_stages(step, self.config, self.cluster, self.layout.mesh, tokens, decode, drafts, own)

    @property
    def ahead(self) -> bool:
        """Whether a step is planned while the one before computes."""
        return HOST_TIMES[self.options.host].ahead

    def decode_attention(self, batch: float) -> float:
        """Seconds of the attention of a decode step's layers."""
        key = ("attention", batch)
        if key not in self.steps:
            context, verified = self.workload.context, 1 + self.options.drafts
            layer = self.step_models()[0].attention(batch * verified, batch * context, context, True)
            self.steps[key] = layer * self.config.num_hidden_layers
        return self.steps[key]

    def drafting(self, batch: float) -> float:
        """Seconds of a decode step in which it makes its drafts."""
        drafts, key = self.options.drafts, ("drafting", batch)
        if drafts and key not in self.steps:
            model, work = self.step_models()[0], self.workload
            parts = model.drafting(batch, work.context, drafts=drafts, uneven=work.uneven)
            self.steps[key] = sum(parts.values())
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

    def prompt_seconds(self, tokens: float) -> float:
        """Seconds of the whole instance that one prompt of one DP rank costs, in steps of `tokens` a rank."""
        return self.prefill_step(tokens) * (self.workload.computed / tokens)


def _with_rest(parts: dict[str, float], step: float) -> dict[str, float]:
    """The parts of a step, and what is beyond them: stages, or what a whole engine takes beside its operations."""
    rest = step - sum(parts.values())
    return parts if abs(rest) < 1e-9 * step else {**parts, "beyond single operations, and stages": rest}
