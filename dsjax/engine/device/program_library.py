"""``CompiledPrograms``: the compiled programs of one executor. ``ProgramLibrary``: those of meshes that an engine has had, or may come to
have, for whichever devices they are needed.

A program names its devices by their place in the mesh. Which devices those are is said apart from it, when it is loaded: a program
that was compiled for a mesh of one order of devices is loaded for another in milliseconds, without being traced or compiled again.
JAX promises less: it keeps compiled programs (``jax.experimental.serialize_executable``), but loads them for the devices that they were
compiled for. What is private of JAX here was tried with 0.10.2. Where it fails, programs are compiled as if there were no library.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from dsjax.engine.contract.executor import ExecutorLimits, Progress
from sharding import jax_internals
from sharding.cores import most_threads

_LEAST_SHARE_OF_PAGES = 0.95
"""A cache smaller than it could be by more than this costs more than compiling programs for the larger one."""

ProgramKey = tuple[Hashable, ...]
"""A program's kind, and what distinguishes it from others of its kind."""

_log = logging.getLogger(__name__)


class CompiledPrograms:
    """Compiles each program once, or takes it from a shelf of the library.

    Args:
        lower: traces the program of a key. meet: waits for the other processes of the mesh. options: of the compiler, for a key.

    Attributes:
        compiled: the programs that exist, by key. shelf: where they are kept beyond this executor; None: nowhere.
    """

    def __init__(
        self,
        lower: Callable[[ProgramKey], Lowered],
        meet: Callable[[], object],
        shelf: Shelf | None,
        options: Callable[[ProgramKey], Mapping[str, Any] | None] = lambda key: None,
    ):
        self._lower, self._meet, self.shelf, self._options = lower, meet, shelf, options
        self.compiled: dict[ProgramKey, Compiled] = {}

    def get(self, key: ProgramKey, lower: Callable[[], Lowered]) -> Compiled:
        """A program, which ``lower`` traces where it is neither compiled nor kept."""
        if key not in self.compiled:
            self.compile(key, lower)
            self._meet()  # also where it was found: another process may have compiled it
        return self.compiled[key]

    def compile(self, key: ProgramKey, lower: Callable[[], Lowered]) -> None:
        """Have a program, from the shelf or by compiling it."""
        if not self._find(key):
            self._compile(key, lower())

    def compile_all(
        self, labels: Mapping[ProgramKey, str], report: Progress, after: Callable[[ProgramKey], None]
    ) -> None:
        """Compile programs on all cores at once; ``after`` is called with each in turn when all are there."""
        pool = ThreadPoolExecutor(most_threads(), thread_name_prefix="compile")
        try:
            list(pool.map(self._find, labels))
            missing = [key for key in labels if key not in self.compiled]
            num_there = len(labels) - len(missing)
            if not missing:
                report(num_there, num_there, "all")
            pending: dict[Future[None], str] = {}
            for key in missing:
                report(num_there, len(labels), labels[key])
                pending[pool.submit(self._compile, key, self._lower(key))] = labels[key]
            for done, future in enumerate(as_completed(pending), num_there + 1):
                future.result()
                report(done, len(labels), pending[future])
            for key in labels:
                after(key)
        finally:
            # An end before all is compiled must not wait for what is queued.
            pool.shutdown(cancel_futures=True)

    def compile_ahead(
        self, labels: Mapping[ProgramKey, str], go_on: Callable[[int, str], bool], after: Callable[[ProgramKey], None]
    ) -> bool:
        """Compile programs one after the other in this thread, and keep them on the shelf alone; whether all of them are there."""
        for done, (key, label) in enumerate(labels.items()):
            if not go_on(done, label):
                return False
            if key not in self.shelf:
                self._compile(key, self._lower(key))
                after(key)
            self.compiled.clear()  # a program that is loaded takes memory of the devices
        return go_on(len(labels), "all")

    def _find(self, key: ProgramKey) -> bool:
        """Take a program from the shelf; whether it is there."""
        if key not in self.compiled and self.shelf is not None:
            kept = self.shelf.find(key)
            if kept is not None:
                self.compiled[key] = kept
        return key in self.compiled

    def _compile(self, key: ProgramKey, lowered: Lowered) -> None:
        if self.shelf is None:
            self.compiled[key] = lowered.compile(compiler_options=self._options(key))
        else:
            self.compiled[key] = self.shelf.compile(key, lowered, self._options(key))


class _ReadLast(threading.local):
    """Keeps for each thread the compiled program that JAX's cache gave last, as bytes."""

    data: bytes | None = None


_read_last = _ReadLast()


def _listen_to_jax_cache() -> None:
    """Have what JAX's cache gives noted in `_read_last`."""
    compilation_cache = jax_internals.compilation_cache()
    extract = compilation_cache.extract_executable_and_time
    if getattr(extract, "notes", False):
        return

    def extract_and_note(entry: bytes) -> tuple[bytes, int]:
        extracted = extract(entry)
        _read_last.data = extracted[0]
        return extracted

    extract_and_note.notes = True
    compilation_cache.extract_executable_and_time = extract_and_note


class _Kept(NamedTuple):
    """A compiled program as bytes, the structure of what it takes and gives, and the ids of the devices it was compiled for."""

    data: bytes
    in_tree: Any
    out_tree: Any
    device_ids: tuple[int, ...]


