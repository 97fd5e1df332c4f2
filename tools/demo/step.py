"""One training step of a demo model: losses of the model's own forward pass, gradients, optimizer, balancing."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsjax.config import ModelConfig
from dsjax.config.layers import moe_layers, stacks
from dsjax.model.parameters import ParameterTable
from dsjax.model.sparse import IndexProjections, index_scores
from dsjax.model.transformer import Observe, Output, Transformer, XlaProducts
from tools.demo import balance, optimizer
from tools.demo.experts import capacity_of, experts_within


def seeing_all(config: ModelConfig) -> ModelConfig:
    """The model with indexers that choose all positions."""
    name, own = ("mla", config.mla) if config.v4 is None else ("v4", config.v4)
    indexer = replace(own.indexer, topk=config.max_position_embeddings)
    return replace(config, **{name: replace(own, indexer=indexer)})


def attention_divergence(
    index: IndexProjections | None, queries: slice, seen: Bool[Array, "*B Q S"], probs: Float[Array, "B H Q S"]
) -> Float[Array, ""]:
    """Sum over a block's queries of ``KL(attention || softmax(index scores))`` over the positions that a query sees, in nats.

    Attention is the sum over heads, divided by its L1 norm (arXiv 2512.02556, section 2.1.1). The indexer learns from it, and nothing else
    does. An ``Observe`` of ``dsjax.model.transformer``.
    """
    target = jax.lax.stop_gradient(probs.sum(axis=1))
    target = target / jnp.maximum(target.sum(axis=-1, keepdims=True), 1e-30)
    scores = index_scores(index.query[:, queries], index.weight[:, queries], index.key[:, : target.shape[-1]])
    seen = seen.reshape(-1, *seen.shape[-2:])
    scores = jnp.where(seen, scores, -1e30)
    log_ratio = jnp.log(jnp.maximum(target, 1e-30)) - jax.nn.log_softmax(scores, axis=-1)
    return jnp.sum(jnp.where(seen & (target > 0), target * log_ratio, 0.0))


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
    params: dict[str, Array],
    table: ParameterTable,
    rows: Int[Array, "B S+2"],
    experts,
    observe: Observe | None = None,
    *,
    unroll: bool = True,
) -> tuple[dict[str, Float[Array, ""]], tuple[Output, Output]]:
    """Cross-entropy of the next token (``loss``), and of the one after it by the MTP module (``mtp_loss``); and what both passes gave.

    The module sees half of the rows: with its own layer and the head it would cost a third of the step. ``index_loss`` is the mean of what
    is observed, a query and layer.
    """
    model: Transformer = table.bind(params)
    products = XlaProducts(experts, observe)
    main = model(rows[:, :-2], products=products, unroll=unroll)
    half = rows[: -(-len(rows) // 2)]
    further = model.predict_further(main.passed[: len(half)], half[:, 1:-1], products)
    found = {"loss": cross_entropy(main.logits, rows[:, 1:-1]), "mtp_loss": cross_entropy(further.logits, half[:, 2:])}
    if observe is not None:
        of_layer = [*(main.observed / rows[:, :-2].size)]
        if further.observed is not None:
            of_layer += [*(further.observed / half[:, 1:-1].size)]
        found["index_loss"] = sum(of_layer) / len(of_layer)
    return found, (main, further)


@partial(jax.jit, static_argnames=("table", "config", "settings", "capacity_factor", "observe"), donate_argnums=(0, 1))
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
    observe: Observe | None = None,
) -> tuple[dict[str, Array], optimizer.State, dict[str, Array]]:
    """New parameters and moments, and the step's measurements."""

    def total(params):
        found, (main, further) = losses(params, table, rows, experts_within(capacity_factor), observe)
        ids = (main.routing.ids, further.routing.ids[None])
        return found["loss"] + mtp_weight * found["mtp_loss"] + found.get("index_loss", 0.0), (found, ids)

    gradients, (measured, ids) = jax.grad(total, has_aux=True, allow_int=True)(params)
    params, state, norm = optimizer.update(params, gradients, state, step, rate, settings)
    loads, further_loads = (balance.expert_loads(layer_ids, config.n_routed_experts) for layer_ids in ids)
    routed = moe_layers(config.layer_runs)
    of_stack = {
        kind: loads[jnp.array([routed.index(n) for n in ns])]
        for kind, ns in stacks(config.layer_runs).items()
        if kind.mlp == "moe"
    }
    for kind, own in {**of_stack, config.mtp_kind: further_loads}.items():
        path = f"{kind.stack}.moe.router.bias"
        params[path] = balance.move_bias(params[path], own, bias_speed)
    tokens = rows.shape[0] * (rows.shape[1] - 2)
    capacity = capacity_of(capacity_factor, tokens, config.num_experts_per_tok, config.n_routed_experts)
    measured |= {
        "gradient_norm": norm,
        "max_violation": jnp.mean(balance.max_violation(loads)),
        "dropped": balance.dropped_share(loads, capacity),
    }
    return params, state, measured
