"""The kernels outside JAX, under the address, undefined-behaviour and thread sanitizers, on cases of all shapes."""

import dataclasses
import os
import struct
import subprocess
import tempfile

import numpy as np
import pytest
from fp4_weights import in_fp4
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import ATTENTION, DENSE, EXPERTS, INDEX, AttentionCase, DenseCase, ExpertsCase, IndexCase

from dsjax.engine.device.process import cache_folder
from dsjax.fp4.formats import FORMATS
from dsjax.kernels import build

pytestmark = pytest.mark.slow  # all together: they compile the kernels twice

SANITIZERS = ("address,undefined", "thread")

FEW = settings(max_examples=10, deadline=None, derandomize=True)


@pytest.fixture(scope="module", params=SANITIZERS)
def harness(request):
    """The stand-alone program; built once for a version of the sources."""
    command = build.compiler()
    if command is None:
        pytest.skip("no C++ compiler")
    path = cache_folder() / "native" / f"harness-{build.source_version()}-{request.param.split(',')[0]}"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = [
            "-std=c++17",
            "-O0",  # as many checks, and a third of -O1's time to compile; the cases are small
            "-g1",
            "-march=native",
            "-w",
            f"-fsanitize={request.param}",
            "-fno-sanitize-recover=all",
        ]
        unfinished = path.with_suffix(".unfinished")
        done = subprocess.run(
            [*command, *flags, "-pthread", str(build.SOURCES / "harness.cc"), "-o", str(unfinished)],
            capture_output=True,
            text=True,
        )
        if done.returncode and _lacks(command, request.param, path.parent):
            pytest.skip(f"this compiler has no {request.param} sanitizer: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr[-3000:]
        unfinished.replace(path)
    return path


def _lacks(command, sanitizer, folder) -> bool:
    """Whether a compiler cannot build anything with a sanitizer."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        tried = [*command, f"-fsanitize={sanitizer}", "-x", "c++", "-", "-o", f"{own}/tried"]
        return subprocess.run(tried, input=b"int main() {}", capture_output=True).returncode != 0


def ran(harness, kernel, threads, sizes, scale, *arrays):
    head = struct.pack(f"={3 + len(sizes)}qf", kernel, threads, len(sizes), *sizes, scale)
    case = head + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    # Memory that cannot be had is null, as it is outside sanitizers.
    options = {f"{name}_OPTIONS": "allocator_may_return_null=1" for name in ("ASAN", "TSAN")}
    return subprocess.run([str(harness)], input=case, capture_output=True, timeout=600, env=os.environ | options)


def run(harness, *case):
    done = ran(harness, *case)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return np.frombuffer(done.stdout, np.float32)


@FEW
@given(**EXPERTS, threads=st.sampled_from([1, 2, 4]), pieces=st.sampled_from([1, 4]), apart=st.booleans())
def test_experts(harness, X, D, F, N, K, stored, threads, pieces, apart, **drawn):
    case = ExpertsCase.drawn(X=X, D=D, F=F, N=N, K=K, stored=stored, **drawn)
    arrays = (case.gate_up, case.down, *(case.scales or ()), case.rows, case.ids, case.weights)
    sizes = (2, X, D, F, N, K, stored, D, pieces if F % pieces == 0 else 1, apart, 0, False)
    found = run(harness, 0, threads, sizes, 0.0, *arrays)
    found = found.reshape(N, K, D).sum(axis=1) if apart else found
    expected, size = case.expected()
    assert np.all(np.abs(found.reshape(expected.shape) - expected) <= 1e-6 * (D + F) ** 0.5 * (size + 1))


@FEW
@given(
    seed=st.integers(0, 2**31),
    form=st.sampled_from([*FORMATS.values()]),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    N=st.sampled_from([1, 2, 60]),
    threads=st.sampled_from([1, 2, 4]),
    pieces=st.sampled_from([1, 4, 8]),
)
def test_experts_in_fp4(harness, seed, form, sizes, N, threads, pieces):
    D, F = (size * form.block for size in sizes)
    case = ExpertsCase.drawn(seed, X=3, D=D, F=F, N=N, K=2)
    packed, decoded = in_fp4({"gate_up.weight": case.gate_up[-1], "down.weight": case.down[-1]}, form)
    parts = ("weight", "scale", "global_scale")[: 3 if form.has_global else 2]
    weights = [packed[f"{name}.{part}"] for part in parts for name in ("gate_up", "down")]
    sizes = (1, 3, D, F, N, 2, 1, D, pieces, False, form.block, form.integers)
    found = run(harness, 0, threads, sizes, 0.0, *weights, case.rows, case.ids, case.weights)
    numbers = dataclasses.replace(case, gate_up=decoded["gate_up.weight"][None], down=decoded["down.weight"][None])
    expected, size = numbers.expected()
    assert np.all(np.abs(found.reshape(expected.shape) - expected) <= 1e-6 * (D + F) ** 0.5 * (size + 1))


@FEW
@given(
    **DENSE, N=st.sampled_from([1, 3, 8, 9, 100]), pieces=st.sampled_from([1, 4, 8]), threads=st.sampled_from([1, 3])
)
def test_dense(harness, seed, K, parts, width, N, stored, pieces, transposed, threads):
    parts, stored = (1, max(stored, 2)) if transposed else (parts, stored)  # none is in FP8
    case = DenseCase.drawn(seed, K=K, parts=parts, width=width, N=N, stored=stored, transposed=transposed)
    sizes = (2, K, parts, width, N, stored, pieces if K % pieces == 0 else 1, transposed)
    found = run(harness, 3, threads, sizes, 0.0, case.weight, *([] if case.scale is None else [case.scale]), case.rows)
    expected = case.expected()
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5 * K**0.5)


@FEW
@given(**ATTENTION, form=st.sampled_from(["absorbed", "expanded"]), threads=st.sampled_from([1, 2, 4]))
def test_attention(harness, form, threads, stored, holes, **drawn):
    case = AttentionCase.drawn(**drawn, stored=stored, holes=holes)
    sizes = [drawn[name] for name in "RCHNOUM"]
    sizes += [case.tables.shape[1], *case.latent.shape[:3], stored, holes]
    arrays = [case.q_nope, case.q_rope, case.weights, case.latent]
    arrays += [case.rope] if case.scales is None else [case.scales, case.rope]
    arrays += [case.start, case.length, case.tables, *([case.filled] if holes else [])]
    found = run(harness, 2 if form == "expanded" else 1, threads, sizes, case.scale, *arrays)
    expected = case.expected()
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=2e-4, rtol=2e-4)


@FEW
@given(**INDEX, threads=st.sampled_from([1, 2, 4]))
def test_index_choice(harness, seed, R, C, I, A, G, pages, k, stored, holes, threads):
    case = IndexCase.drawn(seed, R=R, C=C, I=I, A=A, G=G, pages=pages, k=k, stored=stored, holes=holes)
    layers, total = case.keys.shape[:2]
    sizes = (R, C, I, A, k, pages, layers, total, G, stored, int(holes))
    optional = [array for array in (case.scale,) if array is not None]
    arrays = (case.query, case.weight, case.keys, *optional, case.positions, case.tables)
    arrays += () if case.filled is None else (case.filled,)
    found = run(harness, 4, threads, sizes, 0.0, *arrays).view(np.int32)
    chosen = found[: R * C * k].reshape(R * C, k)
    for own, expected in zip(chosen, case.expected(), strict=True):
        assert own.tolist() == expected + [0] * (k - len(expected))


@FEW
@given(
    seed=st.integers(0, 2**31),
    programs=st.integers(1, 2),
    ranks=st.integers(1, 5),
    width=st.sampled_from([0, 1, 40]),
    gathers=st.booleans(),
)
def test_rows_that_pass_in_memory(harness, seed, programs, ranks, width, gathers):
    """Devices make their next rows as soon as they go on, while others may not have gone on yet."""
    blocks = 1 if gathers else ranks
    rows = np.random.default_rng(seed).normal(size=(programs, ranks, blocks, width)).astype(np.float32)
    found = run(harness, 5, 1, (programs, ranks, width, gathers, 3), 0.0, rows)
    expected = np.stack([np.broadcast_to(own[:, 0], (ranks, ranks, width)) for own in rows])
    expected = expected if gathers else rows.swapaxes(1, 2)
    np.testing.assert_array_equal(found, expected.reshape(-1))


def together(seed, programs, ranks, held, N, K, *, behind=0, threads=1, times=3):
    """A case of ``ranks`` devices with ``held`` experts each, and ``behind`` more that no token has; its sizes and arrays."""
    X, D, F = held + behind, 37, 19
    case = ExpertsCase.drawn(seed, X=ranks * held, D=D, F=F, N=programs * ranks * max(N, 1), K=K, layers=1)
    if N == 0:
        case = dataclasses.replace(case, rows=case.rows[:0], ids=case.ids[:0], weights=case.weights[:0])
    apart = (array[0].reshape(ranks, held, *array.shape[2:]) for array in (case.gate_up, case.down))
    weights = [np.pad(array, [(0, 0), (0, behind), *[(0, 0)] * (array.ndim - 2)]) for array in apart]
    sizes = (programs, ranks, X, D, F, N, K, held, times)
    return case, (6, threads, sizes, 0.0, *weights, case.rows, case.ids, case.weights)


@FEW
@given(
    seed=st.integers(0, 2**31),
    programs=st.integers(1, 2),
    ranks=st.integers(1, 4),
    held=st.integers(1, 3),
    behind=st.integers(0, 1),
    N=st.sampled_from([0, 1, 6]),
    K=st.integers(1, 3),
    threads=st.sampled_from([1, 2]),
)
def test_experts_of_several_devices_together(harness, seed, programs, ranks, held, behind, N, K, threads):
    """The programs run at the same time, and their devices make their next rows as soon as they go on."""
    case, arguments = together(seed, programs, ranks, held, N, K, behind=behind, threads=threads)
    case.ids[case.ids < 0] = ranks * held  # as an expert that nobody has
    found = run(harness, *arguments)
    case.ids[case.ids == ranks * held] = -1
    expected, size = case.expected()
    sums, counts = np.split(found, [expected.size])
    assert np.all(np.abs(sums.reshape(expected.shape) - expected) <= 1e-6 * 56**0.5 * (size + 1))
    counts = counts.view(np.int32).reshape(programs, ranks, held + 1)
    ids = case.ids.reshape(programs, -1, K)
    for program, rank in np.ndindex(programs, ranks):
        here = ids[program] - rank * held
        here = np.where((here >= 0) & (here < held), here, held)
        per_expert = np.bincount(here.reshape(-1), minlength=held + 1)[:held]
        assert counts[program, rank].tolist() == [*per_expert, np.sum(np.any(here < held, axis=1))]


def test_where_there_is_no_memory_to_compute_a_meeting_fails_on_all_devices(harness):
    _, arguments = together(1, programs=1, ranks=3, held=2, N=4, K=2, threads=2**31 - 1)
    done = ran(harness, *arguments)
    assert (done.returncode, b"\nno memory\n" in b"\n" + done.stderr) == (4, True), done.stderr[-1000:]


@FEW
@given(
    seed=st.integers(0, 2**31),
    N=st.sampled_from([1, 5, 130]),
    groups=st.sampled_from([1, 3, 4]),
    members=st.integers(1, 9),
    best=st.integers(1, 2),
    threads=st.integers(1, 3),
)
def test_the_router_stays_within_its_arrays(harness, seed, N, groups, members, best, threads):
    rng = np.random.default_rng(seed)
    E, K = groups * members, int(rng.integers(1, groups * members + 1))
    scores, bias = rng.integers(0, 9, (N, E)).astype(np.float32), rng.integers(0, 3, E).astype(np.float32)
    sizes = (N, E, K, groups, int(rng.integers(1, groups + 1)), min(best, members), 1)
    found = run(harness, 7, threads, sizes, 2.5, scores, bias)
    ids, weights = found.view(np.int32)[: N * K].reshape(N, K), found[N * K :].reshape(N, K)
    chosen = np.take_along_axis(scores, ids, axis=1)
    np.testing.assert_allclose(weights, chosen / (chosen.sum(axis=1, keepdims=True) + 1e-20) * 2.5, rtol=1e-5)
    assert all(len(set(row)) == K for row in ids.tolist())
