"""The compiled programs of an engine: the step in every shape of its buckets, and the small ones beside it.

Parameters and state may be arrays or ``jax.ShapeDtypeStruct`` with shardings: what is compiled is the same. A program that changes
the state takes it donated, and gives it back.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from dsjax.engine import device_state, expert_programs, sampling_programs, slots, step_programs
from dsjax.engine.buckets import Buckets, Rectangle
from dsjax.engine.device_state import DeviceState
from dsjax.engine.executor import ExecutorLimits, Progress
from dsjax.engine.expert_programs import ExpertLayers
from dsjax.engine.logit_edits import bias_width, mask_words
from dsjax.engine.program_library import ProgramLibrary
from dsjax.engine.sampler import Wanted
from dsjax.engine.slots import ADMIT_WIDTH, LaunchShape, StepRows
from dsjax.model.rows import GroupShape, RowGroup
from dsjax.model.step import Step
from sharding.arrays import put

COPIES = 32
"""Pairs of pages that one run of the copying program takes."""

_SELDOM_WANTED = {"step": 5, "drafting step": 3, "draw": 2, "drafts": 1}
"""Of each program, the place from which on its results are wanted seldom, and gathered by a program of their own."""


class Programs:
    """Each program is traced and compiled once, when it is first asked for or by ``warm_up``.

    rows, everywhere: shardings of what the host sends: one entry for each DP rank; the same on all devices.
    experts_per_exchange: experts that a rank sends and receives in one run of ``stage_experts``; 0: experts stay where they are.
    shared: whether other processes have a part of the mesh: then the outcome of a step is the same on all devices, and what else is
    to be read must be gathered. meet: waits for those processes; after a compilation at first use, which takes each as long as it
    takes, they must not wait for each other in a collective: that has a time limit.
    library: where programs that were compiled before, for other devices in the same layout, are found, and these are kept.
    """

    def __init__(
        self,
        step: Step,
        params: Mapping[str, Array],
        state: DeviceState,
        limits: ExecutorLimits,
        experts_per_exchange: int = 0,
        meet: Callable[[], object] | None = None,
        library: ProgramLibrary | None = None,
    ):
        # The dispatch always counts: that takes no collective, and recording the counts must not compile anything.
        self._step = dataclasses.replace(step, dispatch=dataclasses.replace(step.dispatch, report=True))
        self._params = {
            path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for path, array in params.items()
        }
        self._limits, self._exchanged = limits, experts_per_exchange
        self.meet = meet or (lambda: None)
        self._state = device_state.description(state)
        self.rows = NamedSharding(step.mesh, P(step.spec.batch_axes))
        self.everywhere = NamedSharding(step.mesh, P())
        self.shared = not self.rows.is_fully_addressable
        # One device alone never has another mesh.
        keeps = library is not None and jax.device_count() > 1
        self._shelf = library.shelf(self._layout(), step.mesh) if keeps else None
        self._compiled: dict[Hashable, Compiled] = {}
        self._constants: dict[Hashable, Array] = {}

    def _layout(self) -> Hashable:
        """What the programs depend on, but for which devices they run on; of one engine, whose options stay as they are."""
        arrays = jax.tree_util.tree_leaves_with_path((self._params, self._state))
        described = tuple((jax.tree_util.keystr(path), a.shape, str(a.dtype), a.sharding.spec) for path, a in arrays)
        return str(self._step.spec), self._limits, self._exchanged, self.shared, described

    @property
    def compiled(self) -> frozenset[Hashable]:
        """Keys of the programs that exist."""
        return frozenset(self._compiled)

    def shape(self, decode: Rectangle | None, prefill: Rectangle | None) -> LaunchShape:
        """The shape of a launch."""
        forms = (self._step.decode_form, self._step.prefill_form)
        groups = [
            GroupShape(rectangle.rows, rectangle.chunk, self._limits.max_pages, form) if rectangle else None
            for rectangle, form in zip((decode, prefill), forms, strict=True)
        ]
        return LaunchShape(*groups, self._limits.page_size)

    def allocate(self) -> DeviceState:
        """The state at the start: everything zero, experts placed as the step says."""
        state = jax.block_until_ready(self._get(("allocate",), self._lower_allocate)())
        if self._state.copies is not None:
            state.copies = put(self._step.placement.tables, self.everywhere)
        return state

    def admit(self) -> Compiled:
        """``(state, packed) -> state``: slots given, page tables changed; see ``slots.admit``."""
        return self._get(("admit",), self._lower_admit)

    def step(self, shape: LaunchShape, scored: bool = False) -> Compiled:
        """``(params, state, packed) -> (state, rows, outcome, logits, hidden, reports)``, with ``scored`` also ``Scores``.

        The rows of a launch, each with its most probable tokens. outcome: tokens and numbers made, as of ``commit``; logits: of each
        position that makes a token; hidden: of all token slots. With ``scored`` the tokens behind each position of the
        prefill row are scored.
        """
        return self._get(("step", shape, scored), lambda: self.lower_step(shape, scored))

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

    def drafting_step(self, shape: LaunchShape, count: int) -> Compiled:
        """``(params, state, packed) -> (state, outcome, drafts [B, R, count], reports)``: ``step`` and ``drafts`` in one program.

        For decode rows whose tokens are the most probable ones: nothing stands between the two then, and a launch is saved.
        """
        return self._get(("drafting step", shape, count), lambda: self.lower_drafting_step(shape, count))

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

    def biases(self, sampled: tuple[int, int, int]) -> Compiled:
        """``(state, rows, logits, biases) -> logits``; reads the state alone. ``sampled`` as of ``LaunchShape``."""
        return self._get(("biases", sampled), lambda: self._lower_biases(sampled))

    def draw(self, sampled: tuple[int, int, int]) -> Compiled:
        """``(state, rows, raw logits, biased logits, masks, Wanted) -> (state, outcome, Scores)``."""
        return self._get(("draw", sampled), lambda: self._lower_draw(sampled))

    def drafts(self, shape: LaunchShape, count: int) -> Compiled:
        """``(params, state, packed, rows, outcome, hidden) -> (state, drafts [B, R + R2, count])``: what the MTP module proposes.

        packed: the input of ``step``; all others are its results.
        """
        return self._get(("drafts", shape, count), lambda: self.lower_drafts(shape, count))

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

    def every_token(self) -> Compiled:
        """``(params, state, packed) -> (state, logits [C, V])`` of the row of rank 0; all ranks compute one of the widest chunk.

        packed: the row as of ``RowGroup.pack``; it brings its own page table.
        """
        return self._get(("every token",), self._lower_every_token)

    def copy(self) -> Compiled:
        """``(state, pairs [B, COPIES, 2]) -> state`` with pages copied."""
        pairs = self._described((COPIES, 2), np.int32)
        return self._get(("copy",), lambda: self._lower_small(device_state.copy_pages, pairs))

    def clear(self) -> Compiled:
        """``(state, marked pages) -> state`` with those pages zeroed."""
        marked = self._described((self._limits.pages_per_rank,), bool)
        return self._get(("clear",), lambda: self._lower_small(device_state.clear_pages, marked))

    def gather(self, tree: Any) -> Any:
        """What a program gave, where this process can read it.

        On a mesh of one process that is the tree itself. Else a program brings it to all devices, which all processes must run.
        """
        if not self.shared:
            return tree
        key, described = _described_tree(tree)
        return self._get(key, lambda: self._lower_gather(described))(tree)

    def take_pages(self) -> Compiled:
        """``(state, pages [B, MOVED_PAGES]) -> copies of them``, as of ``device_state.describe_moved``; reads the state alone."""
        return self._get(("take pages",), self._lower_take_pages)

    def put_pages(self) -> Compiled:
        """``(state, copies, pages) -> state`` with the copies in these pages."""
        return self._get(("put pages",), self._lower_put_pages)

    def described_moved(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Descriptions of what ``take_pages`` gives."""
        return device_state.describe_moved(self._step, self._state)

    def stage_experts(self, layers: ExpertLayers) -> Compiled:
        """As of ``expert_programs.lower_stage``."""
        return self._get(("stage experts", layers.stack), lambda: self._lower_stage(layers))

    def place_experts(self, layers: ExpertLayers) -> Compiled:
        """As of ``expert_programs.lower_place``."""
        return self._get(("place experts", layers.stack), lambda: self._lower_place(layers))

    def read_loads(self) -> Compiled:
        """``loads -> (loads, zeros)``: the experts' loads since they were read last; donated."""
        return self._get(("read loads",), self._lower_read_loads)

    def no_masks(self, sampled: tuple[int, int, int]) -> Array:
        """Masks that allow everything, on the devices."""
        shape = (self._limits.num_ranks, _positions(sampled), mask_words(self._limits.vocab_size))
        return self._constant(("masks", sampled), lambda: put(np.full(shape, -1, np.int32), self.rows))

    def warm_up(self, buckets: Buckets, progress: Progress | None = None) -> None:
        """Compile all that ``buckets`` can ask for: traced here one by one, compiled on all cores at once.

        ``progress`` is called before each trace and after each compilation. What it raises ends the warm-up: nothing more is
        traced, what waits is not compiled, and what is being compiled is waited for.
        """
        work = self._work(buckets)
        report = progress or (lambda done, total, label: None)
        report(0, len(work), next(iter(work.values()))[0])
        for decode, prefill, _, _ in _launches(buckets):
            self.no_masks(self.shape(decode, prefill).sampled)
        pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile")
        try:
            list(pool.map(self._find, work))
            missing = {key: entry for key, entry in work.items() if key not in self._compiled}
            pending: dict[Future[None], str] = {}
            for key, (label, lower) in missing.items():
                report(0, len(work), label)
                pending[pool.submit(self._compile, key, lower())] = label
            for done, future in enumerate(as_completed(pending), len(work) - len(missing) + 1):
                future.result()
                report(done, len(work), pending[future])
            for key in work:
                self._compile_gathers(key)
        finally:
            # An end before all is compiled must not wait for what is queued.
            pool.shutdown(cancel_futures=True)

    def compile_ahead(self, buckets: Buckets, go_on: Callable[[int, str], bool]) -> bool:
        """Compile what ``warm_up`` would, one after the other in this thread, for the library alone; whether all of it is there.

        go_on: asked before each program, with how many are there and the next one's name, and at the end; False ends it.
        """
        work = self._work(buckets)
        for done, (key, (label, lower)) in enumerate(work.items()):
            if not go_on(done, label):
                return False
            if key not in self._shelf:
                self._compile(key, lower())
                self._compile_gathers(key)
            self._compiled.clear()  # a program that is loaded takes memory of the devices
        return go_on(len(work), "all")

    def count(self, buckets: Buckets) -> int:
        """Programs that ``compile_ahead`` makes; those that gather come with what they gather."""
        return len(self._work(buckets))

    def _work(self, buckets: Buckets) -> dict[Hashable, tuple[str, Callable[[], Lowered]]]:
        """Keys, names and makers of all programs that ``buckets`` can ask for, but for those that gather."""
        work: dict[Hashable, tuple[str, Callable[[], Lowered]]] = {}
        for decode, prefill, proposes, scored in _launches(buckets):
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
        marked = self._described((self._limits.pages_per_rank,), bool)
        if self._limits.host_pages_per_rank or self._limits.disk_pages or self._limits.transfers:
            work["take pages",] = ("pages out of the cache", self._lower_take_pages)
            work["put pages",] = ("pages into the cache", self._lower_put_pages)
        work["clear",] = ("clearing pages", lambda: self._lower_small(device_state.clear_pages, marked))
        pairs = self._described((COPIES, 2), np.int32)
        work["copy",] = ("copying pages", lambda: self._lower_small(device_state.copy_pages, pairs))
        if self._exchanged:
            work["read loads",] = ("reading experts' loads", self._lower_read_loads)
            for layers in expert_programs.expert_layers(self._step):
                lower = lambda layers=layers: self._lower_stage(layers)  # noqa: E731
                work["stage experts", layers.stack] = (f"sending experts, {layers.stack}", lower)
                lower = lambda layers=layers: self._lower_place(layers)  # noqa: E731
                work["place experts", layers.stack] = (f"placing experts, {layers.stack}", lower)
        return work

    def drop(self) -> None:
        """Drop all programs."""
        self._compiled.clear()
        self._constants.clear()

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
        masks = self._described((_positions(sampled), mask_words(self._limits.vocab_size)), np.int32)
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

    def _compile_gathers(self, producer: Hashable) -> None:
        """Compile what brings to all devices that which is wanted seldom of a program's results: reports, scores, drafts."""
        program, first = self._compiled[producer], _SELDOM_WANTED.get(producer[0])
        if not self.shared or first is None:
            return
        for place in range(first, len(program.out_info)):
            tree = jax.tree.map(
                lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
                program.out_info[place],
                program.output_shardings[place],
            )
            if jax.tree.leaves(tree):
                key, described = _described_tree(tree)
                if not self._find(key):
                    self._compile(key, self._lower_gather(described))

    def _of_rows(self, sampled: tuple[int, int, int]):
        """Descriptions of what a step hands on to the sampling programs: packed rows, outcome, logits."""
        rows = self._described((StepRows.packed_width(sampled),), np.int32)
        outcome = self._described((_positions(sampled) + 2 * sampled[0],), np.int32)
        if self.shared:
            outcome = jax.ShapeDtypeStruct(outcome.shape, outcome.dtype, sharding=self.everywhere)
        return rows, outcome, self._logits(sampled)

    def _of_step(self, shape: LaunchShape):
        """The same, and of the hidden states."""
        hidden = self._described((shape.tokens, self._step.config.hidden_size), self._step.dtype)
        return *self._of_rows(shape.sampled), hidden

    def _logits(self, sampled: tuple[int, int, int]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self._step.mesh, self._step.rules.spec(("ranks", None, "vocab")))
        shape = (self._limits.num_ranks, _positions(sampled), self._limits.vocab_size)
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    def _pin(self, tree, described):
        """What a program gives, sharded as the next program expects it."""
        return jax.lax.with_sharding_constraint(tree, jax.tree.map(lambda array: array.sharding, described))

    def _described(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._limits.num_ranks, *shape), dtype, sharding=self.rows)

    def _get(self, key: Hashable, lower: Callable[[], Lowered]) -> Compiled:
        if key not in self._compiled:
            if not self._find(key):
                self._compile(key, lower())
            self.meet()  # also where it was found: another process may have compiled it
        return self._compiled[key]

    def _find(self, key: Hashable) -> bool:
        """Take a program from the library; whether it is there."""
        if key not in self._compiled:
            found = None if self._shelf is None else self._shelf.find(key)
            if found is not None:
                self._compiled[key] = found
        return key in self._compiled

    def _compile(self, key: Hashable, lowered: Lowered) -> None:
        self._compiled[key] = lowered.compile() if self._shelf is None else self._shelf.compile(key, lowered)

    def _constant(self, key: Hashable, make: Callable[[], Array]) -> Array:
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]


