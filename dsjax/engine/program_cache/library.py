"""``ProgramLibrary``: compiled programs of the meshes that an engine has had, or may come to have, on disk or else in memory.

Where JAX cannot do what that takes, programs are compiled as if there were no library.
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
from dsjax.engine.program_cache.folder import ProgramFolder, Turn
from dsjax.engine.program_cache.serialized_program import KeptProgram
from sharding import jax_internals

_LEAST_SHARE_OF_PAGES = 0.95
"""A cache smaller than it could be by more than this costs more than compiling programs for the larger one."""

_log = logging.getLogger(__name__)


class ProgramLibrary:
    """Belongs to a process. Any thread may use it.

    Attributes:
        folder: keeps programs for other processes and later starts; None if there is none. in_memory: programs that are not in it, by name.
        beside_the_cache: of a mesh and a stage, bytes of a device that a step needs beside weights and cache.
        pages: of a mesh, how many each DP rank's cache has in programs that were compiled ahead; the cache must then have as many.
        works: whether programs can be kept.
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
        """Keep programs on disk too, in the folder for compiled programs. None: nowhere. What was said before stays."""
        if self.folder is None:
            self.folder = ProgramFolder.inside(cache)

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


class Shelf:
    """The programs for the devices of one mesh: in the library's folder, or in memory where they cannot be there.

    library: None if nothing is kept. depends_on: all that programs depend on beside their keys. options: gives the compiler's options
    for a key.
    """

    def __init__(
        self,
        library: ProgramLibrary | None,
        mesh: Mesh,
        depends_on: tuple[Any, ...],
        options: Callable[[Hashable], Mapping[str, Any] | None] = lambda key: None,
    ):
        self._library, self._options, self._devices = library, options, list(mesh.devices.flat)
        client = self._devices[0].client
        # Compilers of accelerators talk to those of the other processes, which would wait for one that has found its program on disk.
        on_disk = client.platform == "cpu" or not mesh.is_multi_process
        self._folder = library.folder if library is not None and on_disk else None
        self._about: str | None = None
        if library is None or (self._folder is None and jax.device_count() == 1):  # one device never has another mesh
            return
        try:
            is_chip = client.platform != "cpu" and on_disk
            chips = jax_internals.topology_fingerprint(mesh.devices.flat) if is_chip else None
            self._about = identity.digest(identity.of_process(client), chips, mesh, depends_on)
        except Exception as error:  # a start goes on without
            _log.info("Compiled programs of this engine are not kept whole: %s: %s", type(error).__name__, error)

    def name(self, key: Hashable) -> str | None:
        """The name of a program; None where it is not kept."""
        if self._about is None or not self._library.works:
            return None
        try:
            return identity.digest(self._about, key, self._options(key))
        except identity.NotDescribed:
            return None

    def has(self, key: Hashable) -> bool:
        """Whether a program is kept."""
        return self._take(key) is not None

    def turn(self, key: Hashable) -> Turn | None:
        """The turn to compile a program for all processes that have this folder; None where one of them has it."""
        name = self.name(key)
        return Turn() if name is None or self._folder is None else self._folder.turn(name)

    def compile(self, key: Hashable, lowered: Lowered) -> Compiled:
        """Compile a program for the devices of this mesh, and keep it."""
        name = self.name(key)
        compiled, read = serialized_program.compile_and_note(lowered, self._options(key))
        if name is not None:
            try:
                kept = serialized_program.keep(compiled, read, self._devices)
                if not self._write(name, kept):
                    self._library.in_memory[name] = kept
            except Exception as error:  # whatever JAX has changed
                self._library.give_up(error)
        return compiled

    def find(self, key: Hashable) -> Compiled | None:
        """A program, loaded for the devices of this mesh; None where it was never kept."""
        kept = self._take(key)
        if kept is None:
            return None
        if self._devices[0].platform == "tpu" and kept.device_ids != tuple(device.id for device in self._devices):
            return None  # a TPU's program contains its way through the torus
        try:
            return serialized_program.load(kept, self._devices)
        except Exception as error:  # whatever JAX has changed
            self._library.give_up(error)
            return None

    def _take(self, key: Hashable) -> KeptProgram | None:
        """A program as it is kept."""
        name = self.name(key)
        if name is None:
            return None
        try:
            data = None if self._folder is None else self._folder.read(name)
            return self._library.in_memory.get(name) if data is None else KeptProgram(*pickle.loads(data))
        except Exception as error:  # whatever JAX, or a class that the file names, has changed
            self._library.give_up(error)
            return None

    def _write(self, name: str, kept: KeptProgram) -> bool:
        """Write a program to the folder, and say whether it is there."""
        if self._folder is None or not identity.SOURCES.are_those_that_run:
            return False
        return self._folder.write(name, pickle.dumps(tuple(kept)))
