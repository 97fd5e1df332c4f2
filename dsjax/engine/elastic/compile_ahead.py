"""``CompileAhead``: compiles, in the background, the programs of meshes that may follow the current one after a loss or a return."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from dsjax.background import note_failure, start_thread
from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.source import Checkpoint, open_checkpoint
from dsjax.config import ModelConfig
from dsjax.engine.device import device_state
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.device.process import enable_compile_cache
from dsjax.engine.device.programs import Programs
from dsjax.engine.elastic.mesh_change import NoMeshError, changed_options, largest_mesh
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.sizes import EngineLayout, weight_bytes
from dsjax.model.parameters import Weights
from sharding import MeshSpec
from sharding.mesh import device_order

_PAUSE_SHARE = 1.0
"""After each program the thread sleeps for this share of its compile time, because steps need the GIL and the cores too."""

_POOL_RESERVE = 0.01
"""Share of an accelerator's pool that the predicted number of pages leaves free for the rounding of allocations."""

_JOIN_SECONDS = 60.0
_WORK = "compile ahead"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeshCandidate:
    """A possible next mesh."""

    spec: MeshSpec
    devices: list[jax.Device]  # sorted by process and id; any other devices would do
    reason: str  # text for the log


class CompileAhead:
    """Compiles for one process, across all mesh epochs. Programs go to the library; they do not depend on a mesh's exact devices.

    done, total: number of compiled and of all programs for the possible next meshes.
    """

    def __init__(self, args: EngineArgs, library: ProgramLibrary):
        self._args, self._library = args, library
        # With disaggregated experts a step is many programs, which the library does not keep.
        self._max_losses = args.compile_ahead if args.expert_mesh is None else 0
        self._stop = threading.Event()  # ends the latest compilation
        self._thread: threading.Thread | None = None
        self.done = self.total = 0
        atexit.register(self.close)  # a thread that compiles when Python ends would abort the process

    def begin(self, current: MeshSpec, wanted: MeshSpec, live: Sequence[int], weights: Weights) -> None:
        """Start compiling for the possible next meshes in a thread. Stops an earlier compilation.

        live: the processes that can be in the next mesh, including standby processes. weights: the storage format of the weights.
        """
        self.stop()
        self.done = self.total = 0
        if not self._max_losses:
            return

        def list_candidates() -> list[MeshCandidate]:
            config, losses = self._checkpoint.config, self._max_losses
            devices = [device for device in sorted(jax.devices(), key=device_order) if device.process_index in live]
            meshes = meshes_after_losses(self._args, config, weights, wanted, devices, jax.process_index(), losses)
            if current != wanted:
                meshes.append(_on_first_devices(wanted, "processes come back"))
            return meshes

        self._stop = threading.Event()
        self._thread = start_thread(
            _WORK, self._compile, list_candidates, self._stop, _PAUSE_SHARE, name="dsjax-compile-ahead"
        )

    def stop(self) -> None:
        """Stop compiling. Does not wait for the program that is being compiled."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and wait for the current program to finish compiling."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def prepare(self, spec: MeshSpec, reason: str) -> None:
        """Compile for a mesh over all devices that JAX knows, in this thread and without pauses."""
        if self._max_losses:
            self._compile(lambda: [_on_first_devices(spec, reason)], threading.Event(), pause_share=0.0)

    def _compile(
        self, list_candidates: Callable[[], list[MeshCandidate]], stop: threading.Event, pause_share: float
    ) -> None:
        """Compile for each mesh in turn until `stop` is set. Errors are only logged: the next mesh then compiles when it is formed."""
        try:
            self._library.keep_in(enable_compile_cache())
            meshes = list_candidates()
            described = [described_programs(self._args, self._checkpoint, mesh, self._library) for mesh in meshes]
            num_compiled, total = 0, sum(len(programs.labels(buckets)) for programs, buckets in described)
            for mesh, (programs, buckets) in zip(meshes, described, strict=True):
                began = time.monotonic()
                if not programs.compile_ahead(buckets, self._should_continue(num_compiled, total, stop, pause_share)):
                    return
                num_compiled += len(programs.labels(buckets))
                seconds = time.monotonic() - began
                _log.info("Compiled the programs of %s in %.1f s, for when %s.", mesh.spec, seconds, mesh.reason)
        except Exception as error:
            note_failure(_WORK, error, "Programs that a change of the mesh needs are compiled when it comes.")

    def _should_continue(
        self, num_before: int, total: int, stop: threading.Event, pause_share: float
    ) -> Callable[[int, str], bool]:
        """Return the `should_continue` of `Programs.compile_ahead`, which counts and pauses. num_before: programs of earlier meshes."""
        resumed_at = time.monotonic()

        def should_continue(done: int, _: str) -> bool:
            nonlocal resumed_at
            if not stop.is_set():
                time.sleep(pause_share * (time.monotonic() - resumed_at))
            resumed_at = time.monotonic()
            if stop.is_set():
                return False
            self.done, self.total = num_before + done, total
            return True

        return should_continue

    @functools.cached_property
    def _checkpoint(self) -> Checkpoint:
        return open_checkpoint(resolve(self._args.model, revision=self._args.revision))


def _on_first_devices(spec: MeshSpec, reason: str) -> MeshCandidate:
    """Return a mesh over the first devices of all."""
    return MeshCandidate(spec, sorted(jax.devices(), key=device_order)[: spec.num_devices], reason)


def meshes_after_losses(
    args: EngineArgs,
    config: ModelConfig,
    weights: Weights,
    wanted: MeshSpec,
    devices: Sequence[jax.Device],
    this_process: int,
    losses: int,
) -> list[MeshCandidate]:
    """List, without duplicates, the meshes formed after up to `losses` processes other than process 0 and this one are lost.

    devices: devices of live processes, sorted by process and id. this_process: index of this process.
    """
    meshes: dict[MeshSpec, MeshCandidate] = {}
    others = sorted({device.process_index for device in devices} - {0, this_process})
    for count in range(1, min(losses, len(others)) + 1):
        for lost in itertools.combinations(others, count):
            remaining = [device for device in devices if device.process_index not in lost]
            try:
                spec = largest_mesh(args, config, weights, wanted, remaining)
            except NoMeshError:
                continue
            chosen = remaining[: spec.num_devices]
            if any(device.process_index == this_process for device in chosen):
                reason = "a process is gone" if count == 1 else f"{count} processes are gone"
                meshes.setdefault(spec, MeshCandidate(spec, chosen, reason))
    return list(meshes.values())


def described_programs(
    args: EngineArgs, checkpoint: Checkpoint, candidate: MeshCandidate, library: ProgramLibrary
) -> tuple[Programs, Buckets]:
    """Return the programs and buckets that an executor on this mesh would have. Nothing is allocated."""
    changed_args = replace(args, **changed_options(args, checkpoint.config, candidate.spec), record_steps=None)
    mesh = candidate.spec.arrange(candidate.devices)
    layout = EngineLayout.of(changed_args, checkpoint, mesh)
    params = layout.step.abstract_parameters()
    limits = layout.limits(changed_args, library, params, weight_bytes(layout.step))
    if mesh.devices.flat[0].platform != "cpu":
        limits = replace(limits, pages_per_rank=int(limits.pages_per_rank * (1 - _POOL_RESERVE)))
        library.pages.setdefault(str(candidate.spec), limits.pages_per_rank)
    state = device_state.describe(layout.step, limits, layout.num_drafts, counts_loads=layout.per_exchange > 0)
    return Programs(layout.step, params, state, limits, layout.per_exchange, library=library), layout.buckets
