"""Hyper-connections: a token's streams as it would have them alone, by the native kernels and in JAX."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from v4_models import v4_config

from dsjax.config import ModelConfig
from dsjax.model.compressed.streams import Streams
from dsjax.model.parameters import Declaration, ParameterTable
from sharding import MeshSpec


def streams(n, *, ends=False, width=37, seed=0, **options):
    """A connection of n streams of this width, with random parameters."""
    config = ModelConfig.from_dict(v4_config("w", hc_mult=n, hidden_size=width, **options))
    table = ParameterTable.of(Streams(Declaration("f32", "cpu"), config, ends=ends))
    rng = np.random.default_rng(seed)
    return table.bind({path: np.float32(rng.normal(0, 0.1, info.shape)) for path, info in table.infos.items()})


def through(connection, x, y):
    """What a block reads, and the streams after it."""

    def run(x, y):
        read, mix = connection.pre(x)
        return read, connection.post(x, mix, y)

    return [np.asarray(found) for found in jax.jit(run)(x, y)]


def by_kernels(connection, kernels, mesh="dp=1"):
    return connection.with_kernels(kernels.native, MeshSpec.parse(mesh).build(), P())


def tokens(n, count, width=37, seed=1):
    rng = np.random.default_rng(seed)
    return (rng.normal(0, 2, shape).astype(np.float32) for shape in ((1, count, n, width), (1, count, width)))


@pytest.mark.parametrize(("n", "options"), [(1, {}), (2, {"hc_eps": 0.1, "hc_sinkhorn_iters": 1}), (4, {})])
def test_kernels_give_what_the_plain_form_gives(kernels, n, options):
    x, y = tokens(n, 40)
    plain = streams(n, **options)
    for found, expected in zip(through(by_kernels(plain, kernels), x, y), through(plain, x, y), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    end = streams(n, ends=True)
    np.testing.assert_allclose(by_kernels(end, kernels).leave(x), end.leave(x), rtol=1e-5, atol=1e-5)


def test_a_token_alone_has_the_bits_of_it_among_others(kernels):
    connection = by_kernels(streams(4), kernels)
    x, y = tokens(4, 40)
    together = through(connection, x, y)
    for token in (0, 15, 16, 39):
        alone = through(connection, x[:, token : token + 1], y[:, token : token + 1])
        for one, among in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[:, 0], among[:, token])


def test_streams_are_mixed_without_loss(kernels):
    connection = by_kernels(streams(4), kernels)
    x, y = tokens(4, 5)
    _, after = through(connection, x, np.zeros_like(y))
    # Each row and column of the mixing matrix adds up to 1.
    np.testing.assert_allclose(after.sum(axis=2), x.sum(axis=2), rtol=1e-3, atol=1e-3)
    same = np.broadcast_to(x[:, :, :1], x.shape)
    np.testing.assert_allclose(through(connection, same, np.zeros_like(y))[1], same, rtol=1e-3, atol=1e-3)
