"""The kernels outside JAX, under the address, undefined-behaviour and thread sanitizers, on cases of all shapes."""

import dataclasses
import functools
import os
import subprocess
import tempfile
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import ATTENTION, DENSE, EXPERTS, INDEX, AttentionCase, DenseCase, ExpertsCase, IndexCase, drawn_from

from dsjax.engine.device.process import cache_folder
from dsjax.fp4.formats import FORMATS
from dsjax.kernels import build

pytestmark = pytest.mark.slow  # all together: they compile the kernels twice

SANITIZERS = ("address,undefined", "thread")

FEW = settings(max_examples=10, deadline=None, derandomize=True)
THREADS = st.sampled_from([1, 2, 3, 4])


@pytest.fixture(scope="module", params=SANITIZERS)
def harness(request, kernels):
    """The stand-alone program, built once for a version of the sources; and the kernels whose calls it can make."""
    command = build.compiler()
    if command is None:
        pytest.skip("no C++ compiler")
    path = cache_folder() / "native" / f"harness-{build.source_version()}-{request.param.split(',')[0]}"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        # Without optimisation: as many checks, and a third of -O1's time to compile; the cases are small.
        flags = ["-std=c++17", "-O0", "-g1", "-march=native", "-w", "-fno-sanitize-recover=all", "-pthread"]
        files = [f"-I{jax.ffi.include_dir()}", build.SOURCES / "harness.cc", "-o", unfinished]
        made = [*command, *flags, f"-fsanitize={request.param}", *files]
        done = subprocess.run(made, capture_output=True, text=True)
        if done.returncode and _lacks(command, request.param, path.parent):
            pytest.skip(f"this compiler has no {request.param} sanitizer: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr[-3000:]
        unfinished.replace(path)
    return path, kernels.native


def _lacks(command, sanitizer, folder) -> bool:
    """Whether a compiler cannot build anything with a sanitizer."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        tried = [*command, f"-fsanitize={sanitizer}", "-x", "c++", "-", "-o", f"{own}/tried"]
        return subprocess.run(tried, input=b"int main() {}", capture_output=True).returncode != 0


def words(arrays):
    """The number of arrays or shapes, and of each its type, rank and lengths."""
    return len(arrays), *(word for own in arrays for word in (np.dtype(own.dtype).char, len(own.shape), *own.shape))


def ran(harness, threads, kernel, devices, *, times=1, **options):
    """The end of the harness that makes the calls of a method of ``NativeKernels`` with each device's arguments; the results' shapes."""
    (path, native), ranks, calls = harness, options.get("ranks", 1), []

    def make(target, results, *arrays, **settings):
        calls.append((target, results, [*map(np.ascontiguousarray, arrays)], settings))
        return [np.zeros(result.shape, result.dtype) for result in results]

    with patch.object(jax.ffi, "ffi_call", lambda *of: functools.partial(make, *of)):
        for arguments in devices:
            getattr(dataclasses.replace(native, threads=threads), kernel)(*arguments, **options)
    target, results, arrays, settings = calls[0]
    kernel, sizes = target.removesuffix(f"_{native.name}"), (len(devices) // ranks, ranks, times)
    head = [kernel, *sizes, *words(arrays), *words(results)]
    for name, value in settings.items():
        head += [name, (own := np.array(value)).dtype.char, int.from_bytes(own.tobytes(), "little", signed=True)]
    case = f"{' '.join(map(str, head))}\n".encode() + b"".join(array.tobytes() for call in calls for array in call[2])
    # Memory that cannot be had is null, as it is outside sanitizers.
    environment = os.environ | {f"{name}_OPTIONS": "allocator_may_return_null=1" for name in ("ASAN", "TSAN")}
    return subprocess.run([str(path)], input=case, capture_output=True, timeout=600, env=environment), results[:-1]


def run(harness, threads, kernel, *devices, **options):
    """The results of all devices, stacked."""
    done, results = ran(harness, threads, kernel, devices, **options)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    own = np.dtype([(str(i), result.dtype, result.shape) for i, result in enumerate(results)])
    found = np.frombuffer(done.stdout, own) if own.itemsize else np.zeros(len(devices), own)
    return [found[name] for name in own.names]


@FEW
@given(**EXPERTS, threads=THREADS, pieces=st.sampled_from([1, 4]), apart=st.booleans())
def test_experts(harness, X, D, F, N, K, stored, threads, pieces, apart, **drawn):
    case = ExpertsCase.drawn(X=X, D=D, F=F, N=N, K=K, stored=stored, **drawn)
    layer = (stack := case.params()).pop("layer")
    arrays, pieces = (stack, layer, case.rows, case.ids, case.weights), pieces if F % pieces == 0 else 1
    (found,) = run(harness, threads, "experts", arrays, pieces=pieces, terms=apart)
    case.assert_near(found.reshape(N, K, D).sum(axis=1) if apart else found)


@FEW
@given(
    **drawn_from(form=FORMATS.values(), D=range(1, 6), F=range(1, 6), N=[1, 2, 60], pieces=[1, 4, 8]), threads=THREADS
)
def test_experts_in_fp4(harness, seed, form, D, F, N, threads, pieces):
    D, F = D * form.block, F * form.block
    case = ExpertsCase.drawn(seed, X=3, D=D, F=F, N=N, K=2)
    packed, numbers = case.in_fp4(form)
    arrays = packed, packed.pop("layer"), case.rows, case.ids, case.weights
    numbers.assert_near(*run(harness, threads, "experts", arrays, pieces=pieces, fp4_block=form.block))


@FEW
@given(**DENSE, N=st.sampled_from([1, 3, 8, 9, 100]), pieces=st.sampled_from([1, 4, 8]), threads=THREADS)
def test_dense(harness, N, pieces, threads, **drawn):
    case, K = DenseCase.drawn(N=N, **drawn), drawn["K"]
    arrays, pieces = (case.weight, case.scale, jnp.int32(1), case.rows), pieces if K % pieces == 0 else 1
    case.assert_near(*run(harness, threads, "dense", arrays, pieces=pieces, transposed=case.transposed))


@FEW
@given(**ATTENTION, form=st.sampled_from(["absorbed", "expanded"]), threads=THREADS)
def test_attention(harness, form, threads, stored, holes, **drawn):
    case = AttentionCase.drawn(**drawn, stored=stored, holes=holes)
    weights, rows = case.weights.reshape(1, len(case.weights), -1), (case.start, case.length, case.tables, case.filled)
    queries = f"{form}_attention", case.q_nope, case.q_rope, {"weight": weights}, jnp.int32(0)
    (found,) = run(harness, threads, "attention", (*queries, case.cache(), jnp.int32(1), *rows), scale=case.scale)
    np.testing.assert_allclose(found[0], case.expected(), atol=2e-4, rtol=2e-4)


@FEW
@given(**INDEX, threads=THREADS)
def test_index_choice(harness, threads, **drawn):
    case = IndexCase.drawn(**drawn)
    arrays = case.query, case.weight, case.cache(), jnp.int32(1), case.positions, case.tables, case.filled, case.k
    case.assert_chosen(run(harness, threads, "index_choice", arrays)[0])


@FEW
@given(**drawn_from(programs=[1, 2], ranks=range(1, 6), width=[0, 1, 40], gathers=[False, True]))
def test_rows_that_pass_in_memory(harness, seed, programs, ranks, width, gathers):
    """Devices make their next rows as soon as they go on, while others may not have gone on yet."""
    blocks = 1 if gathers else ranks
    rows = np.random.default_rng(seed).normal(size=(programs, ranks, blocks, width)).astype(np.float32)
    devices = [(rows[at], jnp.int32(at[1]), jnp.int32(0)) for at in np.ndindex(programs, ranks)]
    (found,) = run(harness, 1, "exchange", *devices, ranks=ranks, gathers=gathers, times=3)
    expected = np.stack([np.broadcast_to(own[:, 0], (ranks, ranks, width)) for own in rows])
    expected = expected if gathers else rows.swapaxes(1, 2)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def together(seed, programs, ranks, held, N, K, *, behind=0):
    """A case of ``ranks`` devices with ``held`` experts each, and ``behind`` more that no token has; and each device's arguments."""
    D, F = 37, 19
    case = ExpertsCase.drawn(seed, X=ranks * held, D=D, F=F, N=programs * ranks * max(N, 1), K=K, layers=1)
    case = case.first(programs * ranks * N)
    apart = (array[0].reshape(ranks, held, *array.shape[2:]) for array in (case.gate_up, case.down))
    weights = [np.pad(array, [(0, 0), (0, behind), *[(0, 0)] * (array.ndim - 2)]) for array in apart]
    ids = np.where(case.ids < 0, ranks * held, case.ids)  # as an expert that nobody has
    tokens = [array.reshape(programs, ranks, N, array.shape[1]) for array in (case.rows, ids, case.weights)]
    devices = []
    for at in np.ndindex(programs, ranks):
        stack = {"gate_up.weight": weights[0][None, at[1]], "down.weight": weights[1][None, at[1]]}
        devices.append((stack, jnp.int32(0), *(array[at] for array in tokens), jnp.int32(at[1]), jnp.int32(0)))
    return case, devices


@FEW
@given(**drawn_from(
    programs=[1, 2], ranks=range(1, 5), held=[1, 2, 3], behind=[0, 1], N=[0, 1, 6], K=[1, 2, 3], threads=[1, 2]
))  # fmt: skip
def test_experts_of_several_devices_together(harness, seed, programs, ranks, held, behind, N, K, threads):
    """The programs run at the same time, and their devices make their next rows as soon as they go on."""
    case, devices = together(seed, programs, ranks, held, N, K, behind=behind)
    sums, counts = run(harness, threads, "experts_together", *devices, ranks=ranks, held=held, times=3)
    case.assert_near(sums)
    counts = counts.reshape(programs, ranks, held + 1)
    ids = case.ids.reshape(programs, -1, K)
    for program, rank in np.ndindex(programs, ranks):
        here = ids[program] - rank * held
        here = np.where((here >= 0) & (here < held), here, held)
        per_expert = np.bincount(here.reshape(-1), minlength=held + 1)[:held]
        assert counts[program, rank].tolist() == [*per_expert, np.sum(np.any(here < held, axis=1))]


def test_where_there_is_no_memory_to_compute_a_meeting_fails_on_all_devices(harness):
    _, devices = together(1, programs=1, ranks=3, held=2, N=4, K=2)
    done, _ = ran(harness, 2**31 - 1, "experts_together", devices, ranks=3, held=2)
    assert (done.returncode, b"there is no memory for what experts" in done.stderr) == (4, True), done.stderr[-1000:]


@FEW
@given(**drawn_from(N=[1, 5, 130], groups=[1, 3, 4], members=range(1, 10), best=[1, 2], threads=[1, 2, 3]))
def test_the_router_stays_within_its_arrays(harness, seed, N, groups, members, best, threads):
    rng = np.random.default_rng(seed)
    E, K = groups * members, int(rng.integers(1, groups * members + 1))
    scores, bias = rng.integers(0, 9, (N, E)).astype(np.float32), rng.integers(0, 3, E).astype(np.float32)
    options = {"groups": groups, "kept": int(rng.integers(1, groups + 1)), "best": min(best, members), "factor": 2.5}
    (ids,), (weights,) = run(harness, threads, "router", (scores, bias, K), normalised=True, **options)
    chosen = np.take_along_axis(scores, ids, axis=1)
    np.testing.assert_allclose(weights, chosen / (chosen.sum(axis=1, keepdims=True) + 1e-20) * 2.5, rtol=1e-5)
    assert all(len(set(row)) == K for row in ids.tolist())
