"""The safetensors reader and writer: exact, zero-copy, and closed to damaged files."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.safetensors import DTYPES, SafetensorsFile, TensorSpec, write_file


def every_dtype() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    most = {name: 2 if name == "BOOL" else 100 for name in DTYPES}
    draw = lambda name, dtype: rng.integers(0, most[name], (3, 5 * dtype.itemsize), np.uint8).view(dtype)  # noqa: E731
    return {name: draw(name, dtype) for name, dtype in DTYPES.items()}


def write(path, tensors):
    write_file(path, {n: TensorSpec(t.dtype, t.shape) for n, t in tensors.items()}, tensors.__getitem__)
    return path


def write_raw(path, header, data: bytes = b"", length: int | None = None):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data)
    return path


def entry(start=0, stop=8, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


ENTRY = json.dumps(entry())


def test_every_dtype_comes_back_to_the_bit(tmp_path):
    tensors = every_dtype() | {"scalar": np.float32(7).reshape(()), "empty": np.zeros((0, 4), np.float32)}
    file = SafetensorsFile(write(tmp_path / "a.safetensors", tensors))
    assert set(file) == set(tensors)
    for name, expected in tensors.items():
        assert (file[name].dtype, file[name].shape) == (expected.dtype, expected.shape)
        assert file[name].tobytes() == expected.tobytes()


def test_tensors_are_read_only_views_of_one_map(tmp_path):
    file = SafetensorsFile(write(tmp_path / "a.safetensors", {"x": np.arange(1000, dtype=np.float32)}))
    assert np.shares_memory(file["x"], file["x"])
    assert not file["x"].flags.writeable


def test_the_safetensors_package_reads_our_files_and_we_read_its(tmp_path):
    package = pytest.importorskip("safetensors.numpy")
    tensors = {n: t for n, t in every_dtype().items() if n in ("F32", "F16", "I64", "U8", "BOOL")}
    theirs = package.load_file(write(tmp_path / "ours.safetensors", tensors))
    package.save_file(tensors, tmp_path / "theirs.safetensors")
    ours = SafetensorsFile(tmp_path / "theirs.safetensors")
    for name, expected in tensors.items():
        np.testing.assert_array_equal(theirs[name], expected)
        np.testing.assert_array_equal(ours[name], expected)


def test_a_write_that_fails_leaves_no_file(tmp_path):
    def fetch(name):
        if name == "b":
            raise RuntimeError("source failed")
        return np.zeros(4, np.float32)

    spec = TensorSpec(np.dtype(np.float32), (4,))
    with pytest.raises(RuntimeError, match="source failed"):
        write_file(tmp_path / "a.safetensors", {"a": spec, "b": spec}, fetch)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(b"\x10\0"), "too short for a safetensors header"),
        (lambda p: write_raw(p, {}, length=1 << 60), "over the limit"),
        (lambda p: write_raw(p, {}, length=5000), "header is 5,000 bytes, but the file is 10 bytes: truncated"),
        (lambda p: write_raw(p, b"{not json"), "not JSON"),
        (lambda p: write_raw(p, b"\xff\xfe{}"), "not JSON"),
        (lambda p: write_raw(p, b"[1]"), "JSON list, expected an object"),
        (lambda p: write_raw(p, b"[" * 200_000), "not JSON"),
        (lambda p: write_raw(p, f'{{"x": {ENTRY}, "x": {ENTRY}}}'.encode(), b"\0" * 8), "names 'x' twice"),
        (lambda p: write_raw(p, {"x": entry()}, b"\0" * 7), "truncated: its tensors need 8 bytes .* found 7"),
        (lambda p: write_raw(p, {"x": entry()}, b"\0" * 9), "1 bytes after its last tensor"),
        (lambda p: write_raw(p, {"x": entry(), "y": entry(4, 12)}, b"\0" * 12), r"y: offsets \[4, 12\] overlap x"),
        (lambda p: write_raw(p, {"x": entry(), "y": entry(12, 20)}, b"\0" * 20), r"bytes \[8, 12\] .* belong to no"),
        (lambda p: write_raw(p, {"x": entry(shape=(3,))}, b"\0" * 8), r"x: float32\[3\] is 12 bytes, but .* hold 8"),
        (lambda p: write_raw(p, {"x": entry(dtype="F4")}, b"\0" * 8), "x: dtype 'F4' is not one of"),
        (lambda p: write_raw(p, {"x": entry(shape=(-2,))}, b"\0" * 8), "non-negative integers"),
        (lambda p: write_raw(p, {"x": entry(start=8, stop=0)}, b"\0" * 8), "start ≤ stop"),
        (lambda p: write_raw(p, {"x": 3}), "expected an object with dtype"),
        (lambda p: write_raw(p, {"x": entry(dtype=["F32"])}, b"\0" * 8), "is not one of"),
        (lambda p: write_raw(p, {"x": entry(stop=0, shape=(2**70, 0))}), "below 2\\^63"),
        (lambda p: write_raw(p, b'{"x": ' + b"9" * 5000 + b"}"), "not JSON"),
    ],
)
def test_a_damaged_file_is_a_clear_error(tmp_path, damage, message):
    damage(tmp_path / "bad.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(tmp_path / "bad.safetensors")
    assert str(caught.value).count("bad.safetensors") == 1


def test_all_faults_of_a_header_are_listed_at_once(tmp_path):
    header = {"x": entry(shape=(3,)), "y": entry(8, 16, dtype="F4"), "z": entry(4, 12)}
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(write_raw(tmp_path / "bad.safetensors", header, b"\0" * 12))
    assert len(caught.value.problems) == 3


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**6), replacement=st.binary(min_size=1, max_size=4))
def test_whatever_bytes_a_header_holds_it_opens_or_is_a_checkpoint_error(tmp_path, position, replacement):
    path = write(tmp_path / "a.safetensors", {"x": np.zeros((2, 3), np.float32), "y": np.ones(4, np.uint8)})
    content = bytearray(path.read_bytes())
    start = position % (len(content) - 28)
    content[start : start + len(replacement)] = replacement
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    for name in file:
        assert file[name].shape == file.specs[name].shape
