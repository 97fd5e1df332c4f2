"""``Generations``: the successive executors of one engine, whose mesh changes while requests continue. See docs/many-hosts.md.

A generation (mesh epoch) is everything below the scheduler: mesh, parameters, programs, ``DeviceState``, executor, command stream. The
processes other than process 0 build theirs with ``load_generation`` from the announcement of process 0.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from dsjax.checkpoint.held_weights import HeldWeights
from dsjax.engine.afd.messages import ExpertLinks
from dsjax.engine.afd.options import afd_addresses, expert_spec
from dsjax.engine.contract.commands import ConnectExperts
from dsjax.engine.contract.executor import Executor, ExecutorWrapper
from dsjax.engine.elastic.compile_ahead import CompileAhead
from dsjax.engine.elastic.mesh_change import (
    NoMeshError,
    changed_options,
    check_mesh,
    largest_mesh,
    with_expert_mesh,
    with_expert_processes,
)
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.engine.schedule.mesh_changer import MeshEpoch
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.loading import LoadedEngine, load_model
from dsjax.engine.stream.leader import LeaderExecutor
from dsjax.engine.stream.step_record import RecordingExecutor
from dsjax.errors import ChangeUnderWayError, UserError
from dsjax.hosts.gloo.device_orders import DeviceOrders
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.wire import Announcement, JoinRequest
from sharding import MeshError, MeshSpec
from sharding.mesh import device_order

_LOSS_REPORT_SECONDS = 1.0
"""Time to wait, after a failed collective, for the report of a lost process before checking links. A closed connection reports at once."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A requested mesh, with the options for its experts."""

    spec: MeshSpec
    args: EngineArgs
    connects: bool = False  # whether only the expert processes change and the executor stays

    def __str__(self) -> str:
        experts = "" if self.args.expert_mesh is None else f" with experts on {self.args.expert_mesh}"
        return str(self.spec) + experts + (f" at {self.args.afd_address}" if self.connects else "")


@dataclass
class ChangeCounts:
    """Counters of mesh changes for metrics."""

    # number of changes by reason: ``scale`` (requested), ``loss``, ``leave`` or ``return`` (of a process), ``failure`` (of a collective,
    # although all processes live)
    changes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # total time of the changes, during which no step computed
    last_seconds: float = 0.0
    # bytes loaded by all processes in all changes, by source; see ``WeightBytes``
    weight_bytes: Counter[str] = field(default_factory=Counter)


