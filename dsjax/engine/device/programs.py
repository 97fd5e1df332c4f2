"""``Programs``: the compiled programs of an executor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.stages import Compiled
from jaxtyping import Array

from dsjax.engine.contract.executor import ExecutorLimits, Progress
from dsjax.engine.device import expert_programs
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.device.compiler_options import step_options
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.lowered_programs import LoweredPrograms, commit_key, gather_key
from dsjax.engine.device.sampler import mask_words
from dsjax.engine.device.slots import LaunchShape
from dsjax.engine.program_cache.compiled_programs import CompiledPrograms, ProgramKey
from dsjax.engine.program_cache.library import ProgramLibrary, Shelf
from dsjax.model.step import ModelStep
from sharding.arrays import put
from sharding.cut import Worker
from sharding.jax_internals import batched_device_put

_FIRST_RARELY_READ = {"step": 5, "drafting step": 3, "drafts": 1}
"""For each kind of program, the index of the first result that is seldom read and has a gathering program of its own."""


class RepeatedPut:
    """``put`` for the inputs of each step, which always go to the same devices: caches the values that JAX derives from a shape.

    Deriving them is most of the cost of ``jax.device_put`` for small arrays: 18 µs instead of 197 on one device, 130 instead of 309 on 32
    (two busy cores, 2026-11-28, `python tools/bench_host.py --put --mesh dp=1 dp=32` at commit 69443ce0).
    """

    def __init__(self, sharding: Sharding):
        self._sharding, self._put = sharding, batched_device_put()
        # (shape, dtype) → the abstract value, the slices of an array, and the device of each slice.
        self._placements: dict[
            tuple[tuple[int, ...], np.dtype], tuple[Any, list[tuple[slice, ...]], list[jax.Device]]
        ] = {}

    def __call__(self, array: np.ndarray) -> jax.Array:
        """Return the array on the devices."""
        placement = self._placements.get((array.shape, array.dtype))
        if placement is not None:
            described, parts, devices = placement
            return self._put(described, self._sharding, [array[part] for part in parts], devices)
        placed = put(array, self._sharding)
        if self._sharding.is_fully_addressable and placed.dtype == array.dtype:
            places = self._sharding.addressable_devices_indices_map(array.shape)
            self._placements[array.shape, array.dtype] = placed.aval, list(places.values()), list(places)
        return placed


class Programs(LoweredPrograms):
    """Compiles each program once, at its first ``get`` or in ``warm_up``.

    Args:
        step, params, state, limits, experts_per_exchange, experts: as in ``LoweredPrograms``.
        meet: waits for the other processes of the mesh after a compilation at first use, because collectives have a time limit.
        library: keeps programs for later meshes of the same layout, and for later starts.

    Attributes:
        store: the compiled programs. compiled_beside: keys of those that ``compile_beside`` has compiled.
        put_rows: sends an array to the devices of each DP rank.
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
        super().__init__(step, params, state, limits, experts_per_exchange, experts)
        self.put_rows = RepeatedPut(self.rows)
        self.meet = meet or (lambda: None)
        parts = type(self), self._step, self._params, self._state, limits.of_programs, experts_per_exchange
        shelf = Shelf(library, step.mesh, parts, self._compiler_options)
        self.store = CompiledPrograms(self.lower, self.meet, shelf)
        self._is_dropped, self.compiled_beside = False, frozenset()
        self._no_masks: dict[int, Array] = {}
        self._shapes: dict[tuple[Rectangle | None, Rectangle | None], LaunchShape] = {}

    def _compiler_options(self, key: ProgramKey) -> dict[str, int | bool] | None:
        return step_options(self._step, draws=key[0] == "draw")

    def with_experts(self, step: ModelStep, experts: Worker) -> Programs:
        """Compile the same programs for another backend of the routed experts."""
        programs = Programs(
            step, self._params, self._state, self._limits, self._experts_per_exchange, self.meet, experts=experts
        )
        compiled = dict(self.store.compiled)  # a copy, because another thread may compile one more
        labels = {key: str(key[0]) for key in compiled if key[0] != "gather"}
        # Gathering programs do not depend on experts.
        programs.store.compiled |= {key: program for key, program in compiled.items() if key not in labels}
        programs.store.compile_all(labels, lambda done, total, label: None, programs._compile_gathers)
        return programs

    @property
    def compiled(self) -> frozenset[Hashable]:
        """Keys of the compiled programs."""
        return frozenset(self.store.compiled)

    def allocate(self) -> DeviceState:
        """Make the initial state: zeros, and experts placed as in the step."""
        state = jax.block_until_ready(self.get("allocate")())
        if self._state.copies is not None:
            state.copies = put(self._step.placement.tables, self.everywhere)
        return state

    def get(self, kind: str, *arguments: Hashable) -> Compiled:
        """Return a program, compiled if necessary. The ``lower_…`` of its kind has its arguments and results."""
        key = kind, *arguments
        return self.store.compiled.get(key) or self.store.get(key, lambda: self.lower(key))

    def shape(self, decode: Rectangle | None, prefill: Rectangle | None) -> LaunchShape:
        """Return the shape of a launch, the same object each time."""
        if (decode, prefill) not in self._shapes:
            self._shapes[decode, prefill] = super().shape(decode, prefill)
        return self._shapes[decode, prefill]

    def gather(self, tree: Any) -> Any:
        """Make a program's results readable by this process. If ``shared``, all processes run a program that replicates them."""
        if not self.shared:
            return tree
        key, described = gather_key(tree)
        return self.store.get(key, lambda: self.lower_gather(described))(tree)

    def no_masks(self, positions: int) -> Array:
        """Return masks that allow every token, on the devices."""
        if positions not in self._no_masks:
            shape = (self._limits.num_ranks, positions, mask_words(self._limits.vocab_size))
            self._no_masks[positions] = put(np.full(shape, -1, np.int32), self.rows)
        return self._no_masks[positions]

    def warm_up(self, labels: Mapping[ProgramKey, str], progress: Progress | None = None) -> None:
        """Compile some of ``labels``. This thread traces them one by one; all cores compile them.

        An exception of ``progress`` ends the warm-up after the compilations that are running.
        """
        report = progress or (lambda done, total, label: None)
        report(0, len(labels), next(iter(labels.values())))
        for kind, *arguments in labels:
            if kind == "draw":
                self.no_masks(*arguments)
        self.store.compile_all(labels, report, self._compile_gathers)

    def compile_beside(self, keys: Iterable[ProgramKey], check: Callable[[], None]) -> None:
        """Compile programs one by one while another thread runs programs. That thread waits for at most one compilation before its own.

        ``check`` is called before each program. An exception of it stops the compilation, as ``drop`` does.
        """
        for key in keys:
            check()
            if self._is_dropped:
                return
            if key not in self.store.compiled:
                self.compiled_beside |= {key}
                self.store.compile(key, partial(self.lower, key))

    def compile_ahead(self, buckets: Buckets, should_continue: Callable[[int, str], bool]) -> bool:
        """Compile the programs of ``warm_up`` one by one in this thread, only for the library. Return whether all are compiled.

        should_continue: called before each program and at the end, with the number of finished programs and the next one's name.
        """
        labels = self.labels(buckets)
        for done, (key, label) in enumerate(labels.items()):
            if not should_continue(done, label):
                return False
            if not self.store.shelf.has(key):
                self.store.compile(key, partial(self.lower, key))
                self._compile_gathers(key)
            self.store.compiled.clear()  # loaded programs take memory of the devices
        return should_continue(len(labels), "all")

    def drop(self) -> None:
        """Drop all programs."""
        self._is_dropped = True
        self.store.compiled.clear()
        self._no_masks.clear()

    def _compile_gathers(self, producer: ProgramKey) -> None:
        """Compile the programs that replicate a program's seldom read results: reports, prompt scores, drafts."""
        program, first = self.store.compiled[producer], _FIRST_RARELY_READ.get(producer[0])
        if not self.shared or first is None:
            return
        for place in range(first, len(program.out_info)):
            tree = jax.tree.map(
                lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
                program.out_info[place],
                program.output_shardings[place],
            )
            if jax.tree.leaves(tree):
                key, described = gather_key(tree)
                self.store.compile(key, lambda described=described: self.lower_gather(described))

    def labels(self, buckets: Buckets) -> dict[ProgramKey, str]:
        """Return keys and names of all programs that ``buckets`` need, without gathering programs."""
        labels: dict[ProgramKey, str] = {}
        ends = self._step.is_last_stage
        launches = [(*shapes, False) for shapes in buckets.shapes()]
        for decode, prefill, proposes, scored in [*launches, (None, buckets.scored, buckets.proposals, True)]:
            shape, name = self.shape(decode, prefill), shape_label(decode, prefill)
            if not ends:  # scored launches have no program of their own there
                labels["step", shape, False, False] = f"prompt scores, {name}" if scored else name
                for count in (0, *proposes):
                    key = commit_key(shape, count)
                    labels[key] = f"tokens of {shape.positions} positions, {count} drafts"
                continue
            labels["step", shape, scored, False] = f"prompt scores, {name}" if scored else name
            for kind, what in (("draw", "sampler"), ("biases", "biases"), ("score", "log-probabilities")):
                labels.setdefault((kind, shape.positions), f"{what}, {name}")
            for count in proposes:
                labels["drafts", shape, count] = f"{count} drafts, {name}"
                if prefill is None:
                    labels["drafting step", shape, count, False] = f"{name}, then {count} drafts"
        labels |= {("allocate",): "allocation", ("admit",): "admission"}
        if self._limits.moves_pages:
            for table in ("context", "window") if self._limits.windows_per_rank else ("context",):
                labels["take pages", table] = f"{table} pages out of the cache"
                labels["put pages", table] = f"{table} pages into the cache"
        labels |= {("clear",): "clearing pages", ("copy",): "copying pages"}
        if self._experts_per_exchange:
            labels["read loads",] = "reading experts' loads"
            for layers in expert_programs.expert_layers(self._step):
                labels["stage experts", layers.stack] = f"sending experts, {layers.stack}"
                labels["place experts", layers.stack] = f"placing experts, {layers.stack}"
        stage = self._step.stage
        return labels if stage is None else {key: f"{stage}: {name}" for key, name in labels.items()}

    def wanted_first(self, buckets: Buckets) -> dict[ProgramKey, str]:
        """Return the ``labels`` that every request needs: shapes of a request alone on its rank, and programs without a shape.

        Return all labels if programs take long to compile, or if all processes of a mesh must have them.
        """
        labels = self.labels(buckets)
        if self._step.mesh.devices.flat[0].platform != "cpu" or self.shared or self.experts is not None:
            return labels
        shapes = [self.shape(*pair) for *pair, _ in buckets.shapes() if buckets.serves_one(*pair)]
        wanted = {*shapes, *(shape.positions for shape in shapes)}
        is_wanted = lambda key: all(one in wanted or isinstance(one, str) for one in key[1:2])  # noqa: E731
        is_scored = lambda key: key[0] == "step" and key[2]  # noqa: E731
        return {key: name for key, name in labels.items() if is_wanted(key) and not is_scored(key)}


def shape_label(decode: Rectangle | None, prefill: Rectangle | None) -> str:
    """Name the shape of a launch, such as `decode 8 rows + prefill 1 × 256`."""
    parts = []
    if decode:
        parts.append(f"decode {decode.rows} rows" + (f" × {decode.chunk}" if decode.chunk > 1 else ""))
    if prefill:
        parts.append(f"prefill {prefill.rows} × {prefill.chunk}")
    return " + ".join(parts)
