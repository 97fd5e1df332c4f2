"""``MeshSpec``: parse ``--mesh dp=4,tp=8,ep=32``, check whether a model fits it, and build the mesh."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from sharding.emulation import most_devices
from sharding.errors import MeshError

if TYPE_CHECKING:
    import jax
    import numpy as np

USER_AXES = ("pp", "dp", "tp", "ep", "etp")
"""Axes whose sizes a user sets; the axes of the physical mesh are ``MeshSpec.axes``."""


@dataclass(frozen=True)
class MeshSpec:
    """The user's mesh sizes, and the physical mesh that they define.

    There are ``pp_size`` pipeline stages, each with consecutive layers on its own mesh; all else here describes one ``stage``. ``dp_size``
    attention replicas have ``tp_size`` devices each. ``ep_size`` groups of ``etp_size`` devices together hold one copy of all routed
    experts; each expert is split over a group (Megatron-Core's expert model and expert tensor parallel sizes). The physical mesh has the
    axes ``("dp", "ep", "tp")``: ``tp`` as given, ``ep`` the DP ranks over which whole experts are spread, ``dp`` the number of copies.
    If an expert is split over several DP ranks, an axis ``"etp"`` precedes ``tp``. No other file spells out the axes.
    """

    dp_size: int = 1
    tp_size: int = 1
    ep_size: int = 0  # 0: all devices, divided by etp_size
    etp_size: int = 0  # 0: 1, or tp_size if ep_size is not a multiple of it
    pp_size: int = 1

    def __post_init__(self):
        sizes = (("dp", self.dp_size), ("tp", self.tp_size), ("ep", self.ep_size or 1), ("etp", self.etp_size or 1))
        for name, value in (*sizes, ("pp", self.pp_size)):
            if value < 1:
                raise MeshError(f"mesh axis {name}={value}: expected a size of at least 1")
        given = self.etp_size != 0
        if self.ep_size == 0:
            object.__setattr__(self, "ep_size", max(1, self.stage_devices // (self.etp_size or 1)))
        if self.stage_devices % self.ep_size:
            raise MeshError(
                f"ep={self.ep_size} does not divide dp × tp = {self.dp_size} × {self.tp_size} = {self.stage_devices}; "
                f"choose ep from {_divisors(self.stage_devices)}"
            )
        if given:
            self._check_expert_width()
            return
        object.__setattr__(self, "etp_size", self.tp_size if self.ep_size % self.tp_size else 1)
        if self.ep_size % self.tp_size and self.dp_size % self.ep_size:
            fits = [e for e in _divisors(self.stage_devices) if e % self.tp_size == 0 or self.dp_size % e == 0]
            raise MeshError(
                f"ep={self.ep_size} is neither a multiple of tp={self.tp_size} (experts over the tp ranks too) nor a "
                f"divisor of dp={self.dp_size} (each expert's width over tp); choose ep from {fits}"
            )

    def _check_expert_width(self) -> None:
        """Check an explicit size of ``etp``."""
        ep, etp, tp = self.ep_size, self.etp_size, self.tp_size
        if self.stage_devices % (ep * etp):
            raise MeshError(
                f"ep × etp = {ep} × {etp} = {ep * etp} does not divide dp × tp = {self.dp_size} × {tp} = {self.stage_devices}; "
                f"with ep={ep} choose etp from {_divisors(self.stage_devices // ep)}"
            )
        if etp % tp and (ep % tp or self.dp_size % (ep // tp * etp)):
            raise MeshError(
                f"etp={etp} is no multiple of tp={tp} (each expert's width over the tp ranks and etp ÷ tp DP ranks), and ep={ep} is no "
                f"multiple of it (experts over the tp ranks, widths over etp DP ranks); make one of the two so"
            )

    @classmethod
    def parse(cls, text: str | MeshSpec) -> MeshSpec:
        """Read ``"dp=4,tp=8"``; omitted axes take their defaults (pp, dp and tp: 1; ep: dp × tp ÷ etp; etp: see the field)."""
        if isinstance(text, MeshSpec):
            return text
        sizes: dict[str, int] = {}
        for part in text.replace(" ", "").split(","):
            match = re.fullmatch(r"([a-z]+)=([0-9]+)", part)
            if not match or match.group(1) not in USER_AXES:
                raise MeshError(
                    f"mesh {text!r}: found {part!r}, expected axis=size with axis one of {', '.join(USER_AXES)} (for example dp=4,tp=8)"
                )
            name, size = match.group(1), int(match.group(2))
            if name in sizes:
                raise MeshError(f"mesh {text!r}: axis {name} is given twice; give each axis once")
            if size < 1:
                raise MeshError(f"mesh {text!r}: {name}={size}, expected a size of at least 1")
            sizes[name] = size
        return cls(**{f"{name}_size": size for name, size in sizes.items()})

    def __str__(self) -> str:
        parts = [f"pp={self.pp_size}"] if self.pp_size > 1 else []
        parts += [f"dp={self.dp_size}"] if self.dp_size > 1 or (self.tp_size == 1 and not parts) else []
        parts += [f"tp={self.tp_size}"] if self.tp_size > 1 else []
        parts += [f"ep={self.ep_size}"] if self.ep_size != self.stage_devices else []
        usual = self.tp_size if self.ep_size % self.tp_size else 1
        parts += [f"etp={self.etp_size}"] if self.etp_size != usual else []
        return ",".join(parts)

    @cached_property
    def num_devices(self) -> int:
        """pp × dp × tp."""
        return self.pp_size * self.stage_devices

    @cached_property
    def stage_devices(self) -> int:
        """Devices of one stage: dp × tp."""
        return self.dp_size * self.tp_size

    @cached_property
    def stage(self) -> MeshSpec:
        """The mesh of one stage: this one without ``pp``."""
        return replace(self, pp_size=1)

    @property
    def splits_expert_width(self) -> bool:
        """Whether each expert's width is spread over several devices."""
        return self.etp_size > 1

    @cached_property
    def _width_over_tp(self) -> bool:
        """Whether the ``tp`` ranks of a replica share each expert's width instead of the set of experts."""
        return self.tp_size == 1 or (self.splits_expert_width and self.etp_size % self.tp_size == 0)

    @cached_property
    def _width_ranks(self) -> int:
        """DP ranks that share each expert's width."""
        return self.etp_size // self.tp_size if self._width_over_tp else self.etp_size

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The physical axes, outermost first."""
        return ("dp", "ep", "etp", "tp") if self._width_ranks > 1 else ("dp", "ep", "tp")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the physical ``axes``."""
        ep_ranks = self.ep_size if self._width_over_tp else self.ep_size // self.tp_size
        sizes = (ep_ranks, self._width_ranks, self.tp_size) if self._width_ranks > 1 else (ep_ranks, self.tp_size)
        return (self.stage_devices // math.prod(sizes), *sizes)

    @cached_property
    def expert_copies(self) -> int:
        """Number of complete sets of the routed experts."""
        return self.shape[0]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes over which requests and their pages of the KV cache are spread."""
        return self.axes[:-1]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes over which the tokens of a step are spread for dispatch: a DP rank's tokens are split over its tp ranks."""
        return self.axes

    @property
    def head_axes(self) -> tuple[str, ...]:
        """Axes over which attention heads are spread."""
        return ("tp",)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes over which physical experts are spread."""
        return ("ep",) if self.splits_expert_width and self._width_over_tp else ("ep", "tp")

    @property
    def expert_width_axes(self) -> tuple[str, ...]:
        """Axes over which each expert's width is spread."""
        if not self.splits_expert_width:
            return ()
        over_ranks = ("etp",) if self._width_ranks > 1 else ()
        return over_ranks + (("tp",) if self._width_over_tp else ())

    @property
    def expert_width_shards(self) -> int:
        """Number of pieces into which each expert's width is split."""
        return self.etp_size

    def expert_ranks_on_host(self, devices_per_host: int) -> int:
        """Return how many neighbours along a stage's ``expert_axes`` share a host; 1 if hosts split them unevenly."""
        import numpy as np

        host = (np.arange(self.stage_devices) // devices_per_host).reshape(self.shape)
        spread = [self.axes.index(axis) for axis in self.expert_axes]
        others = [axis for axis in range(host.ndim) if axis not in spread]
        host_NG = host.transpose([*others, *spread]).reshape(-1, self.ep_size)
        near = int(np.sum(host_NG[0] == host_NG[0, 0]))
        even = self.ep_size % near == 0 and bool(np.all(host_NG == np.repeat(host_NG[:, ::near], near, axis=1)))
        return near if even else 1

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
        """Raise ``MeshError`` that names every number that does not fit this mesh, and numbers that do.

        heads: attention heads; experts, redundant: logical and redundant experts (0 for a dense model); expert_width:
        one expert's width; dense_widths: name → width of MLPs split over ``tp``; block: width of a quantisation
        block (128 for DeepSeek's FP8) that no split may cut; expert_block: block width of the experts, if different.
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
        split_widths = {name: (width, self.tp_size, "tp") for name, width in (dense_widths or {}).items()}
        if experts:
            axis = "tp" if self.expert_width_axes == ("tp",) else "etp"
            split_widths["expert width"] = (expert_width, self.expert_width_shards, axis)
        for name, (width, shards, axis) in split_widths.items():
            other = expert_block is not None and name == "expert width"
            size, bits = (expert_block, 4) if other else (block, 8)
            if width % shards:
                problems.append(f"{name} {width} is not divisible by {axis}={shards}; {axis} may be {_divisors(width)}")
            elif size and shards > 1 and (width // shards) % size:
                whole = _divisors(width // size) if width % size == 0 else [1]
                problems.append(
                    f"{name} {width} over {axis}={shards} is {width // shards} a device, which cuts a quantisation block of "
                    f"{size}; {axis} may be {whole}, or use weights that are not FP{bits}"
                )
        if problems:
            raise MeshError(f"mesh {self} does not fit the model: " + "; ".join(problems))

    def build(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
        """Build the mesh from ``devices`` (default: all devices of the process group), ordered by host.

        Neighbours along ``tp`` share a host first, then neighbours along ``etp``, then along ``ep``: the last axis moves
        fastest over devices sorted by process and id (ids alone are not contiguous over processes).

        Raises:
            MeshError: fewer devices exist than the mesh needs, JAX does not start, or the mesh has several stages.
        """
        return self.arrange(self._ordered(devices))

    def build_stages(self, devices: Sequence[jax.Device] | None = None) -> list[jax.sharding.Mesh]:
        """Build the mesh of each stage, as ``build`` does. A stage has consecutive devices, so it fills whole hosts first."""
        ordered, each = self._ordered(devices), self.stage_devices
        return [self.stage.arrange(ordered[first : first + each]) for first in range(0, self.num_devices, each)]

    def _ordered(self, devices: Sequence[jax.Device] | None) -> Sequence[jax.Device]:
        """Return the devices of the mesh, in mesh order."""
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
        return ordered[: self.num_devices]

    def arrange(self, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
        """Build the mesh from exactly these devices, row by row in this order."""
        import numpy as np
        from jax.sharding import AxisType, Mesh

        if self.pp_size > 1:
            raise MeshError(
                f"mesh {self} has {self.pp_size} stages, each a mesh of its own ({self.stage}), and one mesh is expected here; leave pp out"
            )
        grid = np.array(devices, dtype=object).reshape(self.shape)
        return Mesh(grid, self.axes, axis_types=(AxisType.Auto,) * len(self.axes))


def device_order(device: jax.Device) -> tuple[int, int, int]:
    """Return the sort key of a device: process, slice and id. A mesh takes the first devices in this order."""
    return device.process_index, getattr(device, "slice_index", 0) or 0, device.id


def joined_neighbours(mesh: jax.sharding.Mesh) -> int | None:
    """Return how many neighbours in a mesh are joined by fast links; None if the number is not the same everywhere.

    Joined are the devices of one of JAX's slices (ICI, or an NVLink domain); CPU devices and devices without a slice, those of one process.
    """
    devices = list(mesh.devices.flat)
    owners = [getattr(device, "slice_index", None) for device in devices]
    if devices[0].platform == "cpu" or None in owners:
        owners = [device.process_index for device in devices]
    count = owners.count(owners[0])
    runs = [owners[at : at + count] for at in range(0, len(owners), count)]
    return count if all(len(set(run)) == 1 for run in runs) and len({run[0] for run in runs}) == len(runs) else None


def hosts_of_experts(devices: np.ndarray, ranks: int) -> int:
    """Return the number of hosts (processes) of a copy of the experts; 1 unless each has equally many neighbouring ranks of every copy.

    devices: devices of a mesh, with the copies along the first axis. ranks: ranks of an EP group; also 1 if a rank is several devices.
    """
    copies = [[device.process_index for device in copy.flat] for copy in devices]
    hosts = len(set(copies[0]))
    each, rest = divmod(ranks, hosts)
    if rest or len(copies[0]) != ranks:
        return 1
    runs = [{*copy[at : at + each]} for copy in copies for at in range(0, ranks, each)]
    return hosts if all(len(run) == 1 for run in runs) and all(len(set(copy)) == hosts for copy in copies) else 1


def _all_devices() -> Sequence[jax.Device]:
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: the requested platform has no device
        asked = os.environ.get("JAX_PLATFORMS")
        reason = f": {error}" if str(error) else ""
        if not asked:
            raise MeshError(f"JAX found no devices{reason}; JAX_PLATFORMS=cpu uses the host's processor") from error
        raise MeshError(
            f"JAX_PLATFORMS is {asked!r}, and JAX found no device of that platform{reason}; unset it to take what is there, "
            "set it to cpu, or install JAX with the platform's plugin (pip install 'jax[cuda13]', 'jax[tpu]') and its driver"
        ) from error


def advice_on_emulation(count: int) -> str:
    """Return advice if fewer than ``count`` CPU devices are emulated."""
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