class ProgramLibrary:
    """Belongs to a process. Any thread may use it.

    Attributes:
        beside_the_cache: of a mesh, bytes of a device that a step needs beside weights and cache.
        pages: of a mesh, how many each DP rank's cache has in programs that were compiled ahead; the cache must then have as many.
    """

    def __init__(self):
        self.beside_the_cache: dict[str, int] = {}
        self.pages: dict[str, int] = {}
        self._kept: dict[Hashable, dict[Hashable, _Kept]] = {}
        self._lock = threading.Lock()
        self._works = True
        try:
            _listen_to_jax_cache()
        except (ImportError, AttributeError) as error:
            self.give_up(error)

    def shelf(self, about: Hashable, mesh: Mesh) -> Shelf:
        """The programs for a mesh.

        about: everything that they depend on and that their keys do not tell, but for which devices are in the mesh and in which order.
        """
        with self._lock:
            return Shelf(self, self._kept.setdefault(about, {}), mesh)

    def settled(self, mesh: str, limits: ExecutorLimits) -> ExecutorLimits:
        """Limits as found when a mesh is made, but with the pages that its programs were compiled for, if these are about as many."""
        pages = self.pages.get(mesh, limits.pages_per_rank)
        fits = _LEAST_SHARE_OF_PAGES * limits.pages_per_rank <= pages <= limits.pages_per_rank
        return dataclasses.replace(limits, pages_per_rank=pages) if fits else limits

    @property
    def num_bytes(self) -> int:
        """Bytes of all programs together."""
        with self._lock:
            return sum(len(kept.data) for shelf in self._kept.values() for kept in shelf.values())

    def give_up(self, error: Exception) -> None:
        """This version of JAX cannot do it: keep nothing from now on."""
        if self._works:
            _log.warning("Compiled programs cannot be kept for other devices (%s); each mesh compiles its own.", error)
        self._works = False

    @property
    def works(self) -> bool:
        """Whether programs can be kept."""
        return self._works


class Shelf:
    """The programs of one kind of mesh, for the devices of one mesh."""

    def __init__(self, library: ProgramLibrary, kept: dict[Hashable, _Kept], mesh: Mesh):
        self._library, self._kept, self._devices = library, kept, list(mesh.devices.flat)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def compile(self, key: Hashable, lowered: Lowered, options: Mapping[str, Any] | None = None) -> Compiled:
        """Compile a program for the devices of this mesh, and keep it. options: of the compiler."""
        _read_last.data = None
        compiled = lowered.compile(compiler_options=options)
        if key not in self._kept and self._library.works:
            try:
                self._kept[key] = _keep(compiled, _read_last.data, self._devices)
            except Exception as error:  # whatever JAX has changed
                self._library.give_up(error)
        return compiled

    def find(self, key: Hashable) -> Compiled | None:
        """A program, loaded for the devices of this mesh; None where it was never kept."""
        kept = self._kept.get(key)
        if kept is None or not self._library.works:
            return None
        if self._devices[0].platform == "tpu" and kept.device_ids != tuple(device.id for device in self._devices):
            return None  # a TPU's program contains its way through the torus
        try:
            return _load(kept, self._devices)
        except Exception as error:  # whatever JAX has changed
            self._library.give_up(error)
            return None


def _keep(compiled: Compiled, data: bytes | None, devices: list[jax.Device]) -> _Kept:
    """data: what JAX's cache had of it, if it was there."""
    described, in_tree = jax.tree.flatten(compiled.args_info)
    file = io.BytesIO()
    _Writer(file, data).dump((compiled._executable._unloaded_executable, described, compiled._no_kwargs))
    return _Kept(file.getvalue(), in_tree, compiled.out_tree, tuple(device.id for device in devices))


class _Writer(serialize_executable._JaxPjrtPickler):
    """Writes as JAX does, but a program that came out of JAX's cache as it lay there: of one that was read, XLA's CPU backend
    writes something that cannot run.
    """

    def __init__(self, file: io.BytesIO, data: bytes | None):
        super().__init__(file)
        self._data = data

    def persistent_id(self, obj: Any) -> tuple | None:
        persistent = super().persistent_id(obj)
        return (
            ("exec", self._data)
            if persistent is not None and persistent[0] == "exec" and self._data is not None
            else persistent
        )


def _load(kept: _Kept, devices: list[jax.Device]) -> Compiled:
    reader = _Reader(io.BytesIO(kept.data), kept.device_ids, devices)
    executable, args_info, no_kwargs = reader.load()
    return Compiled(executable.load(), [], kept.in_tree.unflatten(args_info), kept.out_tree, no_kwargs=no_kwargs)


class _Reader(serialize_executable._JaxPjrtUnpickler):
    """Reads what ``_Writer`` wrote, in this process and a moment ago, with other devices in the places of those that were written."""

    def __init__(self, file: io.BytesIO, written_ids: tuple[int, ...], devices: list[jax.Device]):
        super().__init__(file, devices[0].client, devices)
        self.devices_by_id = dict(zip(written_ids, devices, strict=True))

    def persistent_load(self, pid: tuple) -> Any:
        if pid[0] == "exec":
            return self.backend.deserialize_executable(pid[1], self.execution_devices, self._options())
        return super().persistent_load(pid)

    def _options(self):
        """Those with which JAX would compile for these devices; of them only the devices matter once a program is compiled."""
        return jax_internals.compile_options([device.id for device in self.devices_by_id.values()], self.backend)
