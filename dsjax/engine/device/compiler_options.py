"""How XLA is told to compile the programs of an engine."""

import contextlib
import functools
import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

_ON_CPUS: Mapping[str, int | bool] = {
    # One piece of code: programs are compiled on all cores at once already, and LLVM begins anew with each of up to 32 pieces.
    "xla_cpu_parallel_codegen_split_count": 1,
}

_WITHOUT_SUMS: Mapping[str, int | bool] = {
    # What counts is in native kernels; LLVM makes the rest no faster with more passes over it. It adds up rows in another order.
    "xla_backend_optimization_level": 1,
    # The generator of fusions that was the only one until 2025 takes half the time, and has its own order of a row's sum.
    "xla_cpu_use_fusion_emitters": False,
}
"""Options for programs in which XLA adds nothing up along rows: they change no bit of those."""

_NOT_WITHOUT = {"xla_cpu_use_fusion_emitters": "0.10."}
"""Options that other versions of jaxlib do not know, which they refuse."""


def compiler_options(platform: str, *, sums: bool = True) -> dict[str, int | bool] | None:
    """Options for programs on devices of ``platform``; None: XLA's own. What ``XLA_FLAGS``, or the file that it names, says stays.

    sums: whether XLA adds floating-point numbers up along rows in the program.
    """
    return _on_cpus(os.environ.get("XLA_FLAGS", ""), sums) if platform == "cpu" else None


@functools.cache
def _on_cpus(flags: str, sums: bool) -> dict[str, int | bool] | None:
    if not flags.strip().startswith("-"):  # XLA then takes it for the path of a file with flags
        with contextlib.suppress(OSError):
            flags = Path(flags.strip()).read_text()
    given = set(re.findall(r"--(\w+)", flags))
    jaxlib = version("jaxlib")
    options = {
        name: value
        for name, value in (_ON_CPUS if sums else {**_ON_CPUS, **_WITHOUT_SUMS}).items()
        if name not in given and jaxlib.startswith(_NOT_WITHOUT.get(name, ""))
    }
    return options or None
