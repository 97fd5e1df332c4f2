"""XLA compiler options for the programs of an engine."""

import contextlib
import functools
import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from dsjax.model.step_description import StepDescription

_ON_CPUS: Mapping[str, int | bool] = {
    # Do not split a program: all cores already compile programs in parallel, and LLVM starts anew for each of up to 32 pieces.
    "xla_cpu_parallel_codegen_split_count": 1,
}

# Both options change the order in which XLA sums along rows, so only programs without such sums keep their bits with them.
_WITHOUT_SUMS: Mapping[str, int | bool] = {
    # The costly work is in native kernels, and more LLVM passes do not speed up the rest.
    "xla_backend_optimization_level": 1,
    # The older fusion generator, the only one until 2025, takes half the time.
    "xla_cpu_use_fusion_emitters": False,
}

_JAXLIB_SERIES = {"xla_cpu_use_fusion_emitters": "0.10."}
"""Options that only one series of jaxlib knows → its version prefix. Other versions refuse them."""


def compiler_options(platform: str, *, sums: bool = True) -> dict[str, int | bool] | None:
    """Return options for programs on devices of ``platform``; None: XLA's defaults. ``XLA_FLAGS``, or the file it names, takes precedence.

    sums: whether XLA sums floating-point numbers along rows in the program.
    """
    return _on_cpus(os.environ.get("XLA_FLAGS", ""), sums) if platform == "cpu" else None


def step_options(step: StepDescription, *, draws: bool = False) -> dict[str, int | bool] | None:
    """Return options for a program of a step. draws: whether it draws tokens.

    In an exact step, kernels sum in layers and head, and ``log_softmax`` has a fixed order: XLA itself sums only in draws.
    """
    return compiler_options(step.mesh.devices.flat[0].platform, sums=draws or not step.is_exact)


@functools.cache
def _on_cpus(flags: str, sums: bool) -> dict[str, int | bool] | None:
    if not flags.strip().startswith("-"):  # XLA then reads it as the path of a file with flags
        with contextlib.suppress(OSError):
            flags = Path(flags.strip()).read_text()
    given = set(re.findall(r"--(\w+)", flags))
    jaxlib = version("jaxlib")
    options = {
        name: value
        for name, value in (_ON_CPUS if sums else {**_ON_CPUS, **_WITHOUT_SUMS}).items()
        if name not in given and jaxlib.startswith(_JAXLIB_SERIES.get(name, ""))
    }
    return options or None
