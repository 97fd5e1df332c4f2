"""The programs of an engine, traced from descriptions: the step in every shape of its buckets, and the small ones beside it.

Parameters and state may be arrays or ``jax.ShapeDtypeStruct`` with shardings: what is traced is the same. A program that changes
the state takes it donated, and gives it back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered
from jaxtyping import Array

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import device_state, expert_programs, sampling_programs, slots, step_programs
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.expert_programs import ExpertLayers
from dsjax.engine.device.logit_edits import bias_width, mask_words
from dsjax.engine.device.sampler import Wanted
from dsjax.engine.device.slots import ADMIT_WIDTH, LaunchShape, StepRows
from dsjax.model.rows import GroupShape, RowGroup
from dsjax.model.step import ModelStep

COPIES = 32
"""Pairs of pages that one run of the copying program takes."""

Launch = tuple[Rectangle | None, Rectangle | None, tuple[int, ...], bool]
"""Decode and prefill rectangle, how many drafts may be proposed behind, and whether its prompts are scored."""


class TracedPrograms:
    """What each program takes, gives and computes; ``Programs`` says so of each, and compiles them.

    experts_per_exchange: experts that a rank sends and receives in one run of ``stage_experts``; 0: experts stay where they are.

    Attributes:
        rows, everywhere: shardings of what the host sends: one entry for each DP rank; the same on all devices.
        shared: whether other processes have a part of the mesh: then the outcome of a step is the same on all devices, and what else is
            to be read must be gathered.
    """

    def __init__(
        self,
        step: ModelStep,
        params: Mapping[str, Array],
        state: DeviceState,
        limits: ExecutorLimits,
        experts_per_exchange: int = 0,
    ):
        # The dispatch always counts: that takes no collective, and recording the counts must not compile anything.
        self._step = dataclasses.replace(step, dispatch=dataclasses.replace(step.dispatch, report=True))
        self._params = {
            path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for path, array in params.items()
        }
        self._limits, self._exchanged = limits, experts_per_exchange
        self._state = device_state.description(state)
        self.rows = NamedSharding(step.mesh, P(step.spec.batch_axes))
        self.everywhere = NamedSharding(step.mesh, P())
        self.shared = not self.rows.is_fully_addressable

    def shape(self, decode: Rectangle | None, prefill: Rectangle | None) -> LaunchShape:
        """The shape of a launch."""
        forms = (self._step.decode_form, self._step.prefill_form)
        groups = [
            GroupShape(rectangle.rows, rectangle.chunk, self._limits.max_pages, form) if rectangle else None
            for rectangle, form in zip((decode, prefill), forms, strict=True)
        ]
        return LaunchShape(*groups, self._limits.page_size)

    def lower_step(self, shape: LaunchShape, scored: bool = False) -> Lowered:
        """The program of ``step``, traced but not compiled."""

        def run(params, state, packed):
            state, rows, outcome, logits, hidden, reports, *scores = step_programs.compute(
                self._step, params, state, packed, shape, scored
            )
            pinned = self._pin((rows.pack(), outcome, logits, hidden), self._of_step(shape))
            return self._pin(state, self._state), *pinned, reports, *scores

        packed = self._described((shape.packed_width,), np.int32)
        return jax.jit(run, donate_argnums=1).lower(self._params, self._state, packed)

    def lower_drafting_step(self, shape: LaunchShape, count: int) -> Lowered:
        """The program of ``drafting_step``, traced but not compiled."""

        def run(params, state, packed):
            state, rows, outcome, _, hidden, reports = step_programs.compute(self._step, params, state, packed, shape)
            state, proposed = step_programs.propose(
                self._step, params, state, packed, rows, outcome, hidden, shape, count
            )
            outcome = self._pin(outcome, self._of_rows(shape.sampled)[1])
            return self._pin(state, self._state), outcome, proposed, reports

        packed = self._described((shape.packed_width,), np.int32)
        return jax.jit(run, donate_argnums=1).lower(self._params, self._state, packed)

    def lower_drafts(self, shape: LaunchShape, count: int) -> Lowered:
        """The program of ``drafts``, traced but not compiled."""

        def run(params, state, packed, rows, outcome, hidden):
            rows = StepRows.unpack(rows, shape.sampled)
            state, proposed = step_programs.propose(
                self._step, params, state, packed, rows, outcome, hidden, shape, count
            )
            return self._pin(state, self._state), proposed

        packed = self._described((shape.packed_width,), np.int32)
        rows, outcome, _, hidden = self._of_step(shape)
        return jax.jit(run, donate_argnums=1).lower(self._params, self._state, packed, rows, outcome, hidden)

    def described_moved(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Descriptions of what ``take_pages`` gives."""
        return device_state.describe_moved(self._step, self._state)

    def all_of(self, buckets: Buckets) -> dict[Hashable, tuple[str, Callable[[], Lowered]]]:
        """Keys, names and makers of all programs that ``buckets`` can ask for, but for those that gather."""
        work: dict[Hashable, tuple[str, Callable[[], Lowered]]] = {}
        for decode, prefill, proposes, scored in launches(buckets):
            shape, name = self.shape(decode, prefill), _describe(decode, prefill)
            lower = lambda shape=shape, scored=scored: self.lower_step(shape, scored)  # noqa: E731
            work["step", shape, scored] = (f"prompt scores, {name}" if scored else name, lower)
            sampled = shape.sampled
            work["draw", sampled] = (f"sampler, {name}", lambda sampled=sampled: self._lower_draw(sampled))
            work["biases", sampled] = (f"biases, {name}", lambda sampled=sampled: self._lower_biases(sampled))
            for count in proposes:
                lower = lambda shape=shape, count=count: self.lower_drafts(shape, count)  # noqa: E731
                work["drafts", shape, count] = (f"{count} drafts, {name}", lower)
                if prefill is None:
                    lower = lambda shape=shape, count=count: self.lower_drafting_step(shape, count)  # noqa: E731
                    work["drafting step", shape, count] = (f"{name}, then {count} drafts", lower)
        work["allocate",] = ("allocation", self._lower_allocate)
        work["admit",] = ("admission", self._lower_admit)
        if self._limits.moves_pages:
            work["take pages",] = ("pages out of the cache", self._lower_take_pages)
            work["put pages",] = ("pages into the cache", self._lower_put_pages)
        work["clear",] = ("clearing pages", self._lower_clear)
        work["copy",] = ("copying pages", self._lower_copy)
        if self._exchanged:
            work["read loads",] = ("reading experts' loads", self._lower_read_loads)
            for layers in expert_programs.expert_layers(self._step):
                lower = lambda layers=layers: self._lower_stage(layers)  # noqa: E731
                work["stage experts", layers.stack] = (f"sending experts, {layers.stack}", lower)
                lower = lambda layers=layers: self._lower_place(layers)  # noqa: E731
                work["place experts", layers.stack] = (f"placing experts, {layers.stack}", lower)
        return work

    def _lower_allocate(self) -> Lowered:
        make = lambda: jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), self._state)  # noqa: E731
        return jax.jit(make, out_shardings=jax.tree.map(lambda array: array.sharding, self._state)).lower()

    def _lower_admit(self) -> Lowered:
        packed = self._described((ADMIT_WIDTH,), np.int32)
        return self._lower_small(slots.admit, packed)

    def _lower_small(self, function: Callable, argument: jax.ShapeDtypeStruct) -> Lowered:
        run = lambda state, argument: self._pin(function(self._step, state, argument), self._state)  # noqa: E731
        return jax.jit(run, donate_argnums=0).lower(self._state, argument)

    def _lower_stage(self, layers: ExpertLayers) -> Lowered:
        return expert_programs.lower_stage(self._step, self._params, layers, self._exchanged)

    def _lower_place(self, layers: ExpertLayers) -> Lowered:
        copies, loads = self._state.copies, self._state.loads
        return expert_programs.lower_place(self._step, self._params, layers, copies, loads)

    def _lower_copy(self) -> Lowered:
        return self._lower_small(device_state.copy_pages, self._described((COPIES, 2), np.int32))

    def _lower_clear(self) -> Lowered:
        return self._lower_small(device_state.clear_pages, self._described((self._limits.pages_per_rank,), bool))

    def _lower_read_loads(self) -> Lowered:
        run = lambda loads: self._pin((loads, jnp.zeros_like(loads)), (self._state.loads,) * 2)  # noqa: E731
        return jax.jit(run, donate_argnums=0).lower(self._state.loads)

    def _lower_take_pages(self) -> Lowered:
        pages = self._described((device_state.MOVED_PAGES,), np.int32)
        take = lambda state, pages: device_state.take_pages(self._step, state, pages)  # noqa: E731
        return jax.jit(lambda state, pages: self._pin(take(state, pages), self.described_moved())).lower(
            self._state, pages
        )

    def _lower_put_pages(self) -> Lowered:
        pages = self._described((device_state.MOVED_PAGES,), np.int32)
        put = lambda state, moved, pages: device_state.put_pages(self._step, state, moved, pages)  # noqa: E731
        run = lambda state, moved, pages: self._pin(put(state, moved, pages), self._state)  # noqa: E731
        return jax.jit(run, donate_argnums=0).lower(self._state, self.described_moved(), pages)

    def _lower_biases(self, sampled: tuple[int, int, int]) -> Lowered:
        rows, _, logits = self._of_rows(sampled)
        biases = self._described((bias_width(sampled[0] + sampled[2]), 4), np.int32)

        def run(state, rows, logits, biases):
            rows = StepRows.unpack(rows, sampled)
            changed = sampling_programs.add_biases(self._step, state, rows, logits, biases)
            return self._pin(changed, self._logits(sampled))

        return jax.jit(run).lower(self._state, rows, logits, biases)

    def _lower_draw(self, sampled: tuple[int, int, int]) -> Lowered:
        rows, _, logits = self._of_rows(sampled)
        masks = self._described((positions(sampled), mask_words(self._limits.vocab_size)), np.int32)
        wanted = Wanted(*[jax.ShapeDtypeStruct((), bool, sharding=self.everywhere)] * len(Wanted._fields))

        def run(state, rows, raw, biased, masks, wanted):
            rows = StepRows.unpack(rows, sampled)
            state, *found = sampling_programs.draw(self._step, state, rows, raw, biased, masks, wanted)
            outcome, scores = found
            return self._pin(state, self._state), self._pin(outcome, self._of_rows(sampled)[1]), scores

        return jax.jit(run, donate_argnums=0).lower(self._state, rows, logits, logits, masks, wanted)

    def _lower_every_token(self) -> Lowered:
        shape = self.shape(None, Rectangle(1, self._limits.max_chunk)).prefill

        def run(params, state, packed):
            groups = [RowGroup.unpack(packed, shape)]
            hidden, cache, _ = self._step.hidden(params, state.cache, groups, state.copies)
            state = dataclasses.replace(state, cache=cache, filled=step_programs.unfill(self._step, state, groups))
            logits = self._step.logits(params, hidden)[0]  # of rank 0
            if self.shared:
                logits = jax.lax.with_sharding_constraint(logits, self.everywhere)
            return self._pin(state, self._state), logits

        packed = self._described((shape.packed_width,), np.int32)
        return jax.jit(run, donate_argnums=1).lower(self._params, self._state, packed)

    def _lower_gather(self, described: Any) -> Lowered:
        return jax.jit(lambda tree: tree, out_shardings=self.everywhere).lower(described)

    def _of_rows(self, sampled: tuple[int, int, int]):
        """Descriptions of what a step hands on to the sampling programs: packed rows, outcome, logits."""
        rows = self._described((StepRows.packed_width(sampled),), np.int32)
        outcome = self._described((positions(sampled) + 2 * sampled[0],), np.int32)
        if self.shared:
            outcome = jax.ShapeDtypeStruct(outcome.shape, outcome.dtype, sharding=self.everywhere)
        return rows, outcome, self._logits(sampled)

    def _of_step(self, shape: LaunchShape):
        """The same, and of the hidden states."""
        hidden = self._described((shape.tokens, self._step.config.hidden_size), self._step.dtype)
        return *self._of_rows(shape.sampled), hidden

    def _logits(self, sampled: tuple[int, int, int]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self._step.mesh, self._step.rules.spec(("ranks", None, "vocab")))
        shape = (self._limits.num_ranks, positions(sampled), self._limits.vocab_size)
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    def _pin(self, tree, described):
        """What a program gives, sharded as the next program expects it."""
        return jax.lax.with_sharding_constraint(tree, jax.tree.map(lambda array: array.sharding, described))

    def _described(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._limits.num_ranks, *shape), dtype, sharding=self.rows)


def launches(buckets: Buckets) -> list[Launch]:
    """All that an engine with these buckets can come to make."""
    return [*((*shapes, False) for shapes in buckets.shapes()), (None, buckets.scored, buckets.proposals, True)]


def positions(sampled: tuple[int, int, int]) -> int:
    """Number of positions of a DP rank that sample a token, given ``LaunchShape.sampled``."""
    R, C, R2 = sampled
    return R * C + R2


def _describe(decode: Rectangle | None, prefill: Rectangle | None) -> str:
    parts = []
    if decode:
        parts.append(f"decode {decode.rows} rows" + (f" × {decode.chunk}" if decode.chunk > 1 else ""))
    if prefill:
        parts.append(f"prefill {prefill.rows} × {prefill.chunk}")
    return " + ".join(parts)
