"""One training step of the demo model: losses of the model's own forward pass, gradients, optimizer, balancing."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig
from dsjax.model.parameters import ParameterTable
from dsjax.model.transformer import Output, Transformer, XlaProducts
from tools.demo import balance, optimizer
from tools.demo.experts import apply_experts, capacity_of

BIASES = ("moe_layers.moe.router.bias", "mtp.layers.moe.router.bias")


def initial_parameters(table: ParameterTable, seed: int) -> dict[str, Array]:
    """Float32 parameters: matrices normal with standard deviation 1/√fan-in, the last of a residual branch a tenth of it."""
    params = {}
    for index, (path, info) in enumerate(table.infos.items()):
        key = jax.random.fold_in(jax.random.key(seed), index)
        if info.init == "ones":
            params[path] = jnp.ones(info.shape)
        elif info.init == "zeros":
            params[path] = jnp.zeros(info.shape)
        else:
            fan_in = info.shape[-3] if "gate_up" in path else info.shape[-2]
            deviation = 0.1 if path == "embed.weight" else fan_in**-0.5
            if path.endswith(("attn.o.weight", "down.weight", "head.weight")):
                deviation /= 10
            params[path] = deviation * jax.random.normal(key, info.shape)
    return params


def cross_entropy(logits: Float[Array, "B S V"], targets: Int[Array, "B S"]) -> Float[Array, ""]:
    """Mean nats a token."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def losses(
    params: dict[str, Array], table: ParameterTable, config: ModelConfig, rows: Int[Array, "B S+2"], experts
) -> tuple[Float[Array, ""], Float[Array, ""], tuple[Output, Output]]:
    """Cross-entropy of the next token, and of the one after it by the MTP module.

    The module sees half of the rows: with its own layer and the head it would cost a third of the step.
    """
    model: Transformer = table.bind(params)
    products = XlaProducts(experts)
    main = model(rows[:, :-2], products=products, unroll=True)
    half = rows[: -(-len(rows) // 2)]
    further = model.predict_further(main.hidden[: len(half)], half[:, 1:-1], products)
    return cross_entropy(main.logits, rows[:, 1:-1]), cross_entropy(further.logits, half[:, 2:]), (main, further)


@partial(jax.jit, static_argnames=("table", "config", "settings", "capacity_factor"), donate_argnums=(0, 1))
def train_step(
    params: dict[str, Array],
    state: optimizer.State,
    rows: Int[Array, "B S+2"],
    step: Int[Array, ""],
    rate: Float[Array, ""],
    mtp_weight: Float[Array, ""],
    bias_speed: Float[Array, ""],
    *,
    table: ParameterTable,
    config: ModelConfig,
    settings: optimizer.Settings,
    capacity_factor: float,
) -> tuple[dict[str, Array], optimizer.State, dict[str, Array]]:
    """New parameters and moments, and the step's measurements."""

    def experts(weights, x_TD, ids_TK, weights_TK):
        gate_up, down = weights.gate_up.value(x_TD.dtype), weights.down.value(x_TD.dtype)
        return apply_experts(gate_up, down, x_TD, ids_TK, weights_TK, capacity_factor)

    def total(params):
        main_loss, mtp_loss, (main, further) = losses(params, table, config, rows, experts)
        ids = (main.routing.ids, further.routing.ids[None])
        return main_loss + mtp_weight * mtp_loss, (main_loss, mtp_loss, ids)

    gradients, (main_loss, mtp_loss, ids) = jax.grad(total, has_aux=True)(params)
    params, state, norm = optimizer.update(params, gradients, state, step, rate, settings)
    loads = [balance.expert_loads(layer_ids, config.n_routed_experts) for layer_ids in ids]
    for path, load in zip(BIASES, loads, strict=True):
        params[path] = balance.move_bias(params[path], load, bias_speed)
    tokens = rows.shape[0] * (rows.shape[1] - 2)
    capacity = capacity_of(capacity_factor, tokens, config.num_experts_per_tok, config.n_routed_experts)
    measured = {
        "loss": main_loss,
        "mtp_loss": mtp_loss,
        "gradient_norm": norm,
        "max_violation": jnp.mean(balance.max_violation(loads[0])),
        "dropped": balance.dropped_share(loads[0], capacity),
    }
    return params, state, measured