class Generations:
    """The `MeshChanger` of an engine: releases the current executor and builds the next one when the mesh has to change.

    loaded: the first generation, as returned by ``load_model`` with ``args``, ``group`` and ``library``.

    Attributes:
        args: the current options except the mesh, which is ``spec``. number, facts: number and description of the current generation.
        wanted: the mesh requested last. The current mesh is smaller while processes are missing.
        warm: whether the first generation was warmed up (`on_warmed_up`). If so, later ones are warmed up before requests continue.
        ahead: compiles for possible next meshes; None if there is only one process.
    """

    def __init__(self, args: EngineArgs, group: HostGroup | None, loaded: LoadedEngine, library: ProgramLibrary):
        self._library = library
        self.ahead = None if group is None else CompileAhead(args, library)
        self.args, self._group, self._config = args, group, loaded.config
        self._weights = loaded.facts.weights
        self._executor: Executor | None = loaded.executor
        self._recording = False  # whether steps were recorded when the last executor was released
        self.number, self.facts = 0, loaded.facts
        self.spec = self.wanted = MeshSpec.parse(args.mesh)
        self.warm, self.failure = False, None
        self.patience = args.wait_for_mesh_seconds
        self._phase: str | None = None
        self._phase_seconds: dict[str, float] = {}  # seconds of the current change, by phase
        self._phase_began = 0.0
        self.counts = ChangeCounts()
        self._held_weights = loaded.held
        self._wake: Callable[[], None] = lambda: None
        self._is_reserved, self._lock = False, threading.Lock()  # reserved from `begin_change` to `end_change`
        self._exhausted: set[MeshSpec] = set()  # meshes already logged as used up
        self._has_changed = False  # whether the group has changed since the last `poll_change`
        self._device_orders = DeviceOrders({device.id: device.process_index for device in jax.devices()})
        if group is not None:
            self._device_orders.choose(
                [device.id for device in self._devices()[: self.spec.num_devices]], self.spec.shape
            )
            group.on_change = self._note_change

    @property
    def phase(self) -> str | None:
        """Current phase of a mesh change; None if the mesh is not being changed."""
        return self._phase

    @phase.setter
    def phase(self, text: str | None) -> None:
        now = time.monotonic()
        if self._phase is not None:
            part = self._phase.partition(" ")[0].rstrip(":")
            self._phase_seconds[part] = self._phase_seconds.get(part, 0.0) + now - self._phase_began
        self._phase, self._phase_began = text, now

    @property
    def busy(self) -> bool:
        """Whether the mesh is being changed, or is about to be."""
        return self._is_reserved or self.phase is not None

    @property
    def needs_change(self) -> bool:
        """Whether a process of this generation is lost or leaving, or missing devices are available again."""
        if self._group is None:
            return False
        try:
            fitting_spec = self._fit()  # also decides on requests to leave
            return self._is_broken or bool(self._leavers) or fitting_spec != self.spec
        except UserError:
            return True  # no mesh fits; `regroup` raises the error

    def poll_change(self) -> bool:
        """Return whether `needs_change` may have become true since the last call."""
        changed, self._has_changed = self._has_changed, False
        return changed or (self._group is not None and self._group.has_leave_requests)

    def watch(self, wake: Callable[[], None]) -> None:
        """Register ``wake``, which is called from any thread when ``needs_change`` may have become true."""
        self._wake = wake

    def _note_change(self, error: GroupError | None) -> None:
        self._has_changed = True
        self._wake()

    def on_warmed_up(self) -> None:
        """Start compiling for possible next meshes, now that the current mesh can serve."""
        self.warm = True
        if self.ahead is not None:
            self.ahead.begin(self.spec, self.wanted, self._group.live_ids, self._weights)

    @property
    def executor(self) -> Executor | None:
        """The executor that computes on the current devices, without the wrappers that lead followers or record steps."""
        return next((layer for layer in _layers(self._executor) if not isinstance(layer, ExecutorWrapper)), None)

    def _reserve(self) -> None:
        """Block other changes until this one ends. Raise ``ChangeUnderWayError`` if another change is in progress."""
        with self._lock:
            if self.busy:
                raise ChangeUnderWayError(
                    f"the mesh is being changed ({self.phase or 'about to begin'}); ask again when that is done"
                )
            self._is_reserved, self.failure = True, None

    def begin_change(self, text: str | None, expert_mesh: str | None = None, afd_address: str | None = None) -> Wanted:
        """Check a requested change, see ``MeshChanger.begin_change``. text: the mesh. An argument that is None keeps the current value.

        Raises:
            ChangeUnderWayError: another change is in progress. UserError, MeshError: the mesh is not possible, or an expert process does
                not answer.
        """
        self._reserve()
        try:
            if afd_address is not None or (expert_mesh is not None and self.args.afd_role == "attention"):
                if text is None:
                    return self._check_experts(expert_mesh, afd_address)
                raise UserError(
                    "found meshes of both sides, attention's and the experts', expected one; change one side and then the other"
                )
            args = self.args if expert_mesh is None else with_expert_mesh(self.args, expert_mesh)
            wanted = Wanted(self.wanted if text is None else MeshSpec.parse(text), args)
            check_mesh(args, self._config, self._weights, wanted.spec, self._devices(), self._group is not None)
            executor = self._executor  # the engine's thread may replace it after a loss
            links = None if executor is None else executor.extension(ExpertLinks)
            if links is not None:  # check now: the current mesh is released before the new one connects
                links.check()
            if wanted.spec.pp_size > 1:  # not all options support pipeline stages
                replace(args, **changed_options(args, self._config, wanted.spec))
        except BaseException:
            self.end_change()
            raise
        return wanted

    def end_change(self) -> None:
        """Let other changes begin, whether or not ``change_to`` was called."""
        self._is_reserved = False

    def _check_experts(self, expert_mesh: str | None, afd_address: str | None) -> Wanted:
        """Check a change to other expert processes. All must already answer, because steps wait while the engine connects to them."""
        args = with_expert_processes(self.args, expert_mesh, afd_address)
        executor = self.executor
        if executor is None:
            raise ChangeUnderWayError("the mesh is being changed after a loss; ask again when that is done")
        slots = executor.model.placement.n_physical
        if slots % expert_spec(args).ep_size:
            raise UserError(
                f"--expert-mesh {args.expert_mesh} does not divide the {slots} physical experts that this engine was started with; choose "
                "a number of devices that does, or start it with other --redundant-experts"
            )
        executor.extension(ExpertLinks).check(afd_addresses(args))
        return Wanted(self.wanted, args, connects=True)

    def change_to(self, wanted: Wanted) -> MeshEpoch | None:
        """Change to a requested mesh. Return None if the executor stays and only sends its tokens to other expert processes.

        If the change fails, ``failure`` has the reason, and the engine continues with the previous mesh.
        """
        if wanted.connects:
            return self._connect(wanted.args)
        previous, args = self.wanted, self.args
        self.wanted, self.args, self.failure = wanted.spec, wanted.args, None
        try:
            return self._rebuild("scale", f"{wanted} was asked for")
        except GroupError:
            raise
        except Exception as error:
            if not isinstance(error, (UserError, MeshError)):
                if self._group is not None:  # other processes may not have failed
                    raise
                error = UserError(f"it could not be loaded ({type(error).__name__}: {error})")
            _log.error("The mesh %s cannot be had: %s. Going back to %s.", wanted, error, previous)
            self.wanted, self.args, self.failure = previous, args, error
            return self._rebuild("scale", f"{wanted} could not be had")

    def _connect(self, args: EngineArgs) -> MeshEpoch | None:
        """Connect all attention processes to other expert processes, between two steps."""
        self._phase_seconds, self.phase = {}, "connecting to other expert processes"
        try:
            refused = self._executor.collect(self._executor.launch(ConnectExperts(args.expert_mesh, args.afd_address)))
        except Exception as error:  # an attention process is lost
            return self.recover_from(error)
        finally:
            self.phase = None
        if refused is not None:
            self.failure = UserError(refused)
            return None
        step, self.args = self.executor.model, args
        self.facts = replace(
            self.facts,
            expert_mesh=f"ep={step.expert_ranks}",
            physical_experts_per_device=step.placement.n_physical // step.expert_ranks,
            expert_weight_bytes=step.apart.bytes_of_device,
        )
        self.counts.last_seconds = sum(self._phase_seconds.values())
        return None

    def recover_from(self, error: Exception) -> MeshEpoch:
        """Build a new generation after a failed step. Raise its error unless a process is lost or a collective failed that had worked."""
        if self._is_reserved:  # a change was waiting for the steps in flight
            self.failure = UserError("a step failed before the mesh could be changed to it; ask again")
        # Whether this generation has completed a step together with other processes.
        has_stepped_together = any(
            isinstance(layer, LeaderExecutor) and layer.collected > 0 for layer in _layers(self._executor)
        )
        collective_failed = has_stepped_together and isinstance(error, RuntimeError)
        lost = self._find_loss(error, _LOSS_REPORT_SECONDS if collective_failed else None)
        if lost is None and collective_failed:  # a link may be down, or a process may hang
            self.phase = "looking at links"
            self._cut()
            lost, all_answered = self._group.links.check_all(self.number)
            lost = lost or (None if all_answered else self._find_loss(error))
        if lost is None and not collective_failed:
            if self._group is not None:
                self._group.leave(f"a step has failed ({type(error).__name__})")
            raise error
        _log.warning("%s", lost or f"A step has failed, though all processes live: {error}")
        return self._rebuild("loss" if lost else "failure", str(lost or "a collective has failed"))

    def regroup(self) -> MeshEpoch:
        """Change to the largest mesh, up to the wanted one, that fits the devices of the current processes."""
        if self._is_broken:
            return self._rebuild("loss", "a process has gone")
        if leavers := self._leavers:
            return self._rebuild(
                "leave", f"{' and '.join(member.name for member in leavers)} leaves, as it was told to end"
            )
        return self._rebuild("return", "a process has come back")

    def _rebuild(self, cause: str, reason: str) -> MeshEpoch:
        """Replace the executor; retry if more processes are lost. cause: key of ``ChangeCounts.changes``. reason: for messages."""
        started_at = time.monotonic() if self.phase is None else self._phase_began  # includes the check of links
        self._phase_seconds, self.phase = {}, "releasing the old mesh"
        if self._executor is not None:  # None if the requested mesh failed and the previous one is built again
            self._recording = self._executor.recording
        is_broken = cause in ("loss", "failure")
        if self.ahead is not None:
            self.ahead.stop()
        try:
            if is_broken:
                self._cut()
            release(self._executor, self._held_weights)
            self._executor = None
            while True:
                if is_broken:
                    self._device_orders.break_current(self._group.lost if self._group else ())
                try:
                    loaded = self._load(reason, is_broken)
                    break
                except (GroupError, RuntimeError) as error:
                    loss = self._find_loss(error)
                    if loss is None:
                        raise
                    is_broken, reason, self.phase = True, str(loss), "releasing what was begun"
                    self._cut()
                    _log.warning("%s", loss)
        finally:
            self.phase = None
        self._executor, self.facts = loaded.executor, loaded.facts
        if self._recording:
            loaded.executor.set_recording(True)
        seconds = time.monotonic() - started_at
        sources = loaded.sources
        self.counts.weight_bytes.update(kept=sources.kept, moved=sources.moved, read=sources.read)
        self.counts.changes[cause] += 1
        self.counts.seconds += seconds
        self.counts.last_seconds = seconds
        if self.warm:
            self.on_warmed_up()
        parts = ", ".join(f"{name} {part:.1f} s" for name, part in self._phase_seconds.items())
        _log.info(
            f"Generation {self.number} has {self.spec}. No step computed for {seconds:.1f} s: {parts}; {sources}."
        )
        config = self.args.scheduler_config(loaded.executor.limits)
        return MeshEpoch(loaded.executor, config, self.spec != self.wanted)

    def _cut(self) -> None:
        """Make pending collectives of the current mesh fail in this process. The other processes do so when the next mesh is announced."""
        if self._group is not None:
            self._group.collectives.cut(self.number)

    def _load(self, reason: str, broken: bool) -> LoadedEngine:
        self.phase = "loading"
        self.spec = self._fit()
        options = changed_options(self.args, self._config, self.spec)
        chosen = self._devices()[: self.spec.num_devices]
        order = [device.id for device in chosen]
        if self._group is not None:
            order = self._device_orders.choose(order, self.spec.shape)
        self.number += 1
        processes = sorted({device.process_index for device in chosen})
        _log.info("Generation %d begins, with %s on processes %s: %s.", self.number, self.spec, processes, reason)
        broken_number = self.number - 1 if broken else None
        left_out = self._group.links.left_out if self._group is not None else {}
        announcement = Announcement(
            self.number, processes, order, options, str(self.wanted), reason, broken_number, left_out=dict(left_out)
        )
        if self._group is not None:
            self._group.announce(announcement)
        loaded = load_generation(self.args, announcement, self._group, self._library, self._held_weights)
        if self.warm:
            self.phase = "compiling"
            try:
                loaded.executor.warm_up(self._show_progress)
            except BaseException:
                release(loaded.executor, self._held_weights)
                raise
        return loaded

    def _show_progress(self, done: int, total: int, label: str) -> None:
        self.phase = f"compiling {done} of {total}: {label}"

    def _fit(self) -> MeshSpec:
        """Return the largest mesh for the current devices that has not failed in every order of its devices."""
        if self._group is not None:
            self._decide_on_leavers()
            self._device_orders.break_with(self._group.take_ended())
        devices = self._devices()
        while True:
            try:
                spec = largest_mesh(self.args, self._config, self._weights, self.wanted, devices)
            except NoMeshError as error:
                raise UserError(f"{error}; start all processes again") from error
            chosen = devices[: spec.num_devices]
            if (
                self._group is None
                or self._device_orders.find([device.id for device in chosen], spec.shape) is not None
            ):
                return spec
            if spec not in self._exhausted:
                self._exhausted.add(spec)
                _log.warning(
                    "The mesh %s has broken once in every order of its devices, and is not formed again before all processes are "
                    "started again; the next smaller one is taken",
                    spec,
                )
            devices = devices[: spec.num_devices - spec.tp_size]

    def _devices(self) -> list[jax.Device]:
        """Return the devices of live processes, sorted by process and id."""
        live = None if self._group is None else {member.process_id for member in self._group.live}
        living = [device for device in jax.devices() if live is None or device.process_index in live]
        return sorted(living, key=device_order)

    def _decide_on_leavers(self) -> None:
        """Excuse each process that has asked to leave, one by one, if the remaining processes can form a mesh; refuse the others."""
        group = self._group
        for member in group.take_leave_requests():
            reason = None
            if member in group.present and group.needs_all:
                reason = "process 0 is ending too, and what runs needs all processes"
            elif member in group.present:
                staying = [device for device in self._devices() if device.process_index != member.process_id]
                try:
                    largest_mesh(self.args, self._config, self._weights, self.wanted, staying)
                except NoMeshError as error:
                    reason = f"without it {error}"
            if reason is None:
                group.excuse(member)
            else:
                _log.warning("%s has asked to leave, and cannot be spared: %s.", member.name, reason)
                group.refuse_leave(member, reason)

    @property
    def _leavers(self) -> list[JoinRequest]:
        """Members of the current generation that are leaving."""
        return [member for member in self._group.present if member in self._group.excused]

    @property
    def _is_broken(self) -> bool:
        return any(self._group.loss_of(member) for member in self._group.present)

    def _find_loss(self, error: Exception, seconds: float | None = None) -> GroupError | None:
        if self._group is None or not isinstance(error, GroupError | RuntimeError):
            return None
        return self._group.find_loss(seconds)


