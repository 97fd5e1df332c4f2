"""Digest of everything that a compiled program depends on. Programs with equal digests are the same program.

Values are described recursively, and only if their type is fully supported. Any other value, such as a closure, has no description, and
a program that depends on it is not stored. A new field of the model's step therefore enters the digest automatically, and an unsupported
field costs time but never gives a wrong result.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import types
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import sharding
from dsjax.kernels.build import machine
from sharding.cores import most_threads

_ABOVE = frozenset({"serve", "dynamo", "bench", "top", "cli", "llm.py", "plan", "dryrun"})
"""Packages and files of ``dsjax`` that the engine never imports (``tests/test_house.py``), so no program depends on them."""

_DSJAX = Path(__file__).parents[2]
"""The package folder. Importing ``dsjax`` to find it would be a circular import."""
_PACKAGES = ("jax", "jaxlib", "flax", "einops", "numpy", "ml_dtypes")
_DESCRIBED = {"dsjax", "sharding", *_PACKAGES}
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_NO_MATTER = re.compile("cache|address|^jax_log|^jax_explain")
"""Matches the names of JAX settings that no program depends on."""


class NotDescribed(TypeError):
    """A value has a type whose equality cannot be described."""


def digest(*values: Any) -> str:
    """Return 64 hexadecimal digits that are equal for equal values, across processes.

    Dataclass fields with `compare=False` are left out. A mesh contributes its axes and shape, the kind of each device, and which devices
    share a process, but not the ids of devices and processes.

    Raises:
        NotDescribed: part of a value has no description.
    """
    pieces = hashlib.sha256()
    for value in values:
        for piece in _describe(value):
            pieces.update(b"%d:" % len(piece) + piece)
    return pieces.hexdigest()


def _describe(value: Any) -> Iterator[bytes]:
    """Yield the type of a value, then its pieces; the number of nested pieces always precedes them."""
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    _check_source(kind)
    if value is None or (isinstance(value, bool | int | float | complex | str) and not isinstance(value, enum.Enum)):
        yield repr(value).encode()
    elif isinstance(value, bytes):
        yield value
    elif isinstance(value, enum.Enum):
        yield value.name.encode()
    elif isinstance(value, os.PathLike):
        yield os.fsencode(value)
    elif isinstance(value, np.dtype):
        yield str(value).encode()
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        yield repr((value.dtype, value.shape)).encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        yield _name(value)
    elif isinstance(value, jax.tree_util.PyTreeDef):
        text = repr(value)
        if " at 0x" in text:
            raise NotDescribed(f"{text:.80} shows an address")
        yield text.encode()
    elif isinstance(value, Mesh):
        processes = list(dict.fromkeys(device.process_index for device in value.devices.flat))
        devices = [(d.platform, d.device_kind, processes.index(d.process_index)) for d in value.devices.flat]
        yield repr((value.axis_names, value.axis_types, value.devices.shape, devices)).encode()
    else:
        pieces = list(_pieces(value))
        yield b"%d" % len(pieces)
        for piece in pieces:
            yield from _describe(piece)


def _pieces(value: Any) -> Iterator[Any]:
    """Yield the parts of a composite value."""
    if isinstance(value, tuple | list | PartitionSpec):
        yield from value
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from item
    elif isinstance(value, Set):
        yield from sorted(digest(element) for element in value)
    elif isinstance(value, NamedSharding):
        yield from (value.mesh, value.spec, value.memory_kind)
    elif isinstance(value, jax.ShapeDtypeStruct):
        yield from (value.shape, np.dtype(value.dtype), value.weak_type, value.sharding)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.compare:
                yield field.name
                yield getattr(value, field.name)
    else:
        raise NotDescribed(f"{value!r:.80} is a {type(value).__module__}.{type(value).__qualname__}")


def _name(value: Any) -> bytes:
    """Return the qualified name of a module-level class or function whose source is in the digest."""
    name = f"{value.__module__}.{value.__qualname__}"
    # A nested function may capture variables, even under the name of a function it wraps; a bound method has an object.
    owner = getattr(value, "__self__", None)
    if "<" in name or getattr(value, "__closure__", None) or not (owner is None or isinstance(owner, types.ModuleType)):
        raise NotDescribed(f"{name} is not at the top of its module")
    _check_source(value)
    return name.encode()


def _check_source(defined: Any) -> None:
    """Raise `NotDescribed` for a class or function whose source is not in the digest, such as a caller's own."""
    root = (defined.__module__ or "builtins").partition(".")[0]
    if root not in _DESCRIBED and root not in sys.stdlib_module_names:
        raise NotDescribed(
            f"{defined.__module__}.{defined.__qualname__} is defined in a module whose source is not in the digest"
        )


def of_process(client: Any) -> str:
    """Return the digest common to all programs of this process: source code, JAX and its settings, the compiler, the processor.

    client: JAX client of the target platform. Raises `NotDescribed` if the sources cannot be read.
    """
    if SOURCES.digest is None:
        raise NotDescribed("the sources of dsjax cannot be read")
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    settings = {name: repr(value) for name, value in sorted(jax.config.values.items()) if not _NO_MATTER.search(name)}
    variables = {name: _with_file(os.environ.get(name, "")) for name in _VARIABLES}
    return digest(
        *(SOURCES.digest, versions, sys.version_info[:3], settings, variables),
        *(platform.python_implementation(), client.platform, client.platform_version),
        *(machine(), most_threads()) if client.platform == "cpu" else (),
    )


def _with_file(flags: str) -> tuple[str, bytes]:
    """Return the flags and the content of their file: XLA reads flags from a file if the first word has no leading dash."""
    words = flags.split()
    if not words or words[0].startswith("-"):
        return flags, b""
    return flags, Path(words[0]).read_bytes()


@dataclasses.dataclass(frozen=True)
class _Sources:
    """The Python files of this project that the engine can import, as they were when this process imported them."""

    digest: str | None  # of all files; None if a package has no readable files
    states: Mapping[Path, tuple[int, int]]  # modification time (ns) and size (bytes) by path

    @classmethod
    def now(cls) -> _Sources:
        states: dict[Path, tuple[int, int]] = {}
        contents: dict[str, bytes] = {}
        try:
            for package, root in (("dsjax", _DSJAX), ("sharding", Path(sharding.__file__).parent)):
                paths = [path for path in sorted(root.rglob("*.py")) if _is_reached(package, path.relative_to(root))]
                if not paths:
                    return cls(None, {})
                for path in paths:
                    status = path.stat()
                    states[path] = status.st_mtime_ns, status.st_size
                    contents[f"{package}/{path.relative_to(root).as_posix()}"] = path.read_bytes()
        except (OSError, TypeError):  # an archive, or a file that cannot be read
            return cls(None, {})
        return cls(digest(contents), states)

    @property
    def are_those_that_run(self) -> bool:
        """Whether the files are unchanged since they were imported; otherwise the digest would not match the traced code."""
        try:
            return all((path.stat().st_mtime_ns, path.stat().st_size) == state for path, state in self.states.items())
        except OSError:
            return False


def _is_reached(package: str, inside: Path) -> bool:
    """Whether the engine may import a file. Hidden files such as an editor's lock (``.#step.py``) do not count."""
    return not inside.name.startswith(".") and (package == "sharding" or inside.parts[0] not in _ABOVE)


SOURCES = _Sources.now()
