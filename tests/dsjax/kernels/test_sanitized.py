"""The kernels outside JAX, under the address, undefined-behaviour and thread sanitizers, on cases of all shapes."""

import struct
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import AttentionCase, ExpertsCase

from dsjax.engine.device.process import cache_folder
from dsjax.kernels import build

SANITIZERS = ("address,undefined", "thread")
FEW = settings(max_examples=20, deadline=None, derandomize=True)


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
            "-g",
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
        if done.returncode:
            pytest.skip(f"this compiler has no {request.param} sanitizer: {done.stderr[-200:]}")
        unfinished.replace(path)
    return path


def run(harness, kernel, threads, sizes, scale, *arrays):
    head = struct.pack(f"={3 + len(sizes)}qf", kernel, threads, len(sizes), *sizes, scale)
    case = head + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    done = subprocess.run([str(harness)], input=case, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return np.frombuffer(done.stdout, np.float32)


@pytest.mark.slow
@FEW
@given(
    seed=st.integers(0, 2**31),
    X=st.integers(1, 6),
    D=st.sampled_from([1, 8, 37, 130, 300]),
    F=st.sampled_from([1, 7, 32, 140]),
    N=st.sampled_from([1, 5, 70]),
    K=st.integers(1, 3),
    stored=st.sampled_from([4, 2, 1]),
    routing=st.sampled_from(["all", "some", "one expert", "none"]),
    threads=st.sampled_from([1, 2, 4]),
)
def test_experts(harness, seed, X, D, F, N, K, stored, routing, threads):
    case = ExpertsCase.drawn(seed, X=X, D=D, F=F, N=N, K=K, stored=stored, routing=routing)
    arrays = (case.gate_up, case.down, *(case.scales or ()), case.rows, case.ids, case.weights)
    found = run(harness, 0, threads, (2, X, D, F, N, K, stored, D), 0.0, *arrays)
    expected, size = case.expected()
    assert np.all(np.abs(found.reshape(expected.shape) - expected) <= 1e-6 * (D + F) ** 0.5 * (size + 1))


@FEW
@given(
    seed=st.integers(0, 2**31),
    R=st.integers(1, 4),
    C=st.sampled_from([1, 3, 50]),
    H=st.integers(1, 8),
    widths=st.tuples(*(st.integers(1, 40) for _ in "NOU"), st.sampled_from([1, 16, 37, 128, 140])),
    G=st.sampled_from([1, 4, 16]),
    longest=st.sampled_from([1, 64, 150]),
    stored=st.sampled_from([4, 2, 1]),
    form=st.sampled_from(["absorbed", "latent", "expanded"]),
    threads=st.sampled_from([1, 2, 4]),
    holes=st.booleans(),
)
def test_attention(harness, seed, R, C, H, widths, G, longest, stored, form, threads, holes):
    N, O, U, M = widths
    absorbs = form != "latent"
    drawn = {"R": R, "C": C, "H": H, "N": N, "O": O, "U": U, "M": M, "G": G, "longest": longest}
    case = AttentionCase.drawn(seed, **drawn, stored=stored, absorbs=absorbs, holes=holes)
    sizes = (R, C, H, N, O, U, M, case.tables.shape[1], *case.latent.shape[:3], stored, absorbs, holes)
    arrays = [case.q_nope, case.q_rope, *([case.weights] if absorbs else []), case.latent]
    arrays += [case.rope] if case.scales is None else [case.scales, case.rope]
    found = run(
        harness,
        2 if form == "expanded" else 1,
        threads,
        sizes,
        case.scale,
        *arrays,
        case.start,
        case.length,
        case.tables,
        *([case.filled] if holes else []),
    )
    expected = case.expected()
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=2e-4, rtol=2e-4)
