"""What the indexer makes of a token, and what index queries and keys go through before they are multiplied."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.linalg import hadamard

from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.model.parameter_counts import attention_parameters
from dsjax.model.parameter_table import abstract_parameters
from dsjax.model.parameters import Declaration, multiply
from dsjax.model.rope import Rotation
from dsjax.model.sparse import IndexScores
from dsjax.model.sparse.indexer import Indexer
from sharding import fp8

V32 = load_config("deepseek-v3.2")
SMALL = dataclasses.replace(
    V32.mla, q_lora_rank=8, qk_rope_head_dim=4, indexer=dataclasses.replace(V32.mla.indexer, n_heads=1, head_dim=8)
)


def test_rotation_is_the_product_with_a_hadamard_matrix():
    x = np.random.default_rng(0).standard_normal((3, 2, 128)).astype(np.float32)
    found = np.asarray(IndexScores(fp8=True).rotate(jnp.asarray(x)))
    np.testing.assert_allclose(found, x @ hadamard(128) / 128**0.5, atol=1e-5)


@pytest.mark.parametrize(("model", "pairs"), [("deepseek-v3.2", ((0, 2), (1, 3))), ("glm-5", ((0, 1), (2, 3)))])
def test_a_family_rotates_index_queries_in_pairs_of_its_own(model, pairs):
    """All first elements of the pairs come first, then all second ones; what is not rotated stays."""
    config = dataclasses.replace(load_config(model), hidden_size=8, mla=SMALL)
    indexer = Indexer(Declaration("f32", "cpu"), config)
    for name in ("query", "key"):
        matrix = getattr(indexer, name)
        matrix.weight = nnx.Param(jnp.eye(8), info=matrix.weight.info)
    for name, value in (("scale", 1.0), ("bias", 0.0)):
        setattr(indexer.key_norm, name, nnx.Param(jnp.full(8, value), info=getattr(indexer.key_norm, name).info))
    indexer.head_weights.weight = nnx.Param(jnp.zeros((8, 1)), info=indexer.head_weights.weight.info)
    q = np.arange(1.0, 9.0, dtype=np.float32)
    rotation = Rotation.at(jnp.array([3]), config.rope, 4)
    found = indexer(jnp.ones((1, 8)), jnp.asarray(q[None]), rotation, multiply).query[0, 0]
    (a, b), (cos, sin) = np.transpose(pairs), (np.asarray(rotation.cos[0]), np.asarray(rotation.sin[0]))
    expected = [q[a] * cos - q[b] * sin, q[b] * cos + q[a] * sin, q[4:]]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-6)


@pytest.mark.parametrize("powers", [False, True])
def test_queries_in_fp8_are_numbers_of_fp8_times_a_scale(powers):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((5, 2, 8)), jnp.float32)
    found = np.asarray(IndexScores(fp8=True, powers=powers).query(x))
    values, scale = fp8.quantise(IndexScores(fp8=True).rotate(x), powers=powers)
    np.testing.assert_array_equal(found, np.asarray(values, np.float32) * np.asarray(scale))
    assert not np.array_equal(found, x)
    assert bool(np.all(np.log2(np.asarray(scale)) % 1 == 0)) == powers


def test_what_an_option_means_is_said_where_it_cannot_be():
    assert IndexScores.parse("fp8", 128, True) == IndexScores(True, True)
    assert IndexScores.parse("float", None, False) == IndexScores()
    assert IndexScores.parse("fp4", 128, True, published="fp4") == IndexScores(powers=True, fp4=True)
    with pytest.raises(UserError, match="rounds this model's index queries and keys to fp8"):
        IndexScores.parse("fp4", 128, False)
    with pytest.raises(UserError, match="has no indexer"):
        IndexScores.parse("fp8", None, False)
    with pytest.raises(UserError, match="power of two"):
        IndexScores.parse("fp8", 96, False)


def test_the_indexers_parameters_are_as_many_as_are_counted_and_in_fp8_where_the_checkpoint_has_them_so():
    infos = abstract_parameters(V32)
    one = [info.shape[1:] for path, info in infos.items() if path.startswith("moe_layers.attn.indexer.")]
    assert sum(int(np.prod(shape)) for shape in one) == attention_parameters(V32) - attention_parameters(
        load_config("deepseek-v3")
    )
    infos = abstract_parameters(V32, weights="fp8")
    stem = "dense_layers.attn.indexer."
    kept = {path.removeprefix(stem): info.dtype.name for path, info in infos.items() if path.startswith(stem)}
    assert kept == {
        "query.weight": "float8_e4m3fn", "query.scale": "float32", "key.weight": "float8_e4m3fn", "key.scale": "float32",
        "key_norm.scale": "bfloat16", "key_norm.bias": "bfloat16", "head_weights.weight": "bfloat16",
    }  # fmt: skip
