"""Time one rank of a deployment on one device: its share of the model's layers, run as in a step, extrapolated to the whole model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dsjax.bench.modules.attention import AttentionShape
from dsjax.bench.modules.dense import head_cases
from dsjax.bench.modules.launch import launch_cases
from dsjax.bench.modules.routed import SKEWS, DispatchedTokens, draw_dispatch, layer_ids, product_of
from dsjax.bench.modules.run import ModuleCase, ModuleRow, ModuleWork
from dsjax.bench.modules.setting import LayerStack, Setting, free_memory
from dsjax.bench.modules.timing import PreparedCase, device_loop
from dsjax.config import ModelConfig
from dsjax.config.layers import LayerKind, kinds_of
from dsjax.errors import UserError
from dsjax.model.layer_costs import residual_values
from dsjax.model.transformer import DecoderLayer
from sharding.dispatch import DispatchConfig, dispatch

MEMORY_SHARE = 0.4
"""Share of the free memory that `--layers auto` fills; a case may take a little more (`run.MEMORY_SHARE`)."""


@dataclass(frozen=True)
class OneRankPlan:
    """The decode step to time: `batch` requests on one of `ranks` ranks, with `layers` MoE layers of `experts` experts each."""

    ranks: int
    experts: int
    batch: int
    layers: int

    @classmethod
    def of(cls, setting: Setting, ranks: int, batch: int, layers: str) -> OneRankPlan:
        """Divide the experts over the ranks. Time `layers` MoE layers, or with `auto` as many as fit in memory.

        Raises:
            UserError: a model without experts, ranks that do not divide them, or more layers than the model has.
        """
        config = setting.config
        if not config.is_moe:
            raise UserError("--one-rank-of divides experts over ranks, and this model has none; leave it out")
        if config.n_routed_experts % ranks:
            raise UserError(f"--one-rank-of is {ranks}, which does not divide {config.n_routed_experts} experts")
        experts = config.n_routed_experts // ranks
        free_bytes = free_memory(setting.step.mesh.devices.flat[0])
        layer_bytes = max(layer_stack(setting, kind, experts, 1).nbytes for kind in layer_kinds(config) if kind.routed)
        num_fitting = int(MEMORY_SHARE * free_bytes // layer_bytes)
        num_layers = min(config.num_moe_layers, max(1, num_fitting)) if layers == "auto" else int(layers)
        if num_layers > config.num_moe_layers:
            raise UserError(f"--layers is {num_layers}, and the model has {config.num_moe_layers} layers with experts")
        return cls(ranks, experts, batch, num_layers)


def layer_kinds(config: ModelConfig) -> dict[LayerKind, int]:
    """Return the number of the model's layers of each kind. Kinds that differ only in their `stack` count as one, with stack "layers"."""
    counts = Counter[LayerKind]()
    for kind, count in kinds_of(config.layer_runs):
        counts[replace(kind, stack="layers")] += count
    return dict(counts)


def layer_name(config: ModelConfig, kind: LayerKind) -> str:
    """Return the name of a kind of layer in tables, with its attention unless the model has MLA."""
    name = {"dense": "dense layer", "moe": "MoE layer", "hash": "hash-routed layer"}[kind.mlp]
    return name if config.family.has_forms else f"{kind.attention} {name}"


def layer_stack(setting: Setting, kind: LayerKind, experts: int, depth: int) -> LayerStack:
    """Return `depth` layers of a kind as one rank holds them, with `experts` physical experts if the kind has any."""
    experts = experts if kind.routed else 0
    make = lambda declare: DecoderLayer(replace(declare, num_physical=experts), setting.config, kind)  # noqa: E731
    return LayerStack.of(setting, make, depth, depth=depth)


def one_rank_cases(setting: Setting, plan: OneRankPlan, contexts: list[int]) -> Iterator[ModuleCase]:
    """Yield a case for the launch, for each kind of layer at each context and routing skew, and for the head."""
    config = setting.config
    yield from launch_cases(setting, [plan.batch])
    for context, (kind, count) in itertools.product(contexts, layer_kinds(config).items()):
        shape = AttentionShape(setting, kind.attention, count, setting.step.decode_form, plan.batch, 1, context)
        if shape.context > setting.max_model_len:
            continue
        stack = layer_stack(setting, kind, plan.experts, min(plan.layers if kind.routed else 2, count))
        for variant, skew in SKEWS.items() if kind.routed else [("", 0.0)]:
            sent = draw_dispatch(setting, plan.batch, plan.experts, skew) if kind.routed else None
            yield _case(plan, (layer_name(config, kind), variant), shape, stack, sent)
    yield from head_cases(setting, [plan.batch])


def _case(
    plan: OneRankPlan, kind: tuple[str, str], shape: AttentionShape, stack: LayerStack, sent: DispatchedTokens | None
) -> ModuleCase:
    """Return the case of a layer at a context. kind: module and variant. sent: rows sent to the rank's experts; None: a dense layer."""
    config, (flops, other_bytes) = shape.setting.config, shape.cost()
    flops += 2 * 2 * plan.batch * residual_values(config)  # two blocks, two FLOPs per multiply-add
    flops_per_pair = 6 * config.hidden_size * config.moe_intermediate_size
    sizes = {"tokens": plan.batch, "context": shape.cached, "layers": stack.depth}
    if sent is None:
        flops += 6 * plan.batch * config.hidden_size * config.intermediate_size
    else:
        flops += flops_per_pair * (sent.pairs + plan.batch * config.n_shared_experts)
        sizes |= {"experts": plan.experts, "rows": sent.rows, "pairs": sent.pairs}
        other_bytes += 2 * sent.rows * config.hidden_size * shape.setting.dtype.itemsize
    build = partial(_loop, plan, stack, sent, shape)
    return ModuleCase(*kind, sizes, ModuleWork(flops, stack.layer_bytes, other_bytes), stack.nbytes, build)


