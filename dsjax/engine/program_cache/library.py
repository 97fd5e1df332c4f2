"""``ProgramLibrary``: compiled programs of the meshes that an engine has had, or may come to have, on disk or else in memory.

Where JAX cannot do what that takes, programs are compiled as if there were no library.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import threading
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.program_cache import identity, serialized_program
from dsjax.engine.program_cache.folder import ProgramFolder, Turn
from dsjax.engine.program_cache.serialized_program import KeptProgram
from sharding import jax_internals

_LEAST_SHARE_OF_PAGES = 0.95
"""A cache smaller than it could be by more than this costs more than compiling programs for the larger one."""

_log = logging.getLogger(__name__)


class ProgramLibrary:
    """Belongs to a process. Any thread may use it.

    Attributes:
        folder: where programs are kept for other processes and later starts; None: nowhere.
        beside_the_cache: of a mesh and a stage, bytes of a device that a step needs beside weights and cache.
        pages: of a mesh, how many each DP rank's cache has in programs that were compiled ahead; the cache must then have as many.
        works: whether programs can be kept.
    """

    def __init__(self, folder: ProgramFolder | None = None):
        self.folder = folder
        self.beside_the_cache: dict[Hashable, int] = {}
        self.pages: dict[str, int] = {}
        self._kept: dict[Hashable, dict[Hashable, KeptProgram]] = {}
        self._lock = threading.Lock()
        self.works = True
        try:
            serialized_program.listen_to_jax_cache()
        except (ImportError, AttributeError) as error:
            self.give_up(error)

    def keep_in(self, cache: Path | None) -> None:
        """Keep programs on disk too, in the folder for compiled programs. None: nowhere. What was said before stays."""
        if self.folder is None:
            self.folder = ProgramFolder.inside(cache)

    def shelf(self, about: Hashable, mesh: Mesh, depends_on: tuple[Any, ...] | None = None) -> Shelf | None:
        """The programs for a mesh; None where none are kept.

        about: what they depend on beside the engine's options and their keys, but for which devices are in the mesh and in which order.
        depends_on: all that they depend on beside their keys, for the folder; None: they are not kept on disk.
        """
        # One device alone never has another mesh.
        kept = None
        if jax.device_count() > 1:
            with self._lock:
                kept = self._kept.setdefault(about, {})
        found = None
        if self.folder is not None and depends_on is not None:
            found = _digest(mesh, depends_on)
        return None if kept is None and found is None else Shelf(self, kept, found, mesh)

    def settled(self, mesh: str, limits: ExecutorLimits) -> ExecutorLimits:
        """Limits as found when a mesh is made, but with the pages that its programs were compiled for, if these are about as many."""
        pages = self.pages.get(mesh, limits.pages_per_rank)
        fits = _LEAST_SHARE_OF_PAGES * limits.pages_per_rank <= pages <= limits.pages_per_rank
        return dataclasses.replace(limits, pages_per_rank=pages) if fits else limits

    def give_up(self, error: Exception) -> None:
        """This version of JAX cannot do it: keep nothing from now on."""
        if self.works:
            _log.warning("Compiled programs cannot be kept for other devices (%s); each mesh compiles its own.", error)
        self.works = False


def _digest(mesh: Mesh, depends_on: tuple[Any, ...]) -> str | None:
    """Digest what all programs for a mesh depend on beside their keys; None where they are not kept on disk."""
    client = mesh.devices.flat[0].client
    if client.platform != "cpu" and mesh.is_multi_process:
        # Compilers of accelerators talk to those of the other processes, which would wait for one that has found its program on disk.
        return None
    try:
        chips = None if client.platform == "cpu" else jax_internals.topology_fingerprint(mesh.devices.flat)
        return identity.digest(identity.of_process(client), chips, mesh, depends_on)
    except Exception as error:  # a start goes on without
        _log.info("Compiled programs of this engine are not kept whole: %s: %s", type(error).__name__, error)
        return None


class Shelf:
    """The programs of one kind of mesh, for the devices of one mesh: on disk, or in memory where they cannot be on disk.

    about: digest of all that programs in the library's folder depend on beside their keys; None: they are not there.
    """

    def __init__(
        self, library: ProgramLibrary, kept: dict[Hashable, KeptProgram] | None, about: str | None, mesh: Mesh
    ):
        self._library, self._kept, self._about = library, kept, about
        self._devices = list(mesh.devices.flat)

    def name(self, key: Hashable, options: Mapping[str, Any] | None) -> str | None:
        """The name of a program in the folder; None where it has none."""
        if self._about is None or not self._library.works:
            return None
        try:
            return identity.digest(self._about, key, options)
        except identity.NotDescribed:
            return None

    def has(self, key: Hashable, options: Mapping[str, Any] | None = None) -> bool:
        """Whether a program is kept."""
        return self._take(key, options) is not None

    def turn(self, key: Hashable, options: Mapping[str, Any] | None = None) -> Turn | None:
        """The turn to compile a program for all processes that have this folder; None where one of them has it."""
        name = self.name(key, options)
        return Turn() if name is None else self._library.folder.turn(name)

    def compile(self, key: Hashable, lowered: Lowered, options: Mapping[str, Any] | None = None) -> Compiled:
        """Compile a program for the devices of this mesh, and keep it. options: of the compiler."""
        compiled, read = serialized_program.compile_and_note(lowered, options)
        if (self._kept is None or key not in self._kept) and self._library.works:
            try:
                kept = serialized_program.keep(compiled, read, self._devices)
                if not self._write(key, options, kept) and self._kept is not None:
                    self._kept[key] = kept
            except Exception as error:  # whatever JAX has changed
                self._library.give_up(error)
        return compiled

    def find(self, key: Hashable, options: Mapping[str, Any] | None = None) -> Compiled | None:
        """A program, loaded for the devices of this mesh; None where it was never kept. options: with which it is compiled."""
        kept = self._take(key, options)
        if kept is None or not self._library.works:
            return None
        if self._devices[0].platform == "tpu" and kept.device_ids != tuple(device.id for device in self._devices):
            return None  # a TPU's program contains its way through the torus
        try:
            return serialized_program.load(kept, self._devices)
        except Exception as error:  # whatever JAX has changed
            self._library.give_up(error)
            return None

    def _take(self, key: Hashable, options: Mapping[str, Any] | None) -> KeptProgram | None:
        """A program as it is kept."""
        if self._kept is not None and key in self._kept:
            return self._kept[key]
        try:
            name = self.name(key, options)
            data = None if name is None else self._library.folder.read(name)
            return None if data is None else KeptProgram(*pickle.loads(data))
        except Exception as error:  # whatever JAX, or a class that the file names, has changed
            self._library.give_up(error)
            return None

    def _write(self, key: Hashable, options: Mapping[str, Any] | None, kept: KeptProgram) -> bool:
        """Write a program to the folder, and say whether it is there."""
        name = self.name(key, options)
        if name is None or not identity.SOURCES.are_those_that_run:
            return False
        return self._library.folder.write(name, pickle.dumps(tuple(kept)))
