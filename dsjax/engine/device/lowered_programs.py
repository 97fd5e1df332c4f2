"""``LoweredPrograms``: traces an engine's programs: the step for each launch shape, and smaller programs.

Parameters and state are traced as descriptions. A program that changes the state takes it as a donated argument and returns it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
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
from dsjax.engine.device.buckets import Rectangle, sampling_room
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.expert_programs import ExpertLayers
from dsjax.engine.device.sampler import SamplingOps, bias_width, mask_words
from dsjax.engine.device.slots import ADMIT_WIDTH, LaunchShape, Positions, StepRows
from dsjax.engine.program_cache.compiled_programs import ProgramKey
from dsjax.model.cache_groups import Table
from dsjax.model.rows import GroupShape, RowGroup
from dsjax.model.step import ModelStep
from sharding.cut import CutLowered, Worker, lower_cut

COPIES = 32
"""Number of page pairs that one run of the copy program takes."""


class LoweredPrograms:
    """Traces the programs of a model, or of one stage, without compiling; the devices need not be here.

    The docstring of each ``lower_…`` has the program's arguments and results. In a stage after the first, programs with layers
    (``_lower_step``) also take the hidden states of the previous stage as their last argument.

    Args:
        params, state: arrays or their descriptions.
        experts_per_exchange: experts that a rank sends and receives in one run of ``stage_experts``; 0: experts do not move.
        experts: the backend that computes the routed experts, if they have devices of their own.

    Attributes:
        rows, everywhere: shardings of the host's inputs: one entry for each DP rank; replicated.
        shared: whether other processes have a part of the mesh. Then all results but a step's outcome must be gathered to be read.
    """

    def __init__(
        self,
        step: ModelStep,
        params: Mapping[str, Array],
        state: DeviceState,
        limits: ExecutorLimits,
        experts_per_exchange: int = 0,
        experts: Worker | None = None,
    ):
        self.experts = experts
        self._step = step
        self._params = device_state.description(dict(params))
        self._limits, self._experts_per_exchange = limits, experts_per_exchange
        self._state = device_state.description(state)
        self.rows = NamedSharding(step.mesh, P(step.spec.batch_axes))
        self.everywhere = NamedSharding(step.mesh, P())
        self.shared = not self.rows.is_fully_addressable

    def shape(self, decode: Rectangle | None, prefill: Rectangle | None) -> LaunchShape:
        """Return the shape of a launch."""
        forms, limits = (self._step.decode_form, self._step.prefill_form), self._limits
        groups = [
            rectangle and GroupShape(*rectangle, limits.max_pages, form, limits.window_columns)
            for rectangle, form in zip((decode, prefill), forms, strict=True)
        ]
        room = sampling_room(decode, prefill, limits.max_rows_decode, self._state.max_drafts)
        return LaunchShape(*groups, limits.page_size, room)

    def described_moved(self, table: Table = "context") -> dict[str, jax.ShapeDtypeStruct]:
        """Describe the results of ``take_pages`` for a kind of pages; empty for window pages in a model without them."""
        return device_state.describe_moved(self._step, self._state, table)

    def lower(self, key: ProgramKey) -> Lowered:
        """Trace the program of a key: its kind and the arguments of its ``lower_…``."""
        kind, *arguments = key
        return getattr(self, "lower_" + kind.replace(" ", "_"))(*arguments)

    @property
    def counts_loads(self) -> bool:
        """Whether the state counts the experts' loads. Then all steps return reports."""
        return self._state.loads is not None

    def _reporting_step(self, reports: bool) -> ModelStep:
        dispatch = dataclasses.replace(self._step.dispatch, report=reports or self.counts_loads)
        return dataclasses.replace(self._step, dispatch=dispatch)

    def lower_step(self, shape: LaunchShape, scored: bool = False, reports: bool = False) -> Lowered:
        """``(params, state, packed) -> (state, positions, outcome, logits, hidden, reports)``, with ``scored`` also ``Scores``.

        Computes the rows of a launch with their most probable tokens. positions: those that make a token, packed; outcome: their tokens,
        see ``commit``; logits: at these positions; hidden: of all token slots, None in an engine without drafts. With ``scored``, the token
        after each position of the prefill row is scored. A stage before the last returns ``(state, positions, hidden, reports)``.

        reports: see ``ModelStep.hidden``; empty unless asked for or needed to count loads: on 32 devices, counting takes a tenth of the
        step of one user.
        """
        model = self._reporting_step(reports)

        def run(params, state, packed, *arrived):
            if not self._step.is_last_stage:
                state, rows, _, hidden, counts = step_programs.run_layers(model, params, state, packed, shape, *arrived)
                at = Positions.of(rows, shape).pack()
                pinned = self._pin(
                    (at, hidden), (self._describe_positions(shape.positions)[0], self._describe_hidden(shape.tokens))
                )
                return self._pin(state, self._state), *pinned, counts
            state, _, at, outcome, logits, hidden, counts, *scores = step_programs.compute(
                model, params, state, packed, shape, scored, *arrived
            )
            *pinned, hidden = self._pin((at.pack(), outcome, logits, hidden), self._describe_step(shape))
            hidden = hidden if self._state.max_drafts else None
            return self._pin(state, self._state), *pinned, hidden, counts, *scores

        return self._lower_step(run, shape)

    def lower_enter(self, positions: int, firsts: tuple[int, ...], drafts: int) -> Lowered:
        """``(state, positions, outcome[, drafts]) -> state`` of a stage before the last: enter the last stage's results of a launch.

        outcome, drafts: as ``step`` and ``drafts`` return them. firsts: see ``commit_key``.
        """
        packed, outcome = (self._describe((n * positions,), np.int32) for n in (len(dataclasses.fields(Positions)), 1))
        proposed = [self._describe((len(firsts), drafts), np.int32)] if drafts else []

        def run(state, at, outcome, *proposed):
            at = Positions.unpack(at)
            state, _ = slots.commit(self._step, state, at, outcome)
            if proposed:
                row_slots, following = (array[:, np.array(firsts)] for array in (at.slot, at.next_token))
                state = slots.write_drafts(self._step, state, row_slots, following, *proposed)
            return self._pin(state, self._state)

        return jax.jit(run, donate_argnums=0).lower(self._state, packed, outcome, *proposed)

    def lower_drafting_step(self, shape: LaunchShape, count: int, reports: bool = False) -> Lowered:
        """``(params, state, packed) -> (state, outcome, drafts [B, R, count], reports)``: ``step`` and ``drafts`` in one program.

        For decode rows that take their most probable tokens; it saves a launch.
        """
        model = self._reporting_step(reports)

        def run(params, state, packed, *arrived):
            state, rows, _, outcome, _, hidden, counts = step_programs.compute(
                model, params, state, packed, shape, False, *arrived
            )
            state, proposed = step_programs.propose(model, params, state, packed, rows, outcome, hidden, shape, count)
            outcome = self._pin(outcome, self._describe_positions(shape.positions)[1])
            return self._pin(state, self._state), outcome, proposed, counts

        return self._lower_step(run, shape)

    def lower_drafts(self, shape: LaunchShape, count: int) -> Lowered:
        """``(params, state, packed, positions, outcome, hidden) -> (state, drafts [B, R + R2, count])``, by the MTP module.

        packed: the input of ``step``; the others are results of ``step``.
        """
        model = self._reporting_step(False)

        def run(params, state, packed, at, outcome, hidden):
            rows = StepRows.of(packed, Positions.unpack(at), shape)
            state, proposed = step_programs.propose(model, params, state, packed, rows, outcome, hidden, shape, count)
            return self._pin(state, self._state), proposed

        at, outcome, _, hidden = self._describe_step(shape)
        return self._lower_step(run, shape, at, outcome, hidden)

    def _lower_step(self, run: Callable, shape: LaunchShape | GroupShape, *arguments: Any) -> Lowered | CutLowered:
        """Trace a program with layers, of parameters, state, packed rows, and ``arguments`` or the previous stage's hidden states.

        With experts on devices of their own, it is cut into several programs.
        """
        packed = self._describe((shape.packed_width,), np.int32)
        if not arguments and not self._step.is_first_stage:
            arguments = (self._describe_hidden(shape.tokens),)
        arguments = self._params, self._state, packed, *arguments
        if self.experts is not None:
            return lower_cut(run, *arguments, donate_argnum=1, worker=self.experts)
        return jax.jit(run, donate_argnums=1).lower(*arguments)

    def lower_allocate(self) -> Lowered:
        """``() -> state``, all zeros."""
        make = lambda: jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), self._state)  # noqa: E731
        return jax.jit(make, out_shardings=jax.tree.map(lambda array: array.sharding, self._state)).lower()

    def lower_admit(self) -> Lowered:
        """``(state, packed) -> state`` with slots assigned and page tables changed; see ``slots.admit``."""
        return self._lower_small(slots.admit, self._describe((ADMIT_WIDTH,), np.int32))

    def _lower_small(self, function: Callable, *arguments: Any) -> Lowered:
        """Trace a program that returns the state as ``function(step, state, *arguments)`` changes it."""
        run = lambda state, *arguments: self._pin(function(self._step, state, *arguments), self._state)  # noqa: E731
        return jax.jit(run, donate_argnums=0).lower(self._state, *arguments)

    def lower_stage_experts(self, stack: str) -> Lowered:
        """The program of ``expert_programs.lower_stage``."""
        return expert_programs.lower_stage(
            self._step, self._params, self._experts_of(stack), self._experts_per_exchange
        )

    def lower_place_experts(self, stack: str) -> Lowered:
        """The program of ``expert_programs.lower_place``."""
        copies, loads = self._state.copies, self._state.loads
        return expert_programs.lower_place(self._step, self._params, self._experts_of(stack), copies, loads)

    def _experts_of(self, stack: str) -> ExpertLayers:
        return next(layers for layers in expert_programs.expert_layers(self._step) if layers.stack == stack)

    def lower_copy(self) -> Lowered:
        """``(state, pairs [B, COPIES, 2]) -> state`` with pages copied."""
        return self._lower_small(device_state.copy_pages, self._describe((COPIES, 2), np.int32))

    def lower_clear(self) -> Lowered:
        """``(state, marked pages) -> state`` with those pages zeroed."""
        pages = self._limits.pages_per_rank + self._limits.windows_per_rank
        return self._lower_small(device_state.clear_pages, self._describe((pages,), bool))

    def lower_read_loads(self) -> Lowered:
        """``loads -> (loads, zeros)``: the experts' loads since the last read. ``loads`` is donated."""
        run = lambda loads: self._pin((loads, jnp.zeros_like(loads)), (self._state.loads,) * 2)  # noqa: E731
        return jax.jit(run, donate_argnums=0).lower(self._state.loads)

    def lower_take_pages(self, table: Table) -> Lowered:
        """``(state, pages [B, moved(table)]) -> copies``, see ``device_state.describe_moved``; the state is not donated."""
        pages = self._describe((device_state.moved(table),), np.int32)

        def run(state, pages):
            return self._pin(device_state.take_pages(self._step, state, pages, table), self.described_moved(table))

        return jax.jit(run).lower(self._state, pages)

    def lower_put_pages(self, table: Table) -> Lowered:
        """``(state, copies, pages) -> state`` with the copies written to these pages."""
        pages = self._describe((device_state.moved(table),), np.int32)
        return self._lower_small(partial(device_state.put_pages, table=table), self.described_moved(table), pages)

    def lower_biases(self, positions: int) -> Lowered:
        """``(state, positions, logits, biases) -> logits``; the state is not donated. ``positions``: their number in ``LaunchShape``."""
        at, _, logits = self._describe_positions(positions)
        biases = self._describe((bias_width(positions), 4), np.int32)

        def run(state, at, logits, biases):
            at = Positions.unpack(at)
            changed = sampling_programs.add_biases(self._step, state, at, logits, biases)
            return self._pin(changed, self._describe_logits(positions))

        return jax.jit(run).lower(self._state, at, logits, biases)

    def lower_draw(self, positions: int) -> Lowered:
        """``(state, positions, raw logits, biased logits, masks, Wanted) -> (state, outcome)``."""
        at, _, logits = self._describe_positions(positions)
        masks = self._describe((positions, mask_words(self._limits.vocab_size)), np.int32)
        ops = SamplingOps(*[jax.ShapeDtypeStruct((), bool, sharding=self.everywhere)] * len(SamplingOps._fields))

        def run(state, at, raw, biased, masks, ops):
            at = Positions.unpack(at)
            state, outcome = sampling_programs.draw(self._step, state, at, raw, biased, masks, ops)
            return self._pin(state, self._state), self._pin(outcome, self._describe_positions(positions)[1])

        return jax.jit(run, donate_argnums=0).lower(self._state, at, logits, logits, masks, ops)

    def lower_score(self, positions: int) -> Lowered:
        """``(logits, outcome) -> Scores`` of the outcome's tokens, readable by this process."""
        _, outcome, logits = self._describe_positions(positions)

        def run(logits, outcome):
            scores = sampling_programs.score_tokens(self._step, logits, outcome)
            return jax.lax.with_sharding_constraint(scores, self.everywhere if self.shared else self.rows)

        return jax.jit(run).lower(logits, outcome)

    def lower_every_token(self) -> Lowered:
        """``(params, state, packed) -> (state, logits [C, V])`` of rank 0's row; every rank computes a row of the widest chunk.

        packed: see ``RowGroup.pack``, with its own page table. A stage before the last returns hidden states instead of logits.
        """
        shape = self.shape(None, Rectangle(1, self._limits.max_chunk)).prefill

        def run(params, state, packed, *arrived):
            groups = [RowGroup.unpack(packed, shape)]
            hidden, cache, _ = self._step.hidden(params, state.cache, groups, state.copies, *arrived)
            state = dataclasses.replace(state, cache=cache, filled=step_programs.mark_stale(self._step, state, groups))
            if not self._step.is_last_stage:
                return self._pin(state, self._state), self._pin(hidden, self._describe_hidden(shape.tokens))
            logits = self._step.logits(params, hidden)[0]  # of rank 0
            if self.shared:
                logits = jax.lax.with_sharding_constraint(logits, self.everywhere)
            return self._pin(state, self._state), logits

        return self._lower_step(run, shape)

    def lower_gather(self, described: Any) -> Lowered:
        """``tree -> tree``, replicated."""
        return jax.jit(lambda tree: tree, out_shardings=self.everywhere).lower(described)

    def _describe_positions(self, positions: int):
        """Describe what a step passes to the sampling programs: packed positions, outcome, logits."""
        at = self._describe((len(dataclasses.fields(Positions)) * positions,), np.int32)
        outcome = self._describe((positions,), np.int32)
        if self.shared:
            outcome = jax.ShapeDtypeStruct(outcome.shape, outcome.dtype, sharding=self.everywhere)
        return at, outcome, self._describe_logits(positions)

    def _describe_step(self, shape: LaunchShape):
        """Describe what a step passes to the drafts' program: ``_describe_positions`` and the hidden states."""
        return *self._describe_positions(shape.positions), self._describe_hidden(shape.tokens)

    def _describe_hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        """Describe the hidden states of ``tokens`` token slots on each DP rank."""
        return self._describe((tokens, *self._step.config.streams, self._step.config.hidden_size), self._step.dtype)

    def _describe_logits(self, positions: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self._step.mesh, self._step.logits_spec(positions))
        shape = (self._limits.num_ranks, positions, self._limits.vocab_size)
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    def _pin(self, tree, described):
        """Shard a program's results as the next program expects them."""
        return jax.lax.with_sharding_constraint(tree, jax.tree.map(lambda array: array.sharding, described))

    def _describe(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._limits.num_ranks, *shape), dtype, sharding=self.rows)


def commit_key(shape: LaunchShape, drafts: int) -> tuple[str, int, tuple[int, ...], int]:
    """Return the key of the program that enters a launch's tokens. It depends on the rows only if drafts are entered."""
    return "enter", shape.positions, tuple(shape.first_positions.tolist()) if drafts else (), drafts


def gather_key(tree: Any) -> tuple[ProgramKey, Any]:
    """Return the key of the program that gathers a tree like this one, and descriptions of the tree's arrays."""
    described = device_state.description(tree)
    leaves, structure = jax.tree.flatten(described)
    # Without the devices, which differ in a new mesh.
    layouts = (one.sharding.spec if isinstance(one.sharding, NamedSharding) else str(one.sharding) for one in leaves)
    arrays = ((one.shape, str(one.dtype), layout) for one, layout in zip(leaves, layouts, strict=True))
    return ("gather", structure, *arrays), described