def _loop(plan: OneRankPlan, stack: LayerStack, sent: DispatchedTokens | None, shape: AttentionShape) -> PreparedCase:
    """Prepare a loop over whole layers, as in the step: attention, then MLP or experts, each with its norm and residual."""
    setting, config, connection = shape.setting, shape.setting.config, shape.setting.step.products.residual
    inputs = shape.arrays() | {"params": stack.values(setting.seed)}
    inputs["x"] = setting.random((1, plan.batch, *config.streams, config.hidden_size))
    experts = None
    if sent is not None:
        experts = product_of(setting, stack.table.infos["moe.experts.down.weight"], sent)
        inputs["rows"] = setting.random((sent.rows, config.hidden_size))
        inputs["ids"] = layer_ids(setting, plan.experts, sent, stack.depth)
        inputs["weights"] = jnp.asarray(sent.weights)

    def one_layer(inputs, index, carry):
        x, cache, cache_layer = carry
        # Every layer starts from nearly the same input: over thousands of iterations, the residual stream would grow without bound.
        x = inputs["x"] + 1e-3 * jnp.tanh(x)
        params = {path: inputs["params"][path] for path in stack.table.infos}
        block: DecoderLayer = stack.layer(params, index, skip=".experts.")
        residual = connection(block.attn_residual)
        block_input, mix = residual.pre(x)
        out, cache = shape.attend(block.attn, block.attn_norm(block_input), inputs, cache, cache_layer)
        x, residual = residual.post(x, mix, out), connection(block.mlp_residual)
        block_input, mix = residual.pre(x)
        y = block.mlp_norm(block_input)
        out = block.mlp(y, setting.multiply) if sent is None else _routed(block, y, inputs, params, index)
        x = residual.post(x, mix, out)
        return x, cache, (cache_layer + 1) % shape.layers

    def _routed(block, y, inputs, params, index):
        """Route the rank's own tokens, apply its experts to the rows that all ranks sent, and add the shared expert."""
        prefix = "moe.experts."
        expert_params = {path.removeprefix(prefix): array for path, array in params.items() if path.startswith(prefix)}
        specs = {name: P() for name in (*expert_params, "layer")}
        arguments = (inputs["rows"], inputs["ids"][index], inputs["weights"], expert_params | {"layer": index})

        token_ids, config = jnp.zeros(y.shape[:-1], jnp.int32), DispatchConfig(report=True)
        routing = block.moe.router(y, token_ids, setting.multiply)
        out, _ = dispatch(setting.spec, setting.step.mesh, config, *arguments, experts, specs, experts=plan.experts)
        # In a step, combine sums each token's results from all ranks. Here this rank's results, resized to the batch, stand in for them.
        combined = jnp.resize(out, (plan.batch, out.shape[-1]))[None]
        combined = combined * routing.weights.sum(-1, keepdims=True).astype(combined.dtype)
        return combined + block.moe.shared(y, setting.multiply) if hasattr(block.moe, "shared") else combined

    carry = (jnp.zeros_like(inputs["x"]), shape.cache(), jnp.int32(0))
    return device_loop(one_layer, inputs, carry, depth=stack.depth, in_step=stack.depth)


@dataclass(frozen=True)
class Extrapolation:
    """Step time of the whole model from the times of its layers, without communication. parts: (name, count, seconds of one)."""

    variant: str
    context: int
    parts: tuple[tuple[str, int, float], ...]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(count * each for _, count, each in self.parts)

    def to_json(self) -> dict:
        """Stable fields, seconds."""
        parts = [{"part": name, "count": count, "each_s": each} for name, count, each in self.parts]
        return {"variant": self.variant, "context": self.context, "parts": parts, "step_s": self.seconds}


def extrapolate(setting: Setting, rows: list[ModuleRow]) -> list[Extrapolation]:
    """Add up the model's layers, head and launch, for each context and routing skew at which every kind of layer was timed."""
    config, steps = setting.config, []
    counts = {layer_name(config, kind): count for kind, count in layer_kinds(config).items()}
    timed = {(row.case.module, row.case.variant, row.case.sizes.get("context")): row.times.median for row in rows}
    launch_and_head = [(name, 1, timed[name, "", None]) for name in ("launch", "head") if (name, "", None) in timed]
    for context, variant in itertools.product(sorted({key[2] for key in timed if key[0] in counts}), SKEWS):
        layer_seconds = {name: timed.get((name, variant, context), timed.get((name, "", context))) for name in counts}
        if None not in layer_seconds.values():
            parts = [(f"{name}s", counts[name], seconds) for name, seconds in layer_seconds.items()]
            steps.append(Extrapolation(variant, context, (*parts, *launch_and_head)))
    return steps
