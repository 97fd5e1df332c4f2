"""Cases of the routed experts: one rank's experts with the rows that even or skewed routing sends them, and dispatch on a mesh."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.bench.modules.run import ModuleCase, ModuleWork
from dsjax.bench.modules.setting import LayerStack, Setting, with_mesh
from dsjax.bench.modules.timing import PreparedCase, device_loop
from dsjax.model.experts import ExpertProduct
from dsjax.model.parameters import ParameterInfo
from dsjax.model.transformer import RoutedExperts
from sharding import MeshSpec
from sharding.arrays import put
from sharding.dispatch import DispatchConfig, dispatch, dispatch_collectives

SKEWS = {"even": 0.0, "skewed": 0.3}
"""Variant → s in popularity ∝ rank^-s; 0.3 is the planner's default."""

METHODS = ("gather", "padded", "ragged")


@dataclass(frozen=True)
class DispatchedTokens:
    """Input of a rank's experts: local ids `[N, K]` (−1: none) and weights `[N, K]` of N rows with at least one local expert.

    mean_load: (row, expert) pairs per expert under even routing, by which the step chooses the product's tiles.
    """

    ids: np.ndarray
    weights: np.ndarray
    mean_load: float

    @property
    def rows(self) -> int:
        """Number of rows N."""
        return self.ids.shape[0]

    @property
    def pairs(self) -> int:
        """Number of (row, expert) pairs."""
        return int((self.ids >= 0).sum())


def route_randomly(rng: np.random.Generator, tokens: int, experts: int, top_k: int, skew: float) -> np.ndarray:
    """Draw distinct experts `[tokens, top_k]` with popularity ∝ rank^-skew, ranks in random order."""
    popularity = np.log(rng.permutation(1.0 / np.arange(1, experts + 1) ** skew)).astype(np.float32)
    keys = popularity - np.log(-np.log(rng.random((tokens, experts), np.float32) + 1e-20) + 1e-20)
    return np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k].astype(np.int32)


