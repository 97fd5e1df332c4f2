"""The demo's conversion to sparse attention: what each stage changes, what it leaves, and the loss that the indexers learn by."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.our_model import COMPILE_QUICKLY

from dsjax.config import load_config
from dsjax.model.parameter_table import parameter_table
from dsjax.model.sparse import IndexProjections
from tools.demo.convert_sparse import SPARSE_FOLDER, convert_step, is_index, zero_moments
from tools.demo.step import attention_divergence, losses


@pytest.fixture(scope="module")
def tiny():
    demo = load_config(SPARSE_FOLDER)
    mla = dataclasses.replace(demo.mla, indexer=dataclasses.replace(demo.mla.indexer, topk=5))
    sizes = {"hidden_size": 32, "vocab_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    config = dataclasses.replace(demo, **sizes, mla=mla)
    table = parameter_table(config, weights="f32")
    rows = np.random.default_rng(0).integers(0, 64, (2, 18)).astype(np.int32)
    return config, table, rows


def drawn(table, seed: int) -> dict[str, jax.Array]:
    """Parameters. NumPy draws them, since `initial_parameters` compiles a program for each shape."""
    rng, params = np.random.default_rng(seed), {}
    for path, info in table.infos.items():
        fixed = {"ones": np.ones, "zeros": np.zeros}.get(info.init)
        params[path] = fixed(info.shape) if fixed else rng.normal(scale=0.2, size=info.shape)
    return {path: jnp.asarray(value, jnp.float32) for path, value in params.items()}


@pytest.fixture(scope="module")
def trained(tiny):
    """Parameters before and after a few steps of each stage, and the losses of each step."""
    config, table, rows = tiny
    found = {}
    for sparse in (False, True):
        params, rates = drawn(table, seed=0), (jnp.float32(0.01), jnp.float32(0.001))
        before, state, measured = jax.device_get(params), jax.jit(zero_moments)(params), []
        kept = {"table": table, "config": config, "sparse": sparse, "capacity_factor": 4.0}
        lowered = convert_step.lower(params, state, rows, jnp.int32(0), *rates, **kept)
        compiled = lowered.compile(COMPILE_QUICKLY)
        for step in range(8):
            params, state, one = compiled(params, state, rows, jnp.int32(step), *rates)
            measured.append(jax.device_get(one))
        found[sparse] = before, jax.device_get(params), measured
    return found


def changed(before, after) -> set[str]:
    return {path for path in before if not np.array_equal(before[path], after[path])}


@pytest.mark.slow
def test_the_first_stage_trains_indexers_and_nothing_else(trained):
    before, after, measured = trained[False]
    assert changed(before, after) == {path for path in before if is_index(path)}
    assert measured[-1]["index_loss"] < measured[0]["index_loss"]
    assert measured[-1]["loss"] == measured[0]["loss"], "attention is dense, and frozen"
    assert measured[0]["loss"] != trained[True][2][0]["loss"], "there each of 17 tokens chooses 5"


@pytest.mark.slow
def test_the_second_stage_trains_everything_but_the_correction_biases(trained):
    before, after, measured = trained[True]
    assert changed(before, after) == {path for path in before if not path.endswith("router.bias")}
    assert measured[-1]["loss"] < measured[0]["loss"]
    assert measured[-1]["index_loss"] < measured[0]["index_loss"]


@pytest.mark.slow
def test_no_gradient_passes_between_indexers_and_the_rest(tiny):
    _, table, rows = tiny
    params = drawn(table, seed=1)

    def both(params):
        found, _ = losses(params, table, rows, lambda w, x, ids, weights: x, attention_divergence, unroll=False)
        return jnp.stack([found["loss"], found["index_loss"]])

    of_both = jax.jit(jax.jacrev(both), compiler_options=COMPILE_QUICKLY)(params)
    text, index = ({path: both[row] for path, both in of_both.items()} for row in (0, 1))
    assert not any(np.any(text[path]) for path in params if is_index(path))
    assert not any(np.any(index[path]) for path in params if not is_index(path))
    assert all(np.any(index[path]) for path in params if is_index(path) and not path.startswith("mtp"))


def test_the_divergence_is_of_attention_from_the_scores_over_what_is_seen():
    rng = np.random.default_rng(0)
    B, H, Q, S, I, A, start = 2, 3, 4, 7, 2, 8, 3
    index = IndexProjections(
        *(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((B, S, I, A), (B, S, I), (B, S, A)))
    )
    seen = (np.arange(start, S)[:, None] >= np.arange(S)) & (rng.random((Q, S)) < 0.7) | np.eye(Q, S, start, dtype=bool)
    shares = np.where(seen, rng.random((B, H, Q, S)), 0)
    shares /= shares.sum(axis=-1, keepdims=True)
    found = float(attention_divergence(index, slice(start, S), jnp.asarray(seen), jnp.asarray(shares, jnp.float32)))
    total = 0.0
    for b in range(B):
        for q in range(Q):
            t = start + q
            products = np.maximum(np.asarray(index.query)[b, t] @ np.asarray(index.key)[b].T * A**-0.5, 0)
            scores = np.where(seen[q], np.asarray(index.weight)[b, t] @ products, -np.inf)
            softmax = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            target = shares[b, :, q].mean(axis=0)
            total += sum(target[s] * np.log(target[s] / softmax[s]) for s in range(S) if target[s])
    assert found == pytest.approx(total, rel=1e-5)
