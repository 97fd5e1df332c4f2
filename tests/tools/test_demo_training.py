"""The demo's training: experts that only gather, balance, optimizer, data order, and a run that resumes exactly."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.config import load_config
from dsjax.model.transformer import parameter_table
from tools.demo import balance, optimizer
from tools.demo.checkpoint import restore, save
from tools.demo.data import UNIT, Batches
from tools.demo.experts import apply_experts, assign_slots
from tools.demo.schedule import Schedule
from tools.demo.step import initial_parameters, train_step
from tools.demo.train import FOLDER, Meter

TOKENS, WIDTH, EXPERTS, HIDDEN, K = 24, 8, 6, 5, 2


def case(seed: int):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :K].astype(np.int32)
    shapes = ((EXPERTS, WIDTH, 2, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (TOKENS, WIDTH), (TOKENS, K))
    return jnp.asarray(ids), [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def plain(ids, gate_up, down, x, weights):
    both = jnp.einsum("td,tkdgf->tkgf", x, gate_up[ids])
    out = jnp.einsum("tkf,tkfd->tkd", jax.nn.silu(both[:, :, 0]) * both[:, :, 1], down[ids])
    return jnp.einsum("tkd,tk->td", out, weights)


def test_experts_and_all_their_gradients_equal_the_plain_product():
    ids, arrays = case(0)
    probe = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH))

    def loss(product):
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(product(*a) * probe), argnums=(0, 1, 2, 3)))(*arrays)

    one = loss(lambda gate_up, down, x, w: apply_experts(gate_up, down, x, ids, w, capacity_factor=EXPERTS))
    other = loss(lambda *a: plain(ids, *a))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), one, other)


def test_copies_over_capacity_are_dropped_in_token_order_and_nothing_else():
    ids = jnp.zeros((12, 1), jnp.int32)  # every token to expert 0
    slots = assign_slots(ids, experts=3, capacity=5)
    assert slots.of_copy[:, 0].tolist() == [0, 1, 2, 3, 4] + [15] * 7
    assert slots.token.tolist() == [0, 1, 2, 3, 4] + [12] * 10


def test_dropped_share_is_what_the_slots_drop():
    ids, _ = case(1)
    loads = balance.expert_loads(ids[None, None], EXPERTS)
    slots = assign_slots(ids, EXPERTS, capacity=6)
    assert float(balance.dropped_share(loads, 6)) == pytest.approx(float(jnp.mean(slots.of_copy == EXPERTS * 6)))


def test_balancing_lowers_the_bias_of_busy_experts_and_max_violation_is_relative():
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
    gradient = jnp.stack([jnp.eye(4), 100 * jnp.eye(4)], axis=1)  # [D, 2, F]
    path = "dense_layers.mlp.gate_up.weight"
    params = {path: jnp.zeros((4, 2, 4))}
    state = optimizer.init_state(params)
    settings = optimizer.Settings(weight_decay=0)
    moved, _, _ = optimizer.update(params, {path: gradient}, state, jnp.int32(0), jnp.float32(1), settings)
    np.testing.assert_allclose(moved[path][:, 0], moved[path][:, 1], atol=1e-5)


def test_adam_fits_a_quadratic_and_leaves_the_balancing_bias_alone():
    params = {"embed.weight": jnp.full((3,), 5.0), "moe_layers.moe.router.bias": jnp.ones(2)}
    state = optimizer.init_state(params)
    for step in range(400):
        gradients = jax.tree.map(lambda value: value - 2, params)
        rate = jnp.float32(0.1)
        params, state, _ = optimizer.update(
            params, gradients, state, jnp.int32(step), rate, optimizer.Settings(weight_decay=0)
        )
    np.testing.assert_allclose(params["embed.weight"], 2, atol=0.05)
    assert params["moe_layers.moe.router.bias"].tolist() == [1, 1]


def test_nothing_before_the_decay_depends_on_how_long_the_run_is():
    short, long = Schedule(first_steps=1000, decay_steps=200), Schedule(first_steps=3000, decay_steps=200)
    for step in range(0, 800, 50):
        for what in ("rate", "row_length", "bias_speed", "mtp_weight"):
            assert getattr(short, what)(step) == getattr(long, what)(step)
    assert short.rate(999) < 0.01 * short.peak_rate


def test_an_epoch_of_batches_shows_every_token_once_and_targets_follow_inputs():
    stream = np.arange(1, 11 * UNIT, dtype=np.uint16)
    batches = Batches(stream, batch_tokens=2 * UNIT, bos=0)
    seen = []
    for length in (UNIT // 2, UNIT):  # the rows may change their length in mid-epoch
        for first in range(0, 4 * UNIT, 2 * UNIT):
            rows = batches(first + (4 * UNIT if length == UNIT else 0), length)
            assert rows.shape == (2 * UNIT // length, length + 2)
            assert (rows[:, 0] == 0).all()
            assert (np.diff(rows[:, 1:]) == 1).all()
            seen.append(rows[:, 1:-1].reshape(-1))
    tokens = np.concatenate(seen)
    assert len(np.unique(tokens)) == len(tokens) == 8 * UNIT


@pytest.fixture(scope="module")
def tiny():
    config = dataclasses.replace(
        load_config(FOLDER), hidden_size=32, vocab_size=64, intermediate_size=32, num_hidden_layers=2, q_lora_rank=16
    )
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


def test_only_the_last_two_checkpoints_are_kept(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, {"a": jnp.zeros(1)}, {"a": {}}, step, 0.0)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000200.npz", "step-000300.npz"]


def test_the_log_averages_ten_steps(tmp_path, capsys):
    meter = Meter(tmp_path / "log.jsonl", Schedule(steps=20), processor_seconds=0)
    names = ("loss", "mtp_loss", "max_violation", "dropped")
    for step in range(10):
        meter.add(step, dict.fromkeys(names, float(step)))
    (line,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert (line["loss"], line["step"], line["tokens"]) == (4.5, 10, 10 * 4096)
    assert "10/20" in capsys.readouterr().out