def draw_dispatch(setting: Setting, tokens: int, experts: int, skew: float) -> DispatchedTokens:
    """Draw the tokens dispatched to a rank with `experts` of the model's experts, when every rank has `tokens` tokens.

    All ranks' tokens are drawn together. With skew, take the busiest rank, for which the others wait; else the nearest to the mean.
    """
    config, rng = setting.config, np.random.default_rng(setting.seed)
    ranks = max(1, config.n_routed_experts // experts)
    ids = route_randomly(rng, tokens * ranks, config.n_routed_experts, config.num_experts_per_tok, skew)
    owner = ids // experts
    load = np.bincount(owner.reshape(-1), minlength=ranks)[:ranks]
    rank = int(np.argmax(load)) if skew else int(np.argmin(abs(load - load.mean())))
    local = np.where(owner == rank, ids - rank * experts, -1)
    local = local[(local >= 0).any(axis=1)]
    if not len(local):  # few tokens: give the rank one row, so that there is something to time
        local = np.full((1, ids.shape[1]), -1, np.int32)
        local[0, 0] = 0
    mean_load = tokens * config.num_experts_per_tok * ranks / config.n_routed_experts
    return DispatchedTokens(local.astype(np.int32), rng.random(local.shape, np.float32), mean_load)


def expert_cases(setting: Setting, experts: int, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Yield the grouped product of a rank's experts, with sorting, gathering and the weighted sums."""
    config = setting.config
    if not config.is_moe:
        return
    D, F, itemsize = config.hidden_size, config.moe_intermediate_size, setting.dtype.itemsize
    make = lambda declare: RoutedExperts(replace(declare, num_physical=experts), config)  # noqa: E731
    stack = LayerStack.of(setting, make, config.num_moe_layers)
    for count in tokens:
        for variant, skew in SKEWS.items():
            sent = draw_dispatch(setting, count, experts, skew)
            other_bytes = itemsize * (2 * sent.rows * D + sent.pairs * (2 * D + 5 * F))
            used = len(np.unique(sent.ids[sent.ids >= 0]))  # experts with at least one row
            work = ModuleWork(6 * sent.pairs * D * F, stack.layer_bytes * used / experts, other_bytes)
            sizes = {"tokens": count, "experts": experts, "rows": sent.rows, "pairs": sent.pairs, "used": used}
            memory = stack.nbytes + 8 * sent.rows * D * itemsize
            build = partial(expert_loop, setting, stack, experts, sent)
            yield ModuleCase("experts", variant, sizes, work, memory, build)


def expert_loop(setting: Setting, stack: LayerStack, experts: int, sent: DispatchedTokens) -> PreparedCase:
    """Compile the step's own call: `dispatch` over an EP group of one rank, reading experts from the whole stack of layers."""
    inputs = {
        "params": stack.values(setting.seed),
        "x": setting.random((sent.rows, setting.config.hidden_size)),
        "ids": layer_ids(setting, experts, sent, stack.depth),
        "weights": jnp.asarray(sent.weights),
    }
    product = product_of(setting, stack.table.infos["down.weight"], sent)
    specs = {name: P() for name in (*inputs["params"], "layer")}

    def one_layer(inputs, layer, total):
        ids = jax.lax.dynamic_index_in_dim(inputs["ids"], layer, keepdims=False)
        arguments = (inputs["x"], ids, inputs["weights"], inputs["params"] | {"layer": layer})
        config = DispatchConfig(report=True)
        y, report = dispatch(setting.spec, setting.step.mesh, config, *arguments, product, specs, experts=experts)
        counts, total = total
        return jax.tree.map(jnp.add, counts, report), total + y

    counts = {"tokens_per_expert": jnp.zeros((1, experts), jnp.int32)}
    counts |= {name: jnp.zeros((1,), jnp.int32) for name in ("rows_received", "rows_sent", "rounds")}
    carry = (counts, jnp.zeros_like(inputs["x"]))
    return device_loop(one_layer, inputs, carry, depth=stack.depth, in_step=setting.config.num_moe_layers)


def layer_ids(setting: Setting, experts: int, sent: DispatchedTokens, layers: int) -> jax.Array:
    """Return ids `[layers, N, K]`, different in each layer: XLA would sort constant ids once, before the loop."""
    rng = np.random.default_rng(setting.seed)
    every = [np.append(rng.permutation(experts), -1)[sent.ids] for _ in range(layers)]
    return jnp.asarray(np.stack(every), jnp.int32)


def product_of(setting: Setting, stored: ParameterInfo, sent: DispatchedTokens) -> ExpertProduct:
    """Return the expert product that the step would choose. stored: of ``down.weight``."""
    step = {"kernels": setting.step.kernels, "scheme": setting.step.scheme, "limit": setting.step.config.swiglu_limit}
    step |= {"weight_dtype": stored.dtype, "depth_last": stored.depth_last}
    return ExpertProduct(platform=setting.platform, mean_load=sent.mean_load, **step)


def default_experts(config, memory: int, expert_bytes: int) -> int:
    """Return the default number of experts of the rank: all, if one layer takes at most a quarter of memory; else a 32nd."""
    if config.n_routed_experts * expert_bytes <= memory // 4:
        return config.n_routed_experts
    return max(1, math.ceil(config.n_routed_experts / 32))


def exchange_cases(setting: Setting, spec: MeshSpec, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Yield dispatch cases: tokens per DP rank, bytes sent per device. All processes of a group must make and time the same cases."""
    config = setting.config
    if not config.is_moe or spec.ep_size == 1:
        return
    experts = config.n_routed_experts + (-config.n_routed_experts % spec.ep_size)
    shape = {"width": config.hidden_size, "top_k": config.num_experts_per_tok, "experts": experts}
    shape |= {"dtype": setting.dtype, "platform": setting.platform}
    for count in tokens:
        rows = count * spec.dp_size * setting.dtype.itemsize * config.hidden_size
        memory = 6 * rows * (spec.num_devices if setting.platform == "cpu" else 1)
        for method in METHODS:
            each = dispatch_collectives(spec, DispatchConfig(method), tokens=-(-count // spec.tp_size), **shape)
            work = ModuleWork(0, 0, sum(one.bytes_sent * one.times for one in each))
            for variant, skew in SKEWS.items():
                sizes = {"tokens": count, "mesh": str(spec), "method": method}
                build = partial(_exchange, setting, spec, method, count, experts, skew)
                yield ModuleCase("dispatch", f"{method} {variant}", sizes, work, memory, build, shared=True)


def _exchange(setting: Setting, spec: MeshSpec, method: str, tokens: int, experts: int, skew: float) -> PreparedCase:
    on_mesh = with_mesh(setting, spec)
    mesh, config = on_mesh.step.mesh, setting.config
    place, total = NamedSharding(mesh, P(spec.batch_axes)), tokens * spec.dp_size
    rng = np.random.default_rng(setting.seed)
    ids = route_randomly(rng, total, experts, config.num_experts_per_tok, skew)
    x = np.asarray(rng.standard_normal((total, config.hidden_size), np.float32), setting.dtype)
    inputs = put({"x": x, "ids": ids, "weights": rng.random(ids.shape, np.float32)}, place)

    def one_round(inputs, _, x):
        stand_in = {"scale": jnp.ones((experts,), jnp.float32)}
        arguments = (x, inputs["ids"], inputs["weights"], stand_in, _hand_back, {"scale": P(spec.expert_axes)})
        y, _ = dispatch(spec, mesh, DispatchConfig(method), *arguments)
        # Keep the magnitude of the values, and make each round depend on the one before it.
        return jax.lax.with_sharding_constraint((inputs["x"] + y * 0.1).astype(x.dtype), place)

    return device_loop(one_round, inputs, jnp.copy(inputs["x"]))


def _hand_back(params, rows_ND, ids_NK, weights_NK):
    """Return each row times the sum of its local experts' weights, in place of the experts' product; read every row once."""
    weight_N = jnp.sum(jnp.where(ids_NK >= 0, weights_NK, 0), axis=1)
    rows = rows_ND.take(jnp.arange(rows_ND.shape[0]), axis=0)
    return (rows * weight_N[:, None] * params["scale"][0]).astype(rows_ND.dtype)
