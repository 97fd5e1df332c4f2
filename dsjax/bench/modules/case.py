"""`ModuleCase`: one row of the tables: a module at one size, the work that it is, and how to make it ready for timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsjax.bench.modules.timing import PreparedCase, Times

Sizes = Mapping[str, int | float | str]


@dataclass(frozen=True)
class ModuleWork:
    """Operations (a multiply-add is two) and bytes to and from memory of one application, each weight and value once."""

    flops: float
    weight_bytes: float
    other_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """All of them."""
        return self.weight_bytes + self.other_bytes


@dataclass(frozen=True)
class ModuleCase:
    """A module at one size.

    module: its name in the tables and in `--only`; variant: which of its ways. sizes: what the row is looked up by (tokens,
    rows, chunk, context, experts). memory: bytes that timing it needs. build: compiles it, with inputs on the device. shared: it runs on
    a mesh, by all processes of a group together; else on one device, by process 0 alone.
    """

    module: str
    variant: str
    sizes: Sizes
    work: ModuleWork
    memory: int
    build: Callable[[], PreparedCase]
    shared: bool = False

    @property
    def title(self) -> str:
        """For a progress bar."""
        sizes = ", ".join(f"{name} {value}" for name, value in self.sizes.items())
        return f"{self.module} {self.variant} {sizes}".replace("  ", " ")


@dataclass(frozen=True)
class ModuleRow:
    """A case that was timed."""

    case: ModuleCase
    times: Times
    in_device_loop: bool

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        work = self.case.work
        return {
            "module": self.case.module,
            "variant": self.case.variant,
            "sizes": dict(self.case.sizes),
            "flops": work.flops,
            "weight_bytes": work.weight_bytes,
            "other_bytes": work.other_bytes,
            "in_device_loop": self.in_device_loop,
            **self.times.to_json(),
        }
