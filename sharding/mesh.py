"""``MeshSpec``: what ``--mesh dp=4,tp=8,ep=32`` means, whether a model fits it, and the mesh it builds."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharding.emulation import most_devices
from sharding.errors import MeshError

if TYPE_CHECKING:
    import jax

AXES = ("dp", "ep", "tp")


@dataclass(frozen=True)
class MeshSpec:
    """The user's three numbers, and the physical mesh that follows from them.

    ``dp_size`` attention replicas of ``tp_size`` devices each; ``ep_size`` devices together hold one copy of all
    routed experts. The physical mesh always has the axes ``("dp", "ep", "tp")``: ``tp`` as given, ``ep`` the DP ranks
    that share one copy of the experts, ``dp`` the number of copies. All axis tuples that arrays are sharded
    over are properties here, so that no other file spells them out.
    """

    dp_size: int = 1
    tp_size: int = 1
    ep_size: int = 0  # 0: all devices

    def __post_init__(self):
        if self.ep_size == 0:
            object.__setattr__(self, "ep_size", self.dp_size * self.tp_size)
        for name, value in (("dp", self.dp_size), ("tp", self.tp_size), ("ep", self.ep_size)):
            if value < 1:
                raise MeshError(f"mesh axis {name}={value}: expected a size of at least 1")
        if self.num_devices % self.ep_size:
            raise MeshError(
                f"ep={self.ep_size} does not divide dp × tp = {self.dp_size} × {self.tp_size} = {self.num_devices}; "
                f"choose ep from {_divisors(self.num_devices)}"
            )
        if self.ep_size % self.tp_size and self.dp_size % self.ep_size:
            fits = [e for e in _divisors(self.num_devices) if e % self.tp_size == 0 or self.dp_size % e == 0]
            raise MeshError(
                f"ep={self.ep_size} is neither a multiple of tp={self.tp_size} (experts over the tp ranks too) nor a "
                f"divisor of dp={self.dp_size} (each expert's width over tp); choose ep from {fits}"
            )

    @classmethod
    def parse(cls, text: str | MeshSpec) -> MeshSpec:
        """Read ``"dp=4,tp=8"``; an axis left out takes its default (dp 1, tp 1, ep dp × tp)."""
        if isinstance(text, MeshSpec):
            return text
        sizes: dict[str, int] = {}
        for part in text.replace(" ", "").split(","):
            match = re.fullmatch(r"([a-z]+)=(\d+)", part)
            if not match or match.group(1) not in AXES:
                raise MeshError(
                    f"mesh {text!r}: found {part!r}, expected axis=size with axis one of dp, tp, ep (for example dp=4,tp=8)"
                )
            name, size = match.group(1), int(match.group(2))
            if name in sizes:
                raise MeshError(f"mesh {text!r}: axis {name} is given twice; give each axis once")
            if size < 1:
                raise MeshError(f"mesh {text!r}: {name}={size}, expected a size of at least 1")
            sizes[name] = size
        return cls(dp_size=sizes.get("dp", 1), tp_size=sizes.get("tp", 1), ep_size=sizes.get("ep", 0))

    def __str__(self) -> str:
        parts = [f"dp={self.dp_size}"] if self.dp_size > 1 or self.tp_size == 1 else []
        parts += [f"tp={self.tp_size}"] if self.tp_size > 1 else []
        parts += [f"ep={self.ep_size}"] if self.ep_size != self.num_devices else []
        return ",".join(parts)

    @property
    def num_devices(self) -> int:
        """dp × tp."""
        return self.dp_size * self.tp_size

    @property
    def splits_expert_width(self) -> bool:
        """Whether each expert's width, rather than the set of experts, is spread over ``tp``."""
        return self.ep_size % self.tp_size != 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of the physical axes ``("dp", "ep", "tp")``."""
        ep_ranks = self.ep_size if self.splits_expert_width else self.ep_size // self.tp_size
        return (self.dp_size // ep_ranks, ep_ranks, self.tp_size)

    @property
    def expert_copies(self) -> int:
        """How many complete sets of the routed experts exist."""
        return self.shape[0]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes over which requests, and with them the cache's pages, are spread."""
        return ("dp", "ep")

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes over which the tokens of a step are spread for dispatch: a DP rank's tokens are split over its tp ranks."""
        return ("dp", "ep", "tp")

    @property
    def head_axes(self) -> tuple[str, ...]:
        """Axes over which attention heads are spread."""
        return ("tp",)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes over which physical experts are spread."""
        return ("ep",) if self.splits_expert_width else ("ep", "tp")

    @property
    def expert_width_axes(self) -> tuple[str, ...]:
        """Axes over which each expert's width is spread."""
        return ("tp",) if self.splits_expert_width else ()

    @property
    def expert_width_shards(self) -> int:
        """Into how many pieces each expert's width is cut."""
        return self.tp_size if self.splits_expert_width else 1

    def check_fits(
        self,
        *,
        heads: int,
        experts: int = 0,
        redundant: int = 0,
        expert_width: int = 0,
        dense_widths: dict[str, int] | None = None,
        block: int | None = None,
        expert_block: int | None = None,
    ) -> None:
        """Raise ``MeshError`` naming every number that does not fit this mesh, and what would.

        heads: attention heads; experts, redundant: logical and redundant experts (0 for a dense model); expert_width:
        one expert's width; dense_widths: name → width of MLPs split over ``tp``; block: width of a quantisation
        block (128 for DeepSeek's FP8) that no split may cut; expert_block: that of the experts, where it is another one.
        """
        problems = []
        if heads % self.tp_size:
            problems.append(
                f"{heads} attention heads are not divisible by tp={self.tp_size}; tp may be {_divisors(heads)}"
            )
        physical = experts + redundant
        if experts and physical % self.ep_size:
            least = -experts % self.ep_size
            problems.append(
                f"{physical} physical experts ({experts} + {redundant} redundant) are not divisible by ep={self.ep_size}; "
                f"the least number of redundant experts that fits is {least}"
            )
        widths = dict(dense_widths or {})
        split_widths = {name: (width, self.tp_size) for name, width in widths.items()}
        if experts:
            split_widths["expert width"] = (expert_width, self.expert_width_shards)
        for name, (width, shards) in split_widths.items():
            other = expert_block is not None and name == "expert width"
            size, bits = (expert_block, 4) if other else (block, 8)
            if width % shards:
                problems.append(f"{name} {width} is not divisible by tp={shards}; tp may be {_divisors(width)}")
            elif size and shards > 1 and (width // shards) % size:
                whole = _divisors(width // size) if width % size == 0 else [1]
                problems.append(
                    f"{name} {width} over tp={shards} is {width // shards} a device, which cuts a quantisation block of "
                    f"{size}; tp may be {whole}, or use weights that are not FP{bits}"
                )
        if problems:
            raise MeshError(f"mesh {self} does not fit the model: " + "; ".join(problems))

    def build(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
        """Make the mesh from ``devices`` (default: all of the process group's), ordered by host.

        ``tp`` neighbours are neighbours on a host first, then ``ep`` neighbours: the last axis moves fastest
        over devices sorted by process and id (ids alone are not contiguous over processes).

        Raises:
            MeshError: fewer devices exist than the mesh wants, or JAX does not start.
        """
        if devices is None:
            devices = _all_devices()
        ordered = sorted(devices, key=device_order)
        if len(ordered) < self.num_devices:
            platform = ordered[0].platform if ordered else "no"
            advice = (
                f"use a mesh of at most {len(ordered)} devices, or set JAX_PLATFORMS=cpu to emulate them on the host"
            )
            if platform == "cpu":
                advice = advice_on_emulation(self.num_devices)
            raise MeshError(
                f"mesh {self} wants {self.num_devices} devices, found {len(ordered)} of platform {platform!r}; {advice}"
            )
        return self.arrange(ordered[: self.num_devices])

    def arrange(self, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
        """Make the mesh from just these devices, row by row in this order."""
        import numpy as np
        from jax.sharding import AxisType, Mesh

        grid = np.array(devices, dtype=object).reshape(self.shape)
        return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def device_order(device: jax.Device) -> tuple[int, int, int]:
    """Give the key by which devices are sorted before a mesh takes the first of them: process, slice and id."""
    return device.process_index, getattr(device, "slice_index", 0) or 0, device.id


def _all_devices() -> Sequence[jax.Device]:
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where the platform asked for has no device
        asked = os.environ.get("JAX_PLATFORMS")
        reason = f": {error}" if str(error) else ""
        if not asked:
            raise MeshError(f"JAX found no devices{reason}; JAX_PLATFORMS=cpu uses the host's processor") from error
        raise MeshError(
            f"JAX_PLATFORMS is {asked!r}, and JAX found no device of that platform{reason}; unset it to take what is there, "
            "set it to cpu, or install JAX with the platform's plugin (pip install 'jax[cuda13]', 'jax[tpu]') and its driver"
        ) from error


def advice_on_emulation(count: int) -> str:
    """What to do where fewer than ``count`` CPU devices were emulated."""
    most, why = most_devices()
    if count > most:
        return f"this process can emulate at most {most:,} CPU devices, because {why}; use a smaller mesh"
    return (
        f"start a fresh process so that {count} CPU devices can be emulated, or call "
        f"sharding.emulation.emulate_devices({count}) before JAX starts"
    )


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
