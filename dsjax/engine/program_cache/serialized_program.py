"""A compiled program as bytes, and loaded again: for other devices in the same places, in this process or in another one.

A program names its devices by their place in the mesh. Which devices those are is said apart from it, when it is loaded: a program
that was compiled for a mesh of one order of devices is loaded for another in milliseconds, without being traced or compiled again.
JAX promises less: it keeps compiled programs (``jax.experimental.serialize_executable``), but loads them for the devices that they were
compiled for. What is private of JAX here was tried with 0.10.2 and 0.11.1.
"""

from __future__ import annotations

import io
import threading
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

from sharding import jax_internals

_read_last = threading.local()
"""Keeps for each thread, as `data`, the compiled program that JAX's cache gave last, as bytes."""


def listen_to_jax_cache() -> None:
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


def compile_and_note(lowered: Lowered, options: Any) -> tuple[Compiled, bytes | None]:
    """Compile a program, and give with it what JAX's cache had of it, if it was there. options: of the compiler."""
    _read_last.data = None
    compiled = lowered.compile(compiler_options=options)
    return compiled, _read_last.data


class KeptProgram(NamedTuple):
    """A compiled program as bytes, the structure of what it takes and gives, and the ids of the devices it was compiled for."""

    data: bytes
    in_tree: Any
    out_tree: Any
    device_ids: tuple[int, ...]


def keep(compiled: Compiled, data: bytes | None, devices: list[jax.Device]) -> KeptProgram:
    """Write a program that was compiled for these devices. data: what JAX's cache had of it, if it was there."""
    described, in_tree = jax.tree.flatten(compiled.args_info)
    file = io.BytesIO()
    _Writer(file, data).dump((compiled._executable._unloaded_executable, described, compiled._no_kwargs))
    return KeptProgram(file.getvalue(), in_tree, compiled.out_tree, tuple(device.id for device in devices))


class _Writer(serialize_executable._JaxPjrtPickler):
    """Writes as JAX does, but a program that came out of JAX's cache as it lay there: of one that was read, XLA's CPU backend
    writes something that cannot run.
    """

    def __init__(self, file: io.BytesIO, data: bytes | None):
        super().__init__(file)
        self._data = data

    def persistent_id(self, obj: Any) -> tuple | None:
        persistent = super().persistent_id(obj)
        is_program = persistent is not None and persistent[0] == "exec"
        return ("exec", self._data) if is_program and self._data is not None else persistent


def load(kept: KeptProgram, devices: list[jax.Device]) -> Compiled:
    """Load a program for these devices, in the places of those that it was compiled for."""
    reader = _Reader(io.BytesIO(kept.data), kept.device_ids, devices)
    executable, args_info, no_kwargs = reader.load()
    return Compiled(executable.load(), [], kept.in_tree.unflatten(args_info), kept.out_tree, no_kwargs=no_kwargs)


class _Reader(serialize_executable._JaxPjrtUnpickler):
    """Reads what ``_Writer`` wrote, with other devices in the places of those that were written."""

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
