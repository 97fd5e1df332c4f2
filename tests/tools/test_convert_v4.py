"""The demo's conversion to DeepSeek-V4: which experts a token's id gets, and attention that does what MLA did."""

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.config import load_config
from dsjax.model.parameter_table import parameter_table
from dsjax.model.transformer import Pass, XlaProducts, rotation_at
from tools.demo.convert_v4 import V4_FOLDER, hash_table, layer_of, of_attention
from tools.demo.train import FOLDER


def test_frequent_tokens_get_the_experts_that_they_went_to_and_none_gets_too_many():
    counts = np.array([[6.0, 4, 2, 0], [30, 20, 10, 0], [3, 2, 1, 0]])
    table = hash_table(counts, chosen=2, slack=1.5)
    assert table[1].tolist() == [0, 1], "the second token comes first"
    assert sorted(table[0].tolist()) == [2, 3], "experts 0 and 1 have 30 of the 29.25 that they may"
    counts = np.random.default_rng(0).random((512, 16))
    table, tokens = hash_table(counts, chosen=4), counts.sum(axis=1) / 4
    assert all(len(set(row)) == 4 for row in table.tolist())
    loads = np.bincount(table.reshape(-1), weights=np.repeat(tokens, 4), minlength=16)
    assert loads.max() <= 1.15 * loads.mean()


def drawn(table, attention: str) -> dict[str, jax.Array]:
    """Random parameters of one layer's attention; all others are zeros."""
    rng, params = np.random.default_rng(0), {}
    for path, info in table.infos.items():
        fixed = np.ones if info.init == "ones" else np.zeros
        own = path.startswith(attention) and info.init == "normal"
        value = rng.normal(scale=info.shape[-2] ** -0.5, size=info.shape) if own else fixed(info.shape)
        params[path] = jnp.asarray(value, info.dtype)
    return params


def test_converted_attention_gives_about_what_mla_gives():
    """Not exactly: queries and entries are normed otherwise, and 64 latents and 16 rotary values become 64."""
    dense, config = load_config(FOLDER), load_config(V4_FOLDER)
    table, positions = parameter_table(dense, weights="f32"), jnp.arange(96)[None]
    layer = layer_of(table.bind(drawn(table, "dense_layers.attn.")).dense_layers, 0)
    h = jnp.asarray(np.random.default_rng(1).normal(size=(1, 96, 256)), jnp.float32)
    given = Pass(positions, rotation_at(dense, positions), XlaProducts())
    made = of_attention(layer.attn, h, given.rotation, config.v4.head_dim, config.softmax_scale)
    made |= {"q_a.weight": layer.attn.q_a.value(h.dtype), "q_a_norm.scale": layer.attn.q_a_norm.scale[...]}
    table = parameter_table(config, weights="f32")
    params = drawn(table, "none") | {f"window_hash_0.attn.{name}": value[None] for name, value in made.items()}
    converted = layer_of(table.bind(params).window_hash_0, 0).attn
    found = converted(h, given._replace(rotation=rotation_at(config, positions)))[0]
    expected = layer.attn(h, given)[0]
    assert np.corrcoef(found.reshape(-1), expected.reshape(-1))[0, 1] > 0.8
    assert 0.8 < jnp.linalg.norm(found) / jnp.linalg.norm(expected) < 1.25
