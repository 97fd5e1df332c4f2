"""Serialize compiled programs, and load them for other devices in the same mesh positions, in this or another process.

A program refers to its devices by their position in the mesh; the actual devices are given when it is loaded. A program compiled for one
order of devices therefore loads for another in milliseconds, without tracing or compiling again. JAX promises less:
``jax.experimental.serialize_executable`` loads a program only for the devices that it was compiled for. The private JAX APIs used here
were tested with 0.10.2 and 0.11.1.
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
"""Per thread, `data` holds the serialized program that JAX's compilation cache returned last."""


def listen_to_jax_cache() -> None:
    """Patch JAX's compilation cache to record each program it returns in `_read_last`."""
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
    """Compile a program. Also return its bytes from JAX's cache; None without a hit. options: compiler options."""
    _read_last.data = None
    compiled = lowered.compile(compiler_options=options)
    return compiled, _read_last.data


class KeptProgram(NamedTuple):
    """A serialized program, the tree structures of its inputs and outputs, and the ids of the devices it was compiled for."""

    data: bytes
    in_tree: Any
    out_tree: Any
    device_ids: tuple[int, ...]


def keep(compiled: Compiled, data: bytes | None, devices: list[jax.Device]) -> KeptProgram:
    """Serialize a program compiled for these devices. data: its bytes from JAX's cache; None without a hit."""
    described, in_tree = jax.tree.flatten(compiled.args_info)
    file = io.BytesIO()
    _Writer(file, data).dump((compiled._executable._unloaded_executable, described, compiled._no_kwargs))
    return KeptProgram(file.getvalue(), in_tree, compiled.out_tree, tuple(device.id for device in devices))


class _Writer(serialize_executable._JaxPjrtPickler):
    """Pickles like JAX, but writes a program from JAX's cache with its cached bytes: XLA's CPU backend serializes such a program
    to something that cannot run.
    """

    def __init__(self, file: io.BytesIO, data: bytes | None):
        super().__init__(file)
        self._data = data

    def persistent_id(self, obj: Any) -> tuple | None:
        persistent = super().persistent_id(obj)
        is_program = persistent is not None and persistent[0] == "exec"
        return ("exec", self._data) if is_program and self._data is not None else persistent


def load(program: KeptProgram, devices: list[jax.Device]) -> Compiled:
    """Load a program for these devices, in the positions of the devices that it was compiled for."""
    reader = _Reader(io.BytesIO(program.data), program.device_ids, devices)
    executable, args_info, no_kwargs = reader.load()
    return Compiled(executable.load(), [], program.in_tree.unflatten(args_info), program.out_tree, no_kwargs=no_kwargs)


class _Reader(serialize_executable._JaxPjrtUnpickler):
    """Reads the output of ``_Writer``, and replaces the devices by others in the same positions."""

    def __init__(self, file: io.BytesIO, written_ids: tuple[int, ...], devices: list[jax.Device]):
        super().__init__(file, devices[0].client, devices)
        self.devices_by_id = dict(zip(written_ids, devices, strict=True))

    def persistent_load(self, pid: tuple) -> Any:
        if pid[0] == "exec":
            return self.backend.deserialize_executable(pid[1], self.execution_devices, self._options())
        return super().persistent_load(pid)

    def _options(self):
        """Return JAX's compile options for these devices; only the devices matter for a compiled program."""
        return jax_internals.compile_options([device.id for device in self.devices_by_id.values()], self.backend)
