"""``ProgramLibrary``: compiled programs for the past and possible future meshes of an engine, on disk or else in memory.

If the JAX version lacks what the library needs, programs are compiled without it.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.program_cache import identity, serialized_program
from dsjax.engine.program_cache.folder import CompileLock, ProgramFolder
from dsjax.engine.program_cache.serialized_program import KeptProgram
from sharding import jax_internals

_LEAST_SHARE_OF_PAGES = 0.95
"""Minimum share of the possible pages for which reusing programs is worth more than the larger cache."""

_log = logging.getLogger(__name__)


class ProgramLibrary:
    """The compiled programs of one process. Thread-safe.

    Attributes:
        folder: stores programs for other processes and later starts; None: no such folder.
        in_memory: programs not in the folder, by name.
        beside_the_cache: bytes per device that a step needs in addition to weights and cache, by mesh and stage.
        pages: pages per DP rank that programs compiled ahead assume, by mesh; the cache must have the same number.
        works: whether programs can be stored.
    """

    def __init__(self, folder: ProgramFolder | None = None):
        self.folder = folder
        self.in_memory: dict[str, KeptProgram] = {}
        self.beside_the_cache: dict[Hashable, int] = {}
        self.pages: dict[str, int] = {}
        self.works = True
        try:
            serialized_program.listen_to_jax_cache()
        except (ImportError, AttributeError) as error:
            self.give_up(error)

    def keep_in(self, cache: Path | None) -> None:
        """Also store programs on disk, inside JAX's cache folder (None: nowhere). No-op if a folder is already set."""
        if self.folder is None:
            self.folder = ProgramFolder.inside(cache)

    def settled(self, mesh: str, limits: ExecutorLimits) -> ExecutorLimits:
        """Return the limits of a new mesh, with the page count that its programs were compiled for if it is only slightly smaller."""
        pages = self.pages.get(mesh, limits.pages_per_rank)
        fits = _LEAST_SHARE_OF_PAGES * limits.pages_per_rank <= pages <= limits.pages_per_rank
        return dataclasses.replace(limits, pages_per_rank=pages) if fits else limits

    def give_up(self, error: Exception) -> None:
        """Stop storing programs, since this version of JAX does not support it."""
        if self.works:
            _log.warning("Compiled programs cannot be kept for other devices (%s); each mesh compiles its own.", error)
        self.works = False


class Shelf:
    """Program store for the devices of one mesh: in the library's folder, or in memory if the folder cannot be used.

    library: None: nothing is stored. depends_on: everything that programs depend on besides their keys. options: returns the compiler
    options of a key.
    """

    def __init__(
        self,
        library: ProgramLibrary | None,
        mesh: Mesh,
        depends_on: tuple[Any, ...],
        options: Callable[[Hashable], Mapping[str, Any] | None] = lambda key: None,
    ):
        self._library = library
        self._options = options
        self._devices = list(mesh.devices.flat)
        client = self._devices[0].client
        # Accelerator compilers communicate across processes, and would wait for a process that loads its program from disk.
        on_disk = client.platform == "cpu" or not mesh.is_multi_process
        self._folder = library.folder if library is not None and on_disk else None
        self._about: str | None = None
        if library is None or (self._folder is None and jax.device_count() == 1):  # one device never has another mesh
            return
        try:
            is_chip = client.platform != "cpu" and on_disk
            chips = jax_internals.topology_fingerprint(mesh.devices.flat) if is_chip else None
            self._about = identity.digest(identity.of_process(client), chips, mesh, depends_on)
        except Exception as error:  # start without the store
            _log.info("Compiled programs of this engine are not kept whole: %s: %s", type(error).__name__, error)

    def name(self, key: Hashable) -> str | None:
        """Return the name of a program; None if it cannot be stored."""
        if self._about is None or not self._library.works:
            return None
        try:
            return identity.digest(self._about, key, self._options(key))
        except identity.NotDescribed:
            return None

    def has(self, key: Hashable) -> bool:
        """Whether a program is stored."""
        return self._take(key) is not None

    def compile_lock(self, key: Hashable) -> CompileLock | None:
        """Return the compile lock of a program among all processes with this folder; None if another holds it."""
        name = self.name(key)
        return CompileLock() if name is None or self._folder is None else self._folder.compile_lock(name)

    def compile(self, key: Hashable, lowered: Lowered) -> Compiled:
        """Compile a program for the devices of this mesh, and store it."""
        name = self.name(key)
        compiled, read = serialized_program.compile_and_note(lowered, self._options(key))
        if name is not None:
            try:
                kept = serialized_program.keep(compiled, read, self._devices)
                if not self._write(name, kept):
                    self._library.in_memory[name] = kept
            except Exception as error:  # any change in JAX
                self._library.give_up(error)
        return compiled

    def find(self, key: Hashable) -> Compiled | None:
        """Return a program loaded for the devices of this mesh; None if it is not stored."""
        kept = self._take(key)
        if kept is None:
            return None
        if self._devices[0].platform == "tpu" and kept.device_ids != tuple(device.id for device in self._devices):
            return None  # a TPU program contains its routes through the torus
        try:
            return serialized_program.load(kept, self._devices)
        except Exception as error:  # any change in JAX
            self._library.give_up(error)
            return None

    def _take(self, key: Hashable) -> KeptProgram | None:
        """Return a program in its stored form; None if it is not stored."""
        name = self.name(key)
        if name is None:
            return None
        try:
            data = None if self._folder is None else self._folder.read(name)
            return self._library.in_memory.get(name) if data is None else KeptProgram(*pickle.loads(data))
        except Exception as error:  # any change in JAX, or in a class named in the file
            self._library.give_up(error)
            return None

    def _write(self, name: str, kept: KeptProgram) -> bool:
        """Write a program to the folder, and return whether it is stored."""
        if self._folder is None or not identity.SOURCES.are_those_that_run:
            return False
        return self._folder.write(name, pickle.dumps(tuple(kept)))
