"""The programs of an engine: the step in every shape of its buckets, and the small ones beside it.

Each is traced from descriptions of parameters and state. A program that changes the state takes it donated, and gives it back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from dsjax.engine.contract.executor import ExecutorLimits, Progress
from dsjax.engine.device import device_state, expert_programs, sampling_programs, slots, step_programs
from dsjax.engine.device.buckets import Buckets, Rectangle, sampling_room
from dsjax.engine.device.compiler_options import compiler_options
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.expert_programs import ExpertLayers
from dsjax.engine.device.sampler import Wanted, bias_width, mask_words
from dsjax.engine.device.slots import ADMIT_WIDTH, LaunchShape, Positions, StepRows
from dsjax.engine.program_cache.compiled_programs import CompiledPrograms, ProgramKey
from dsjax.engine.program_cache.library import ProgramLibrary, Shelf
from dsjax.model.cache_groups import Table
from dsjax.model.rows import GroupShape, RowGroup
from dsjax.model.step import ModelStep
from sharding.arrays import RepeatedPut, put
from sharding.cut import CutLowered, Worker, lower_cut

COPIES = 32
"""Pairs of pages that one run of the copying program takes."""

_SELDOM_WANTED = {"step": 5, "drafting step": 3, "drafts": 1}
"""For each program, the place from which on its results are wanted seldom, and gathered by a program of their own."""


class Programs:
    """Traces and compiles each program of a model, or of a stage of it, once: when it is first asked for or by ``warm_up``.

    ``get`` gives a program; the ``lower_…`` methods trace without compiling, also for devices that are not here. Of a stage behind the
    first, programs with layers in them also take the hidden states of the stage before, last; ``_lower_step`` says which these are.

    Args:
        experts_per_exchange: experts that a rank sends and receives in one run of ``stage_experts``; 0: experts stay where they are.
        meet: waits for the other processes of the mesh after a compilation at first use: in a collective that has a time limit.
        library: where programs of earlier meshes in the same layout are found, and these are kept.
        experts: the backend that computes the routed experts, if they have devices of their own.

    Attributes:
        store: the programs that are compiled.
        rows, everywhere: shardings of what the host sends: one entry for each DP rank; whole on every device.
        put_rows: sends an array to the devices of each DP rank.
        shared: whether other processes have a part of the mesh: all but the outcome of a step must be gathered to be read then.
    """

    def __init__(
        self,
        step: ModelStep,
        params: Mapping[str, Array],
        state: DeviceState,
        limits: ExecutorLimits,
        experts_per_exchange: int = 0,
        meet: Callable[[], object] | None = None,
        library: ProgramLibrary | None = None,
        experts: Worker | None = None,
    ):
        self.experts = experts
        # The dispatch always counts: that takes no collective, and recording the counts must not compile anything.
        self._step = dataclasses.replace(step, dispatch=dataclasses.replace(step.dispatch, report=True))
        self._params = device_state.description(dict(params))
        self._limits, self._exchanged = limits, experts_per_exchange
        self._state = device_state.description(state)
        self.rows = NamedSharding(step.mesh, P(step.spec.batch_axes))
        self.everywhere = NamedSharding(step.mesh, P())
        self.put_rows = RepeatedPut(self.rows)
        self.shared = not self.rows.is_fully_addressable
        self.meet = meet or (lambda: None)
        parts = type(self), self._step, self._params, self._state, limits, experts_per_exchange
        shelf = Shelf(library, step.mesh, parts, self._compiler_options)
        self.store = CompiledPrograms(self._lower, self.meet, shelf)
        self._is_dropped = False
        self._no_masks: dict[int, Array] = {}
        self._shapes: dict[tuple[Rectangle | None, Rectangle | None], LaunchShape] = {}

    def _compiler_options(self, key: ProgramKey) -> dict[str, int | bool] | None:
        # Where a step is exact, sums of layers and head are the kernels', and log-probabilities have an order of their own
        # (`log_softmax`): XLA sums a draw's probabilities alone.
        platform = self._step.mesh.devices.flat[0].platform
        return compiler_options(platform, sums=not self._step.is_exact or key[0] == "draw")

    def of(self, step: ModelStep, experts: Worker) -> Programs:
        """Compile the same programs for the same model and state with another backend of the routed experts."""
        programs = Programs(step, self._params, self._state, self._limits, self._exchanged, self.meet, experts=experts)
        there = dict(self.store.compiled)  # another thread may have one more compiled
        labels = {key: str(key[0]) for key in there if key[0] != "gather"}
        # What gathers results knows nothing of experts.
        programs.store.compiled |= {key: program for key, program in there.items() if key not in labels}
        programs.store.compile_all(labels, lambda done, total, label: None, programs._compile_gathers)
        return programs

    @property
    def compiled(self) -> frozenset[Hashable]:
        """Keys of the programs that exist."""
        return frozenset(self.store.compiled)

    def allocate(self) -> DeviceState:
        """The state at the start: everything zero, experts placed as the step says."""
        state = jax.block_until_ready(self.get("allocate")())
        if self._state.copies is not None:
            state.copies = put(self._step.placement.tables, self.everywhere)
        return state

    def get(self, kind: str, *arguments: Hashable) -> Compiled:
        """The program of a kind, compiled where it is not yet: ``lower_…`` of that name says what it takes and gives."""
        key = kind, *arguments
        return self.store.compiled.get(key) or self.store.get(key, lambda: self._lower(key))

    def shape(self, decode: Rectangle | None, prefill: Rectangle | None) -> LaunchShape:
        """The shape of a launch."""
        if (decode, prefill) not in self._shapes:
            forms, limits = (self._step.decode_form, self._step.prefill_form), self._limits
            groups = [
                GroupShape(rectangle.rows, rectangle.chunk, limits.max_pages, form, limits.window_columns)
                if rectangle
                else None
                for rectangle, form in zip((decode, prefill), forms, strict=True)
            ]
            drafts = 0 if self._state.drafts is None else self._state.drafts.shape[-1]
            room = sampling_room(decode, prefill, self._limits.max_rows_decode, drafts)
            self._shapes[decode, prefill] = LaunchShape(*groups, self._limits.page_size, room)
        return self._shapes[decode, prefill]

    def gather(self, tree: Any) -> Any:
        """What a program gave, where this process can read it: where ``shared``, all processes run a program that brings it there."""
        if not self.shared:
            return tree
        key, described = _gathering(tree)
        return self.store.get(key, lambda: self._lower_gather(described))(tree)

    def no_masks(self, positions: int) -> Array:
        """Masks that allow everything, on the devices."""
        if positions not in self._no_masks:
            shape = (self._limits.num_ranks, positions, mask_words(self._limits.vocab_size))
            self._no_masks[positions] = put(np.full(shape, -1, np.int32), self.rows)
        return self._no_masks[positions]

    def described_moved(self, table: Table = "context") -> dict[str, jax.ShapeDtypeStruct]:
        """Descriptions of what ``take_pages`` gives of a kind of pages; empty of window pages in a model without them."""
        return device_state.describe_moved(self._step, self._state, table)

    def warm_up(self, labels: Mapping[ProgramKey, str], progress: Progress | None = None) -> None:
        """Compile programs: traced here one by one, compiled on all cores at once.

        What ``progress`` raises ends the warm-up: what waits is not compiled, and what is being compiled is waited for.
        """
        report = progress or (lambda done, total, label: None)
        report(0, len(labels), next(iter(labels.values())))
        for kind, *arguments in labels:
            if kind == "draw":
                self.no_masks(*arguments)
        self.store.compile_all(labels, report, self._compile_gathers)

    def compile_beside(self, keys: Iterable[ProgramKey], check_going_on: Callable[[], None]) -> None:
        """Compile programs one after the other, beside the thread that runs them: it waits for one at most before it compiles another.

        What ``check_going_on`` raises between two programs ends this, and so does ``drop``.
        """
        for key in keys:
            check_going_on()
            if self._is_dropped:
                return
            if key not in self.store.compiled:
                self.store.compile(key, partial(self._lower, key))

    def compile_ahead(self, buckets: Buckets, go_on: Callable[[int, str], bool]) -> bool:
        """Compile what ``warm_up`` would, one after the other in this thread, for the library alone; whether all of it is there.

        go_on: asked before each program and at the end, with how many are there and the next one's name; False ends it.
        """
        labels = self.labels(buckets)
        for done, (key, label) in enumerate(labels.items()):
            if not go_on(done, label):
                return False
            if not self.store.shelf.has(key):
                self.store.compile(key, partial(self._lower, key))
                self._compile_gathers(key)
            self.store.compiled.clear()  # a program that is loaded takes memory of the devices
        return go_on(len(labels), "all")

    def drop(self) -> None:
        """Drop all programs."""
        self._is_dropped = True
        self.store.compiled.clear()
        self._no_masks.clear()

    def _compile_gathers(self, producer: ProgramKey) -> None:
        """Compile what brings to all devices that which is wanted seldom of a program's results: reports, prompts' scores, drafts."""
        program, first = self.store.compiled[producer], _SELDOM_WANTED.get(producer[0])
        if not self.shared or first is None:
            return
        for place in range(first, len(program.out_info)):
            tree = jax.tree.map(
                lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
                program.out_info[place],
                program.output_shardings[place],
            )
            if jax.tree.leaves(tree):
                key, described = _gathering(tree)
                self.store.compile(key, lambda described=described: self._lower_gather(described))

    def labels(self, buckets: Buckets) -> dict[ProgramKey, str]:
        """Keys and names of all programs that ``buckets`` can ask for; those that gather come with what they gather."""
        labels: dict[ProgramKey, str] = {}
        ends = self._step.ends
        launches = [(*shapes, False) for shapes in buckets.shapes()]
        for decode, prefill, proposes, scored in [*launches, (None, buckets.scored, buckets.proposals, True)]:
            shape, name = self.shape(decode, prefill), shape_label(decode, prefill)
            if not ends:  # a scored launch is like any other there
                labels["step", shape, False] = f"prompt scores, {name}" if scored else name
                for count in (0, *proposes):
                    key = entering(shape, count)
                    labels[key] = f"tokens of {shape.positions} positions, {count} drafts"
                continue
            labels["step", shape, scored] = f"prompt scores, {name}" if scored else name
            for kind, what in (("draw", "sampler"), ("biases", "biases"), ("score", "log-probabilities")):
                labels.setdefault((kind, shape.positions), f"{what}, {name}")
            for count in proposes:
                labels["drafts", shape, count] = f"{count} drafts, {name}"
                if prefill is None:
                    labels["drafting step", shape, count] = f"{name}, then {count} drafts"
        labels |= {("allocate",): "allocation", ("admit",): "admission"}
        if self._limits.moves_pages:
            for table in ("context", "window") if self._limits.windows_per_rank else ("context",):
                labels["take pages", table] = f"{table} pages out of the cache"
                labels["put pages", table] = f"{table} pages into the cache"
        labels |= {("clear",): "clearing pages", ("copy",): "copying pages"}
        if self._exchanged:
            labels["read loads",] = "reading experts' loads"
            for layers in expert_programs.expert_layers(self._step):
                labels["stage experts", layers.stack] = f"sending experts, {layers.stack}"
                labels["place experts", layers.stack] = f"placing experts, {layers.stack}"
        stage = self._step.stage
        return labels if stage is None else {key: f"{stage}: {name}" for key, name in labels.items()}

    def wanted_first(self, buckets: Buckets) -> dict[ProgramKey, str]:
        """Those of ``labels`` without which no request can be served: of one request alone on its rank, and those of no shape.

        All of them where a program takes long to compile, or all processes of a mesh must have it.
        """
        labels = self.labels(buckets)
        if self._step.mesh.devices.flat[0].platform != "cpu" or self.shared or self.experts is not None:
            return labels
        shapes = [self.shape(*pair) for *pair, _ in buckets.shapes() if buckets.serves_one(*pair)]
        wanted = {*shapes, *(shape.positions for shape in shapes)}
        is_wanted = lambda key: all(one in wanted or isinstance(one, str) for one in key[1:2])  # noqa: E731
        return {key: name for key, name in labels.items() if is_wanted(key) and key[-1] is not True}

    def _lower(self, key: ProgramKey) -> Lowered:
        kind, *arguments = key
        return getattr(self, "lower_" + kind.replace(" ", "_"))(*arguments)

    # How each program is traced.

    def lower_step(self, shape: LaunchShape, scored: bool = False) -> Lowered:
        """``(params, state, packed) -> (state, positions, outcome, logits, hidden, reports)``, with ``scored`` also ``Scores``.

        The rows of a launch, each with its most probable tokens. positions: those that make a token, packed; outcome: their tokens,
        see ``commit``; logits: theirs; hidden: of all token slots. With ``scored`` the tokens behind each position of the prefill
        row are scored. A stage before the last gives ``(state, positions, hidden, reports)``.
        """

        def run(params, state, packed, *arrived):
            if not self._step.ends:
                state, rows, _, hidden, reports = step_programs.run_layers(
                    self._step, params, state, packed, shape, *arrived
                )
                at = Positions.of(rows, shape).pack()
                pinned = self._pin((at, hidden), (self._of_positions(shape.positions)[0], self._hidden(shape.tokens)))
                return self._pin(state, self._state), *pinned, reports
            state, _, at, outcome, logits, hidden, reports, *scores = step_programs.compute(
                self._step, params, state, packed, shape, scored, *arrived
            )
            pinned = self._pin((at.pack(), outcome, logits, hidden), self._of_step(shape))
            return self._pin(state, self._state), *pinned, reports, *scores

        return self._lower_step(run, shape)

    def lower_enter(self, positions: int, firsts: tuple[int, ...], drafts: int) -> Lowered:
        """``(state, positions, outcome[, drafts]) -> state`` of a stage before the last, with what the last one made of a launch's rows.

        outcome, drafts: as ``step`` and ``drafts`` give them, so many drafts. firsts: see ``entering``.
        """
        packed, outcome = (self._described((n * positions,), np.int32) for n in (len(dataclasses.fields(Positions)), 1))
        proposed = [self._described((len(firsts), drafts), np.int32)] if drafts else []

        def run(state, at, outcome, *proposed):
            at = Positions.unpack(at)
            state, _ = slots.commit(self._step, state, at, outcome)
            if proposed:
                own, following = (array[:, np.array(firsts)] for array in (at.slot, at.following))
                state = slots.enter_drafts(self._step, state, own, following, *proposed)
            return self._pin(state, self._state)

        return jax.jit(run, donate_argnums=0).lower(self._state, packed, outcome, *proposed)

    def lower_drafting_step(self, shape: LaunchShape, count: int) -> Lowered:
        """``(params, state, packed) -> (state, outcome, drafts [B, R, count], reports)``: ``step`` and ``drafts`` in one program.

        For decode rows whose tokens are the most probable ones: nothing stands between the two then, and a launch is saved.
        """

        def run(params, state, packed, *arrived):
            state, rows, _, outcome, _, hidden, reports = step_programs.compute(
                self._step, params, state, packed, shape, False, *arrived
            )
            state, proposed = step_programs.propose(
                self._step, params, state, packed, rows, outcome, hidden, shape, count
            )
            outcome = self._pin(outcome, self._of_positions(shape.positions)[1])
            return self._pin(state, self._state), outcome, proposed, reports

        return self._lower_step(run, shape)

    def lower_drafts(self, shape: LaunchShape, count: int) -> Lowered:
        """``(params, state, packed, positions, outcome, hidden) -> (state, drafts [B, R + R2, count])``: what the MTP module proposes.

        packed: the input of ``step``; all others are its results.
        """

        def run(params, state, packed, at, outcome, hidden):
            rows = StepRows.of(packed, Positions.unpack(at), shape)
            state, proposed = step_programs.propose(
                self._step, params, state, packed, rows, outcome, hidden, shape, count
            )
            return self._pin(state, self._state), proposed

        at, outcome, _, hidden = self._of_step(shape)
        return self._lower_step(run, shape, at, outcome, hidden)

    def _lower_step(self, run: Callable, shape: LaunchShape | GroupShape, *arguments: Any) -> Lowered | CutLowered:
        """A program with layers in it, of parameters, state, packed rows, and ``arguments`` or what has come from the stage before.

        Where experts are apart, it is as many programs as it takes.
        """
        packed = self._described((shape.packed_width,), np.int32)
        if not arguments and not self._step.begins:
            arguments = (self._hidden(shape.tokens),)
        arguments = self._params, self._state, packed, *arguments
        if self.experts is not None:
            return lower_cut(run, *arguments, donate_argnum=1, worker=self.experts)
        return jax.jit(run, donate_argnums=1).lower(*arguments)

    def lower_allocate(self) -> Lowered:
        """``() -> state``, everything zero."""
        make = lambda: jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), self._state)  # noqa: E731
        return jax.jit(make, out_shardings=jax.tree.map(lambda array: array.sharding, self._state)).lower()

    def lower_admit(self) -> Lowered:
        """``(state, packed) -> state``: slots given, page tables changed; see ``slots.admit``."""
        return self._lower_small(slots.admit, self._described((ADMIT_WIDTH,), np.int32))

    def _lower_small(self, function: Callable, *arguments: Any) -> Lowered:
        """A program that gives the state as ``function(step, state, *arguments)`` changes it."""
        run = lambda state, *arguments: self._pin(function(self._step, state, *arguments), self._state)  # noqa: E731
        return jax.jit(run, donate_argnums=0).lower(self._state, *arguments)

    def lower_stage_experts(self, stack: str) -> Lowered:
        """The program of ``expert_programs.lower_stage``."""
        return expert_programs.lower_stage(self._step, self._params, self._experts_of(stack), self._exchanged)

    def lower_place_experts(self, stack: str) -> Lowered:
        """The program of ``expert_programs.lower_place``."""
        copies, loads = self._state.copies, self._state.loads
        return expert_programs.lower_place(self._step, self._params, self._experts_of(stack), copies, loads)

    def _experts_of(self, stack: str) -> ExpertLayers:
        return next(layers for layers in expert_programs.expert_layers(self._step) if layers.stack == stack)

    def lower_copy(self) -> Lowered:
        """``(state, pairs [B, COPIES, 2]) -> state`` with pages copied."""
        return self._lower_small(device_state.copy_pages, self._described((COPIES, 2), np.int32))

    def lower_clear(self) -> Lowered:
        """``(state, marked pages) -> state`` with those pages zeroed."""
        pages = self._limits.pages_per_rank + self._limits.windows_per_rank
        return self._lower_small(device_state.clear_pages, self._described((pages,), bool))

    def lower_read_loads(self) -> Lowered:
        """``loads -> (loads, zeros)``: the experts' loads since they were read last; donated."""
        run = lambda loads: self._pin((loads, jnp.zeros_like(loads)), (self._state.loads,) * 2)  # noqa: E731
        return jax.jit(run, donate_argnums=0).lower(self._state.loads)

    def lower_take_pages(self, table: Table) -> Lowered:
        """``(state, pages [B, moved(table)]) -> copies of them``, see ``device_state.describe_moved``; reads the state alone."""
        pages = self._described((device_state.moved(table),), np.int32)

        def run(state, pages):
            return self._pin(device_state.take_pages(self._step, state, pages, table), self.described_moved(table))

        return jax.jit(run).lower(self._state, pages)

    def lower_put_pages(self, table: Table) -> Lowered:
        """``(state, copies, pages) -> state`` with the copies in these pages."""
        pages = self._described((device_state.moved(table),), np.int32)
        return self._lower_small(partial(device_state.put_pages, table=table), self.described_moved(table), pages)

    def lower_biases(self, positions: int) -> Lowered:
        """``(state, positions, logits, biases) -> logits``; reads the state alone. ``positions``: their number in ``LaunchShape``."""
        at, _, logits = self._of_positions(positions)
        biases = self._described((bias_width(positions), 4), np.int32)

        def run(state, at, logits, biases):
            at = Positions.unpack(at)
            changed = sampling_programs.add_biases(self._step, state, at, logits, biases)
            return self._pin(changed, self._logits(positions))

        return jax.jit(run).lower(self._state, at, logits, biases)

    def lower_draw(self, positions: int) -> Lowered:
        """``(state, positions, raw logits, biased logits, masks, Wanted) -> (state, outcome)``."""
        at, _, logits = self._of_positions(positions)
        masks = self._described((positions, mask_words(self._limits.vocab_size)), np.int32)
        wanted = Wanted(*[jax.ShapeDtypeStruct((), bool, sharding=self.everywhere)] * len(Wanted._fields))

        def run(state, at, raw, biased, masks, wanted):
            at = Positions.unpack(at)
            state, outcome = sampling_programs.draw(self._step, state, at, raw, biased, masks, wanted)
            return self._pin(state, self._state), self._pin(outcome, self._of_positions(positions)[1])

        return jax.jit(run, donate_argnums=0).lower(self._state, at, logits, logits, masks, wanted)

    def lower_score(self, positions: int) -> Lowered:
        """``(logits, outcome) -> Scores`` of the outcome's tokens, where this process can read them."""
        _, outcome, logits = self._of_positions(positions)

        def run(logits, outcome):
            scores = sampling_programs.score_tokens(self._step, logits, outcome)
            return jax.lax.with_sharding_constraint(scores, self.everywhere if self.shared else self.rows)

        return jax.jit(run).lower(logits, outcome)

    def lower_every_token(self) -> Lowered:
        """``(params, state, packed) -> (state, logits [C, V])`` of the row of rank 0; all ranks compute one of the widest chunk.

        packed: see ``RowGroup.pack``, with its own page table. A stage before the last gives hidden states in the logits' place.
        """
        shape = self.shape(None, Rectangle(1, self._limits.max_chunk)).prefill

        def run(params, state, packed, *arrived):
            groups = [RowGroup.unpack(packed, shape)]
            hidden, cache, _ = self._step.hidden(params, state.cache, groups, state.copies, *arrived)
            state = dataclasses.replace(state, cache=cache, filled=step_programs.unfill(self._step, state, groups))
            if not self._step.ends:
                return self._pin(state, self._state), self._pin(hidden, self._hidden(shape.tokens))
            logits = self._step.logits(params, hidden)[0]  # of rank 0
            if self.shared:
                logits = jax.lax.with_sharding_constraint(logits, self.everywhere)
            return self._pin(state, self._state), logits

        return self._lower_step(run, shape)

    def _lower_gather(self, described: Any) -> Lowered:
        return jax.jit(lambda tree: tree, out_shardings=self.everywhere).lower(described)

    def _of_positions(self, positions: int):
        """Descriptions of what a step hands on to the sampling programs: packed positions, outcome, logits."""
        at = self._described((len(dataclasses.fields(Positions)) * positions,), np.int32)
        outcome = self._described((positions,), np.int32)
        if self.shared:
            outcome = jax.ShapeDtypeStruct(outcome.shape, outcome.dtype, sharding=self.everywhere)
        return at, outcome, self._logits(positions)

    def _of_step(self, shape: LaunchShape):
        """Descriptions of what a step hands on to the drafts' program: what ``_of_positions`` has, and the hidden states."""
        return *self._of_positions(shape.positions), self._hidden(shape.tokens)

    def _hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        """A description of the hidden states of so many token slots a DP rank."""
        return self._described((tokens, *self._step.config.streams, self._step.config.hidden_size), self._step.dtype)

    def _logits(self, positions: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self._step.mesh, self._step.logits_spec(positions))
        shape = (self._limits.num_ranks, positions, self._limits.vocab_size)
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    def _pin(self, tree, described):
        """What a program gives, sharded as the next program expects it."""
        return jax.lax.with_sharding_constraint(tree, jax.tree.map(lambda array: array.sharding, described))

    def _described(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._limits.num_ranks, *shape), dtype, sharding=self.rows)


