"""The kernels outside JAX, under the address, undefined-behaviour and thread sanitizers, on cases of all shapes."""

import os
import struct
import subprocess
import tempfile

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
def harness(request):
    """The stand-alone program; built once for a version of the sources."""
    command = build.compiler()
    if command is None:
        pytest.skip("no C++ compiler")
    path = cache_folder() / "native" / f"harness-{build.source_version()}-{request.param.split(',')[0]}"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        # Without optimisation: as many checks, and a third of -O1's time to compile; the cases are small.
        flags = ["-std=c++17", "-O0", "-g1", "-march=native", "-w", "-fno-sanitize-recover=all", "-pthread"]
        files = [build.SOURCES / "harness.cc", "-o", unfinished]
        made = [*command, *flags, f"-fsanitize={request.param}", *files]
        done = subprocess.run(made, capture_output=True, text=True)
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
@given(**EXPERTS, threads=THREADS, pieces=st.sampled_from([1, 4]), apart=st.booleans())
def test_experts(harness, X, D, F, N, K, stored, threads, pieces, apart, **drawn):
    case = ExpertsCase.drawn(X=X, D=D, F=F, N=N, K=K, stored=stored, **drawn)
    arrays = (case.gate_up, case.down, *(case.scales or ()), case.rows, case.ids, case.weights)
    sizes = (2, X, D, F, N, K, stored, D, pieces if F % pieces == 0 else 1, apart, 0, False)
    found = run(harness, 0, threads, sizes, 0.0, *arrays)
    case.assert_near(found.reshape(N, K, D).sum(axis=1) if apart else found)


@FEW
@given(
    **drawn_from(form=FORMATS.values(), D=range(1, 6), F=range(1, 6), N=[1, 2, 60], pieces=[1, 4, 8]), threads=THREADS
)
def test_experts_in_fp4(harness, seed, form, D, F, N, threads, pieces):
    D, F = D * form.block, F * form.block
    case = ExpertsCase.drawn(seed, X=3, D=D, F=F, N=N, K=2)
    packed, numbers = case.in_fp4(form)
    parts = ("weight", "scale", "global_scale")[: 3 if form.has_global else 2]
    weights = [packed[f"{name}.{part}"][1] for part in parts for name in ("gate_up", "down")]
    sizes = (1, 3, D, F, N, 2, 1, D, pieces, False, form.block, form.integers)
    found = run(harness, 0, threads, sizes, 0.0, *weights, case.rows, case.ids, case.weights)
    numbers.assert_near(found)


@FEW
@given(**DENSE, N=st.sampled_from([1, 3, 8, 9, 100]), pieces=st.sampled_from([1, 4, 8]), threads=THREADS)
def test_dense(harness, N, pieces, threads, **drawn):
    case, K = DenseCase.drawn(N=N, **drawn), drawn["K"]
    parts = 1 if case.transposed else drawn["parts"]
    pieces = pieces if K % pieces == 0 else 1
    sizes = (2, K, parts, drawn["width"], N, case.weight.itemsize, pieces, case.transposed)
    case.assert_near(run(harness, 3, threads, sizes, 0.0, case.weight, *given_arrays(case.scale), case.rows))


def given_arrays(*arrays):
    return [array for array in arrays if array is not None]


@FEW
@given(**ATTENTION, form=st.sampled_from(["absorbed", "expanded"]), threads=THREADS)
def test_attention(harness, form, threads, stored, holes, **drawn):
    case = AttentionCase.drawn(**drawn, stored=stored, holes=holes)
    sizes = [drawn[name] for name in "RCHNOUM"]
    sizes += [case.tables.shape[1], *case.latent.shape[:3], stored, holes]
    arrays = given_arrays(case.q_nope, case.q_rope, case.weights, case.latent, case.scales, case.rope,
                          case.start, case.length, case.tables, case.filled)  # fmt: skip
    found = run(harness, 2 if form == "expanded" else 1, threads, sizes, case.scale, *arrays)
    expected = case.expected()
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=2e-4, rtol=2e-4)


@FEW
@given(**INDEX, threads=THREADS)
def test_index_choice(harness, threads, **drawn):
    case = IndexCase.drawn(**drawn)
    R, C, I, A, k, G = (drawn[name] for name in "RCIAkG")
    sizes = (R, C, I, A, k, drawn["pages"], *case.keys.shape[:2], G, drawn["stored"], int(drawn["holes"]))
    arrays = given_arrays(case.query, case.weight, case.keys, case.scale, case.positions, case.tables, case.filled)
    found = run(harness, 4, threads, sizes, 0.0, *arrays).view(np.int32)
    case.assert_chosen(found[: R * C * k])


@FEW
@given(**drawn_from(programs=[1, 2], ranks=range(1, 6), width=[0, 1, 40], gathers=[False, True]))
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
    case = case.first(programs * ranks * N)
    apart = (array[0].reshape(ranks, held, *array.shape[2:]) for array in (case.gate_up, case.down))
    weights = [np.pad(array, [(0, 0), (0, behind), *[(0, 0)] * (array.ndim - 2)]) for array in apart]
    sizes = (programs, ranks, X, D, F, N, K, held, times)
    return case, (6, threads, sizes, 0.0, *weights, case.rows, case.ids, case.weights)


@FEW
@given(**drawn_from(
    programs=[1, 2], ranks=range(1, 5), held=[1, 2, 3], behind=[0, 1], N=[0, 1, 6], K=[1, 2, 3], threads=[1, 2]
))  # fmt: skip
def test_experts_of_several_devices_together(harness, seed, programs, ranks, held, behind, N, K, threads):
    """The programs run at the same time, and their devices make their next rows as soon as they go on."""
    case, arguments = together(seed, programs, ranks, held, N, K, behind=behind, threads=threads)
    case.ids[case.ids < 0] = ranks * held  # as an expert that nobody has
    found = run(harness, *arguments)
    case.ids[case.ids == ranks * held] = -1
    sums, counts = np.split(found, [case.rows.size])
    case.assert_near(sums)
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
@given(**drawn_from(N=[1, 5, 130], groups=[1, 3, 4], members=range(1, 10), best=[1, 2], threads=[1, 2, 3]))
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