def _described_tree(tree: Any) -> tuple[Hashable, Any]:
    """Descriptions of a tree's arrays, and the key of the program that gathers such a tree."""
    described = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)
    leaves, structure = jax.tree.flatten(described)
    # Without the devices, which are others when the mesh is made anew.
    return (
        "gather",
        structure,
        *((leaf.shape, str(leaf.dtype), _without_devices(leaf.sharding)) for leaf in leaves),
    ), described


def _without_devices(sharding: Sharding) -> Hashable:
    return sharding.spec if isinstance(sharding, NamedSharding) else str(sharding)


def _launches(buckets: Buckets) -> list[tuple[Rectangle | None, Rectangle | None, tuple[int, ...], bool]]:
    """Decode and prefill rectangle of each launch, how many drafts may be proposed after it, and whether its prompts are scored."""
    return [*((*shapes, False) for shapes in buckets.shapes()), (None, buckets.scored, buckets.proposals, True)]


def _positions(sampled: tuple[int, int, int]) -> int:
    R, C, R2 = sampled
    return R * C + R2


def _describe(decode: Rectangle | None, prefill: Rectangle | None) -> str:
    parts = []
    if decode:
        parts.append(f"decode {decode.rows} rows" + (f" × {decode.chunk}" if decode.chunk > 1 else ""))
    if prefill:
        parts.append(f"prefill {prefill.rows} × {prefill.chunk}")
    return " + ".join(parts)
