"""The table of kernel implementations: which exist for each operation, where they run, and which one a step uses.

The plain JAX form of an operation is its definition. ``tests/dsjax/kernels`` checks every other form against it, and a step uses
another form only where the table allows it.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dsjax.errors import UserError
from dsjax.kernels import build
from dsjax.kernels.native_calls import NativeKernels
from dsjax.kernels.pallas import PallasKernels
from dsjax.kernels.pallas.shared_memory import Cores
from dsjax.kernels.pallas.tile_table import TileTable
from sharding.cores import most_threads


@dataclass(frozen=True)
class Implementation:
    """One row of the table: an implementation of an operation, and where it can be used."""

    operation: str
    name: str  # its name in ``--kernels``
    platforms: tuple[str, ...] | None  # of devices; None: all
    what: str  # how it is implemented


TABLE = (
    Implementation("decode attention", "plain", None, "JAX, blocks of the context gathered from their pages"),
    Implementation("decode attention", "native", ("cpu",), "C++, absorbed MLA or DeepSeek-V4's, pages read in place"),
    Implementation("decode attention", "pallas", ("gpu",), "Triton, absorbed MLA or DeepSeek-V4's, pages read in place"),
    Implementation("decode attention", "pallas", ("tpu",), "Mosaic, absorbed MLA, pages read in place"),
    Implementation("prefill attention", "plain", None, "JAX, blocks of the context gathered from their pages"),
    Implementation("prefill attention", "native", ("cpu",), "C++, keys and values expanded by block, or DeepSeek-V4's"),
    Implementation("prefill attention", "pallas", ("gpu",), "Triton, absorbed MLA in causal tiles, or DeepSeek-V4's by query"),
    Implementation("prefill attention", "pallas", ("tpu",), "Mosaic, absorbed MLA, causal tiles"),
    Implementation("index choice", "plain", None, "JAX, of sparse attention: scores by blocks, the highest by bisection"),
    Implementation("index choice", "native", ("cpu",), "C++, of sparse attention: index keys read in place"),
    Implementation("index choice", "pallas", ("gpu",), "Triton, index scores of sparse attention; the highest in JAX"),
    Implementation("index choice", "pallas", ("tpu",), "Mosaic, index scores of sparse attention; the highest in JAX"),
    Implementation("hyper-connections", "plain", None, "JAX, of DeepSeek-V4"),
    Implementation("hyper-connections", "native", ("cpu",), "C++, of DeepSeek-V4: each token by itself"),
    Implementation("router", "plain", None, "JAX: scores and the best experts of the best groups"),
    Implementation("router", "native", ("cpu",), "C++, the choice among scores: greedy, group_limited_greedy, noaux_tc"),
    Implementation("experts", "plain", None, "JAX: tiles (CPU), einsum (accelerators)"),
    Implementation("experts", "native", ("cpu",), "C++, float32, bfloat16, FP8, FP4 and INT4 weights widened in registers"),
    Implementation("experts", "pallas", ("gpu",),
                   "Triton, sorted pairs, weights read from the stack; FP8 × FP8, or FP8, FP4 and INT4 widened"),
    Implementation("experts", "pallas", ("tpu",), "Mosaic, sorted pairs, bfloat16 or FP8 weights read from the stack"),
    Implementation("other products", "plain", None, "JAX; FP8 weights dequantised first, or by blocks with FP8 activations"),
    Implementation("other products", "native", ("cpu",), "C++, read from the stack, each row by itself; norms too"),
    Implementation("other products", "pallas", ("gpu",), "Triton, a layer's matrices read from the stack; FP8 × FP8, or FP8 widened"),
    Implementation("other products", "pallas", ("tpu",), "Mosaic, a layer's FP8 matrices read from the stack, widened"),
)  # fmt: skip
OPERATIONS = tuple(dict.fromkeys(row.operation for row in TABLE))


@dataclass(frozen=True)
class Kernels:
    """The implementations that a step uses."""

    # the loaded native kernels; without them and `pallas`, all operations are plain
    native: NativeKernels | None = None
    pallas: PallasKernels | None = None  # the Pallas kernels
    # operations that the kernels leave to the plain form, because they cannot read this cache or these weights
    left_plain: tuple[str, ...] = ()
    # one line for users, may be empty: why an existing faster implementation is not used, or where the native kernels came from
    note: str = field(default="", compare=False)

    def name(self, operation: str) -> str:
        """Return the name of an operation's implementation; for attention, of the MLA forms that have kernels."""
        loaded = "native" if self.native is not None else "pallas" if self.pallas is not None else "plain"
        platform = self.pallas.platform if loaded == "pallas" else None
        rows = [row for row in TABLE if row.operation == operation and row.name == loaded]
        if not any(platform is None or platform in row.platforms for row in rows):
            return "plain"
        return "plain" if operation in self.left_plain else loaded