def load_generation(
    args: EngineArgs, announcement: Announcement, group: HostGroup | None, library: ProgramLibrary, held: HeldWeights
) -> LoadedEngine:
    """Load this process's part of an announced generation. Its steps are not recorded, because a recording covers one mesh only.

    args: the options that the process was started with. held: weights of the previous generation on this process's devices.
    """
    options = replace(args, **announcement.options, record_steps=None)
    spec, mesh = MeshSpec.parse(options.mesh), None
    if spec.pp_size == 1:
        devices = {device.id: device for device in jax.devices()}
        mesh = spec.arrange([devices[i] for i in announcement.device_ids])
    return load_model(options, group, mesh=mesh, is_later=True, library=library, held=held)


def release(executor: Executor | None, held: HeldWeights | None = None) -> None:
    """Free an executor's arrays on the devices, even if its last step failed. held: takes over its weights."""
    for layer in _layers(executor):
        if isinstance(layer, RecordingExecutor):
            layer.file.close("the mesh has changed")
        elif not isinstance(layer, ExecutorWrapper):
            layer.shutdown(held)
    gc.collect()  # JAX frees memory shared with NumPy only at its next call or in a garbage collection


def _layers(executor: Executor | None) -> Iterator[Any]:
    """Yield an executor and the executors it wraps, outermost first."""
    while executor is not None:
        yield executor
        executor = executor.inner if isinstance(executor, ExecutorWrapper) else None
