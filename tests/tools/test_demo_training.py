"""The demo's training: experts that only gather, balance, optimizer, data order, and a run that resumes exactly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.config import load_config
from dsjax.model.parameter_table import parameter_table
from tools.demo import balance, optimizer
from tools.demo.checkpoint import restore, save
from tools.demo.data import UNIT, Batches
from tools.demo.experts import apply_experts, assign_slots
from tools.demo.step import initial_parameters, train_step
from tools.demo.train import FOLDER

TOKENS, WIDTH, EXPERTS, HIDDEN, K = 24, 8, 6, 5, 2


def plain(ids, gate_up, down, x, weights):
    both = jnp.einsum("td,tkdgf->tkgf", x, gate_up[ids])
    out = jnp.einsum("tkf,tkfd->tkd", jax.nn.silu(both[:, :, 0]) * both[:, :, 1], down[ids])
    return jnp.einsum("tkd,tk->td", out, weights)


def test_experts_and_all_their_gradients_equal_the_plain_product():
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :K].astype(np.int32))
    shapes = ((EXPERTS, WIDTH, 2, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (TOKENS, WIDTH), (TOKENS, K), (TOKENS, WIDTH))
    *arrays, probe = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    def loss(product):
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(product(*a) * probe), argnums=(0, 1, 2, 3)))(*arrays)

    one = loss(lambda gate_up, down, x, w: apply_experts(gate_up, down, x, ids, w, capacity_factor=EXPERTS))
    other = loss(lambda *a: plain(ids, *a))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), one, other)


def test_copies_over_capacity_are_dropped_in_token_order_and_balancing_lowers_the_bias_of_busy_experts():
    ids = jnp.zeros((12, 1), jnp.int32)  # every token to expert 0
    slots = assign_slots(ids, experts=3, capacity=5)
    assert slots.of_copy[:, 0].tolist() == [0, 1, 2, 3, 4] + [15] * 7
    assert slots.token.tolist() == [0, 1, 2, 3, 4] + [12] * 10
    loads = jnp.array([[6.0, 3.0, 0.0]])
    assert balance.move_bias(jnp.zeros((1, 3)), loads, 0.1)[0].tolist() == pytest.approx([-0.1, 0.0, 0.1])
    assert balance.max_violation(loads).tolist() == [1.0]


@pytest.mark.parametrize("shape", [(32, 8), (8, 32), (3, 16, 16)])
def test_muons_direction_has_singular_values_near_one(shape):
    matrix = jax.random.normal(jax.random.key(0), shape)
    values = np.linalg.svd(optimizer.orthogonalise(matrix), compute_uv=False)
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_gate_and_up_are_orthogonalised_apart():
    path = "dense_layers.mlp.gate_up.weight"
    params = {path: jnp.zeros((4, 2, 4))}
    gradient = {path: jnp.stack([jnp.eye(4), 100 * jnp.eye(4)], axis=1)}  # [D, 2, F]
    rest = optimizer.init_state(params), jnp.int32(0), jnp.float32(1), optimizer.Settings(weight_decay=0)
    moved = optimizer.update(params, gradient, *rest)[0][path]
    np.testing.assert_allclose(moved[:, 0], moved[:, 1], atol=1e-5)


def test_an_epoch_of_batches_shows_every_token_once_and_targets_follow_inputs():
    stream = np.arange(1, 11 * UNIT, dtype=np.uint16)
    batches = Batches(stream, batch_tokens=2 * UNIT, bos=0)
    seen = []
    for number, length in enumerate((UNIT // 2, UNIT // 2, UNIT, UNIT)):  # rows may change their length in mid-epoch
        rows = batches(2 * UNIT * number, length)
        assert rows.shape == (2 * UNIT // length, length + 2)
        assert (rows[:, 0] == 0).all()
        assert (np.diff(rows[:, 1:]) == 1).all()
        seen.append(rows[:, 1:-1].reshape(-1))
    tokens = np.concatenate(seen)
    assert len(np.unique(tokens)) == len(tokens) == 8 * UNIT


@pytest.fixture(scope="module")
def tiny():
    demo = load_config(FOLDER)
    sizes = {"hidden_size": 32, "vocab_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    config = dataclasses.replace(demo, **sizes, mla=dataclasses.replace(demo.mla, q_lora_rank=16))
    return config, parameter_table(config, weights="f32")


@pytest.fixture(scope="module")
def one_step(tiny):
    """`train_step` of the tiny model, compiled without optimisation: it runs a dozen times."""
    config, table = tiny
    kept = {"table": table, "config": config, "settings": optimizer.Settings(), "capacity_factor": 2.0}
    rows = np.random.default_rng(0).integers(0, 64, (4, 18)).astype(np.int32)
    numbers = (jnp.int32(0), jnp.float32(0.01), jnp.float32(0.3), jnp.float32(0.01))
    state = jax.eval_shape(lambda: (initial_parameters(table, 0), optimizer.init_state(initial_parameters(table, 0))))
    compiled = train_step.lower(*state, rows, *numbers, **kept).compile({"xla_backend_optimization_level": 0})

    def run(params, state, steps):
        for step in steps:
            params, state, measured = compiled(params, state, rows, jnp.int32(step), *numbers[1:])
        return params, state, measured

    return run


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one_and_learns(tiny, one_step, tmp_path):
    def fresh():
        params = initial_parameters(tiny[1], seed=0)
        return params, optimizer.init_state(params)

    whole, _, last = one_step(*fresh(), range(6))
    params, state, first = one_step(*fresh(), range(3))
    save(tmp_path, params, state, step=3, processor_seconds=1.5)
    params, state, step, seconds = restore(tmp_path)
    resumed, _, _ = one_step(params, state, range(step, 6))
    assert seconds == 1.5
    assert all(np.array_equal(whole[path], resumed[path]) for path in whole)
    assert float(last["loss"]) < float(first["loss"])
    assert float(last["mtp_loss"]) < float(first["mtp_loss"])
    assert np.any(np.asarray(whole["mtp.layers.moe.router.bias"])), "the MTP module's experts are balanced too"
