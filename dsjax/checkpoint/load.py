"""Load parameters from a checkpoint: onto a mesh, where each device gets only its shard; or into host memory, for tests."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from dsjax.checkpoint.assemble import Assembler
from dsjax.checkpoint.check import check_copies, check_structure
from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.fingerprint import fingerprint
from dsjax.checkpoint.held_weights import HeldWeights
from dsjax.checkpoint.names import TensorNames
from dsjax.checkpoint.place import local_bytes, place
from dsjax.checkpoint.recover import place_held
from dsjax.checkpoint.safetensors import Tensor, TensorSpec
from dsjax.checkpoint.source import Checkpoint, open_checkpoint
from dsjax.config import ModelConfig
from dsjax.config.weights import PACKED
from dsjax.model.parameter_table import abstract_parameters
from dsjax.model.parameters import Weights
from dsjax.model.window import ParameterWindow, Region
from dsjax.progress import report_bytes
from sharding.cores import most_threads
from sharding.layer_placement import LayerPlacements
from sharding.placement import Placement
from sharding.rules import Rules

_MAX_THREADS = 16
_log = logging.getLogger(__name__)


def load(
    config: ModelConfig,
    checkpoint: Checkpoint | str | Path,
    mesh: Mesh,
    rules: Rules,
    *,
    weights: Weights | Literal["auto"] = "auto",
    placement: Placement | LayerPlacements | None = None,
    mtp: bool = True,
    only: Collection[str] | None = None,
    window: ParameterWindow = ParameterWindow(),
    progress: bool = False,
    held: HeldWeights | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, jax.Array]:
    """Load a checkpoint's parameters onto ``mesh``, sharded by ``rules``, in the platform's storage dtypes.

        checkpoint = open_checkpoint("path/to/model")
        params = load(checkpoint.config, checkpoint, mesh, Rules.for_mesh(spec), weights="fp8")

    Args:
        config: the model's configuration, in most cases ``checkpoint.config``.
        checkpoint: an opened checkpoint, or its directory.
        mesh, rules: where each parameter goes. Each host reads every distinct shard of its devices once.
        weights: format of the matrices: ``bf16``, ``f32``, ``mixed`` (routed experts in bf16, all else in float32), or ``fp8``
            (with block scales; a checkpoint that is not FP8 is quantised). For the first three, an FP8 checkpoint is dequantised
            exactly, ``float32(fp8) × scale``, then rounded to the dtype. ``auto`` is ``f32`` for a float32 checkpoint, else
            ``bf16``.
        placement: the logical expert of each physical slot, for all layers or layer by layer; default: one copy of each, in order.
            If it has one logical expert more than the model's routed ones, the shared expert occupies slots and has no
            parameters of its own.
        mtp: whether to load the MTP modules, if the configuration has any.
        only: paths of the parameters to load; default: all.
        window: the layers or experts of each parameter to load, for a process that has only a part of the model; ``config`` and
            ``placement`` describe the whole model. ``held`` must then be empty.
        progress: whether to draw a progress bar on standard error.
        held: parameters of another mesh on this process's devices, which are not read again. If it was not empty, it also
            holds the new parameters afterwards. Its ``counts`` say how much was read.
        check: called after each layer of a parameter; an exception from it ends the load.

    Returns:
        ``{path: array}`` for every path of ``abstract_parameters`` in the checkpoint, or those of ``only``.

    Raises:
        CheckpointError: lists all tensors that are missing, damaged or of a wrong shape or dtype (none was read), or all non-finite ones.
        MeshError: the mesh does not divide a dimension.
    """
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    parameters = abstract_parameters(
        config,
        weights=checkpoint.natural_weights if weights == "auto" else weights,
        platform=mesh.devices.flat[0].platform,
        num_physical=placement.n_physical if placement else None,
        mtp=mtp,
        shared_apart=placement is None or placement.n_logical <= config.n_routed_experts,
    )
    names = TensorNames(config, parameters, placement.physical_to_logical if placement else None)
    checkpoint = checkpoint.in_format_of(names)
    check_structure(
        checkpoint.directory,
        names,
        checkpoint.specs,
        problems=checkpoint.problems,
        unreadable=checkpoint.unreadable,
    )
    wanted = {path: info for path, info in names.parameters.items() if only is None or path in only}
    local = window.of(wanted)
    total = local_bytes(local, mesh, rules)
    executor = ThreadPoolExecutor(min(most_threads(), _MAX_THREADS), thread_name_prefix="checkpoint")
    try:
        assembler = Assembler(names, checkpoint.tensors, executor)

        def fill(out: np.ndarray, path: str, region: Region) -> None:
            assembler.fill(out, path, window.in_whole(path, wanted[path], region))
            checkpoint.release()

        if held is not None:
            _identify(held, f"{fingerprint(checkpoint.directory)} {names.dtypes}")
        started = time.monotonic()
        reuses_held = held is not None and not held.is_empty
        with report_bytes("Loading weights", total, progress) as show:

            def advance(nbytes: int) -> None:  # called after each layer of a parameter
                check()
                show(nbytes)

            if reuses_held:
                placed = place_held(local, mesh, rules, names, held, fill, advance)
            else:
                placed = place(local, mesh, rules, fill, advance)
        if held is not None:
            held.counts.read += 0 if reuses_held else total  # `place_held` counts what it reads
            held.counts.file += assembler.bytes_read
        _log.info(
            "Read %s of the checkpoint's %s bytes in %.1f s, for %d devices; the process took %s bytes at most.",
            f"{assembler.bytes_read:,}",
            f"{sum(spec.nbytes for spec in checkpoint.specs.values()):,}",
            time.monotonic() - started,
            len(mesh.local_devices),
            f"{_peak_bytes():,}",
        )
        if assembler.problems:
            raise CheckpointError(
                checkpoint.directory, assembler.problems, "The values are damaged; get the files again."
            )
        if jax.process_index() == 0 and only is None and not reuses_held:  # one process warns
            check_copies(checkpoint.directory, names, checkpoint.tensors)
            checkpoint.release()
    finally:
        # An interrupt must not wait for queued reads.
        executor.shutdown(wait=False, cancel_futures=True)
    return placed


def _identify(held: HeldWeights, identity: str) -> None:
    """Record the checkpoint and format of the held weights, and discard weights of others."""
    if held.identity != identity:
        held.clear()
    held.identity = identity


def _peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes; 0 if the system does not report it.

    On Linux, VmHWM is preferred: `ru_maxrss` starts from the parent's resident memory at the fork.
    """
    with contextlib.suppress(OSError, StopIteration, ValueError), open("/proc/self/status") as status:
        return 1024 * int(next(line for line in status if line.startswith("VmHWM:")).split()[1])
    try:
        import resource
    except ImportError:  # no POSIX system
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def from_hf_tensors(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    weights: Weights = "f32",
    platform: str = "cpu",
    placement: Placement | LayerPlacements | None = None,
    mtp: bool = True,
) -> dict[str, np.ndarray]:
    """Convert Hugging Face tensors in host memory to parameters in host memory; arguments and errors as in ``load``.

    Values have the storage dtype of ``platform``: for bf16 on ``cpu``, ``uint16`` with the same bits.
    """
    parameters = abstract_parameters(
        config,
        weights=weights,
        platform=platform,
        num_physical=placement.n_physical if placement else None,
        mtp=mtp,
    )
    names = TensorNames(config, parameters, placement.physical_to_logical if placement else None)
    source = "in memory"
    specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    checkpoint = Checkpoint(Path(source), "memory", config, tensors, specs).in_format_of(names)
    tensors = checkpoint.tensors
    check_structure(source, names, checkpoint.specs, problems=checkpoint.problems)
    assembler = Assembler(names, tensors)
    filled = {}
    for path, info in names.parameters.items():
        filled[path] = np.empty(info.shape, info.storage_dtype)
        assembler.fill(filled[path], path, tuple(slice(0, size) for size in info.shape))
    if assembler.problems:
        raise CheckpointError(source, assembler.problems)
    check_copies(source, names, tensors)
    return filled


