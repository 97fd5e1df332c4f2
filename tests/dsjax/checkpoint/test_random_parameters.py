"""Random parameters: what `load` would give in shape and place, and a function of the seed alone."""

import jax
import numpy as np
import pytest

from dsjax.checkpoint.load import load
from dsjax.checkpoint.random import random_parameters
from sharding import MeshSpec, Rules


def draw(config, mesh_text, **options):
    spec = MeshSpec.parse(mesh_text)
    return random_parameters(config, spec.build(), Rules.for_mesh(spec), **options)


@pytest.mark.parametrize("weights", ["f32", "bf16", "fp8"])
def test_they_stand_where_loaded_ones_would(tiny_config, checkpoints, weights):
    spec = MeshSpec.parse("dp=4")
    loaded = load(tiny_config, checkpoints("fp8")[0], spec.build(), Rules.for_mesh(spec), weights=weights)
    drawn = draw(tiny_config, "dp=4", weights=weights)
    abstract = jax.tree.map(lambda array: (array.shape, array.dtype, array.sharding), loaded)
    assert jax.tree.map(lambda array: (array.shape, array.dtype, array.sharding), drawn) == abstract


def test_the_mesh_does_not_change_them_and_the_seed_does(tiny_config):
    whole = draw(tiny_config, "dp=1", weights="f32", seed=3)
    for mesh in ("dp=2,tp=4", "tp=8,ep=1"):
        for path, array in draw(tiny_config, mesh, weights="f32", seed=3).items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(whole[path]), err_msg=path)
    other = draw(tiny_config, "dp=1", weights="f32", seed=4)
    assert not np.array_equal(other["head.weight"], whole["head.weight"])


def test_a_matrix_has_the_spread_of_its_fan_in_in_every_format(tiny_config):
    """152 × 544 normal values: their standard deviation is known to 1 / √(2 × 82,688) = 0.25 %; 2 % is 8 of those."""
    for weights in ("f32", "fp8"):
        params = draw(tiny_config, "dp=1", weights=weights)
        matrix = np.asarray(params["dense_layers.mlp.gate_up.weight"])
        if weights == "fp8":
            import ml_dtypes

            matrix = matrix.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            matrix = matrix * np.asarray(params["dense_layers.mlp.gate_up.scale"]).max()
        assert abs(matrix.std() * np.sqrt(152) - 1) < 0.02
    assert (np.asarray(params["final_norm.scale"]).view(np.uint16) == 0x3F80).all()


def test_no_two_layers_or_experts_are_alike(tiny_config):
    down = np.asarray(draw(tiny_config, "dp=1", weights="f32")["moe_layers.moe.experts.down.weight"])
    flat = down.reshape(-1, *down.shape[2:])
    assert len({block.tobytes() for block in flat}) == 16