def entering(shape: LaunchShape, drafts: int) -> tuple[str, int, tuple[int, ...], int]:
    """The key of the program that enters a launch's tokens, which depends on its rows only where drafts are entered."""
    return "enter", shape.positions, tuple(shape.first_positions.tolist()) if drafts else (), drafts


def shape_label(decode: Rectangle | None, prefill: Rectangle | None) -> str:
    """Name the shape of a launch, such as `decode 8 rows + prefill 1 × 256`."""
    parts = []
    if decode:
        parts.append(f"decode {decode.rows} rows" + (f" × {decode.chunk}" if decode.chunk > 1 else ""))
    if prefill:
        parts.append(f"prefill {prefill.rows} × {prefill.chunk}")
    return " + ".join(parts)


def _gathering(tree: Any) -> tuple[ProgramKey, Any]:
    """The key of the program that gathers such a tree, and descriptions of the tree's arrays."""
    described = device_state.description(tree)
    leaves, structure = jax.tree.flatten(described)
    # Without the devices, which are others when the mesh is made anew.
    layouts = (one.sharding.spec if isinstance(one.sharding, NamedSharding) else str(one.sharding) for one in leaves)
    arrays = ((one.shape, str(one.dtype), layout) for one, layout in zip(leaves, layouts, strict=True))
    return ("gather", structure, *arrays), described
