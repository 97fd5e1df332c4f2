"""How much of the context attention reads at once, by platform and by what its scores take."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.config import load_config
from dsjax.model.attention import BLOCK_BYTES, LONGEST_BLOCK, SHORTEST_BLOCK, PagedMLA
from sharding import MeshSpec, Rules


def attention(platform: str, mesh: str, **options) -> PagedMLA:
    spec, devices = MeshSpec.parse(mesh), np.array([SimpleNamespace(platform=platform)])
    built = SimpleNamespace(devices=devices, shape=dict(zip(spec.axes, spec.shape, strict=True)))
    return PagedMLA(built, Rules.for_mesh(spec), load_config("deepseek-v3"), "joined", jnp.bfloat16, **options)


@pytest.mark.parametrize(
    ("mesh", "rows", "chunk", "expected"),
    [
        ("dp=32", 32, 1, LONGEST_BLOCK),  # 16 kB of scores a position
        ("dp=32", 512, 1, 1024),  # 256 kB a position: exactly the bound
        ("dp=32", 1024, 1, 512),
        ("dp=32", 8, 256, 256),  # a prefill: 1 MB a position
        ("dp=4,tp=8", 8, 256, LONGEST_BLOCK),  # a rank's 16 heads: 128 kB a position
        ("dp=32", 256, 256, SHORTEST_BLOCK),  # more than the bound, which cannot be held
    ],
)
def test_blocks_are_as_long_as_their_scores_allow_on_accelerators(mesh, rows, chunk, expected):
    found = attention("gpu", mesh).block(rows, chunk)
    assert found == expected
    heads = 128 // MeshSpec.parse(mesh).tp_size
    assert 4 * rows * chunk * heads * found <= BLOCK_BYTES or found == SHORTEST_BLOCK


def test_blocks_stay_short_on_a_cpu_and_where_it_is_said():
    assert attention("cpu", "dp=32").block(1, 1) == SHORTEST_BLOCK
    assert attention("gpu", "dp=32", block_tokens=64).block(1, 1) == 64
