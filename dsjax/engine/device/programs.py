"""The compiled programs of an engine: those of ``traced_programs.py``, each compiled once, or found where it was compiled before."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from dsjax.engine.contract.executor import ExecutorLimits, Progress
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.expert_programs import ExpertLayers
from dsjax.engine.device.logit_edits import mask_words
from dsjax.engine.device.program_library import ProgramLibrary
from dsjax.engine.device.slots import LaunchShape
from dsjax.engine.device.traced_programs import TracedPrograms, launches, positions
from dsjax.model.step import ModelStep
from sharding.arrays import put

_SELDOM_WANTED = {"step": 5, "drafting step": 3, "draw": 2, "drafts": 1}
"""For each program, the place from which on its results are wanted seldom, and gathered by a program of their own."""


class Programs(TracedPrograms):
    """Each program is traced and compiled once, when it is first asked for or by ``warm_up``.

    meet: waits for the other processes that have a part of the mesh; after a compilation at first use, which takes each as long as it
    takes, they must not wait for each other in a collective: that has a time limit.
    library: where programs that were compiled before, for other devices in the same layout, are found, and these are kept.
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
    ):
        super().__init__(step, params, state, limits, experts_per_exchange)
        self.meet = meet or (lambda: None)
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

    def drafting_step(self, shape: LaunchShape, count: int) -> Compiled:
        """``(params, state, packed) -> (state, outcome, drafts [B, R, count], reports)``: ``step`` and ``drafts`` in one program.

        For decode rows whose tokens are the most probable ones: nothing stands between the two then, and a launch is saved.
        """
        return self._get(("drafting step", shape, count), lambda: self.lower_drafting_step(shape, count))

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

    def every_token(self) -> Compiled:
        """``(params, state, packed) -> (state, logits [C, V])`` of the row of rank 0; all ranks compute one of the widest chunk.

        packed: the row as of ``RowGroup.pack``; it brings its own page table.
        """
        return self._get(("every token",), self._lower_every_token)

    def copy(self) -> Compiled:
        """``(state, pairs [B, COPIES, 2]) -> state`` with pages copied."""
        return self._get(("copy",), self._lower_copy)

    def clear(self) -> Compiled:
        """``(state, marked pages) -> state`` with those pages zeroed."""
        return self._get(("clear",), self._lower_clear)

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

    def stage_experts(self, layers: ExpertLayers) -> Compiled:
        """The program that ``expert_programs.lower_stage`` describes."""
        return self._get(("stage experts", layers.stack), lambda: self._lower_stage(layers))

    def place_experts(self, layers: ExpertLayers) -> Compiled:
        """The program that ``expert_programs.lower_place`` describes."""
        return self._get(("place experts", layers.stack), lambda: self._lower_place(layers))

    def read_loads(self) -> Compiled:
        """``loads -> (loads, zeros)``: the experts' loads since they were read last; donated."""
        return self._get(("read loads",), self._lower_read_loads)

    def no_masks(self, sampled: tuple[int, int, int]) -> Array:
        """Masks that allow everything, on the devices."""
        shape = (self._limits.num_ranks, positions(sampled), mask_words(self._limits.vocab_size))
        return self._constant(("masks", sampled), lambda: put(np.full(shape, -1, np.int32), self.rows))

    def warm_up(self, buckets: Buckets, progress: Progress | None = None) -> None:
        """Compile all that ``buckets`` can ask for: traced here one by one, compiled on all cores at once.

        ``progress`` is called before each trace and after each compilation. What it raises ends the warm-up: nothing more is
        traced, what waits is not compiled, and what is being compiled is waited for.
        """
        work = self.all_of(buckets)
        report = progress or (lambda done, total, label: None)
        report(0, len(work), next(iter(work.values()))[0])
        for decode, prefill, _, _ in launches(buckets):
            self.no_masks(self.shape(decode, prefill).sampled)
        pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile")
        try:
            list(pool.map(self._find, work))
            missing = {key: entry for key, entry in work.items() if key not in self._compiled}
            there = len(work) - len(missing)
            if not missing:
                report(there, there, "all")
            pending: dict[Future[None], str] = {}
            for key, (label, lower) in missing.items():
                report(there, len(work), label)
                pending[pool.submit(self._compile, key, lower())] = label
            for done, future in enumerate(as_completed(pending), there + 1):
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
        work = self.all_of(buckets)
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
        return len(self.all_of(buckets))

    def drop(self) -> None:
        """Drop all programs."""
        self._compiled.clear()
        self._constants.clear()

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