def _packed_format_of(config: ModelConfig, params: Mapping[str, np.ndarray | jax.Array]) -> Weights | None:
    """Return the packed weight format that matches the parameters' names, shapes and item sizes; None if none does."""
    mtp = any(path.startswith("mtp.") for path in params)
    shapes = {path: (tuple(value.shape), value.dtype.itemsize) for path, value in params.items()}
    for weights in PACKED:
        infos = TensorNames(config, abstract_parameters(config, weights=weights, platform="any", mtp=mtp)).parameters
        if {path: (info.shape, info.dtype.itemsize) for path, info in infos.items()} == shapes:
            return weights
    return None


def to_hf_tensors(config: ModelConfig, params: Mapping[str, np.ndarray | jax.Array]) -> dict[str, np.ndarray]:
    """Return views of the parameters under Hugging Face's names, in their true dtypes: the inverse of ``from_hf_tensors``.

    Omits the copies that some checkpoints carry (an MTP module's embedding and head). The weight format is inferred
    from the parameters; there must be one copy of each expert.

    Raises:
        CheckpointError: missing or unexpected parameters, or a wrong shape.
    """
    inferred: Weights = "fp8" if any(value.dtype.itemsize == 1 for value in params.values()) else "bf16"
    if any(path.endswith(".experts.down.weight") and value.dtype == np.uint8 for path, value in params.items()):
        inferred = _packed_format_of(config, params) or inferred
    if params and all(value.dtype == np.float32 for value in params.values()):
        inferred = "f32"
    mtp = any(path.startswith("mtp.") for path in params)
    names, gpu_names = (  # FP8 matrices are stored in another order on GPUs
        TensorNames(config, abstract_parameters(config, weights=inferred, platform=platform, mtp=mtp))
        for platform in ("any", "gpu")
    )
    shapes = {path: tuple(value.shape) for path, value in params.items()}
    if shapes == {path: info.shape for path, info in gpu_names.parameters.items()}:
        names = gpu_names
    problems = [f"{path}: missing" for path in names.parameters if path not in params]
    problems += [f"{path}: not a parameter of this configuration" for path in params if path not in names.parameters]
    for path, info in names.parameters.items():
        if path in params and tuple(params[path].shape) != info.shape:
            problems.append(f"{path}: shape {list(params[path].shape)}, expected {list(info.shape)}")
    if problems:
        raise CheckpointError("in memory", problems)
    host = {path: np.asarray(params[path]).view(info.dtype) for path, info in names.parameters.items()}
    return {
        name: host[path][piece.index].T if piece.transposed else host[path][piece.index]
        for name, (path, piece) in names.places().items()
    }