PLAIN = Kernels()


def choose_kernels(
    choice: str,
    platform: str,
    dtype: np.dtype,
    *,
    devices: int,
    cache: Path | None,
    prebuilt: Path | None = None,
    tiles: Path | None = None,
    cores: Cores = Cores(),
) -> Kernels:
    """Return the kernels for ``--kernels CHOICE`` on devices of ``platform`` that compute in ``dtype``.

    devices: number that this process drives; each native kernel gets its share of the cores. cache: folder for built libraries.
    prebuilt: a folder that ``dsjax kernels build`` filled (``--kernel-cache``); then nothing is built.
    tiles: a file that ``dsjax tune`` made (``--kernel-config``), for the Pallas kernels. cores: of the GPUs.

    Raises:
        UserError: the chosen kernels do not use ``tiles``, or the file has none; ``native`` or ``pallas`` is not available. ``auto``
            takes the plain form then, and ``note`` says why.
    """
    if tiles is not None and not (choice == "pallas" or (choice == "auto" and platform == "gpu")):
        raise UserError(
            f"--kernel-config has tile sizes of the Pallas kernels, which --kernels {choice} does not use on {platform} devices; "
            "leave it out"
        )
    if choice == "plain":
        return PLAIN
    if choice == "pallas" or (choice == "auto" and platform in ("gpu", "tpu")):
        return _pallas(choice, platform, dtype, tiles, cores)
    if platform != "cpu":
        return _refuse(choice, f"native kernels are for the CPU platform, and these devices are {platform}")
    if dtype != np.float32:
        return _refuse(choice, f"native kernels compute in float32, and --dtype is {np.dtype(dtype).name}")
    library = build.find_or_build(cache) if prebuilt is None else build.find_prebuilt(prebuilt)
    if library.path is None:
        return _refuse(choice, library.note)
    threads = max(1, most_threads() // devices)
    try:
        return Kernels(NativeKernels.load(library.path, threads), note=library.note)
    except Exception as error:  # any error: the plain forms compute the same
        return _refuse(
            choice, f"the native kernels in {library.path} do not load ({' '.join(str(error).split())[:200]})"
        )


def _pallas(choice: str, platform: str, dtype: np.dtype, tiles: Path | None, cores: Cores) -> Kernels:
    """Return compiled kernels on GPUs and TPUs. On CPUs, Pallas's interpreter runs the GPU kernels: for tests, too slow to serve."""
    if platform not in ("gpu", "tpu", "cpu"):
        return _refuse(choice, f"these kernels are for GPUs and TPUs, and these devices are {platform}")
    if np.dtype(dtype).name not in ("float32", "bfloat16"):
        return _refuse(choice, f"they compute in float32 and bfloat16, and --dtype is {np.dtype(dtype).name}")
    if tiles is not None and platform == "tpu":
        raise UserError(
            "--kernel-config has tile sizes of the kernels for GPUs, and these devices are tpu; leave it out"
        )
    note = "Pallas kernels run by their interpreter on a CPU: right, and very slow" if platform == "cpu" else ""
    table = None if tiles is None else TileTable.read(tiles)
    whose = "tpu" if platform == "tpu" else "gpu"
    return Kernels(pallas=PallasKernels(whose, interpret=platform == "cpu", tiles=table, cores=cores), note=note)


def _refuse(choice: str, reason: str) -> Kernels:
    if choice != "auto":
        raise UserError(f"--kernels is {choice}, but {reason}; use --kernels auto or plain")
    return Kernels(note=reason)
