"""Attention–FFN disaggregation (AFD): a pass through a run of layers whose routed experts are on separate devices.

The four parts of a layer (``docs/architecture.md``) become separate programs, and the host carries values from one to the next
(``docs/attention-ffn-disaggregation.md``). This module defines what each program computes. A step is traced as usual and contains the
whole pass as one ``ExpertWork``, which the engine runs outside of the traced program (``sharding.cut``).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.model.expert_dispatch import EXPERTS
from dsjax.model.experts import ExpertProduct
from dsjax.model.layer_values import Layer, Tokens
from dsjax.model.micro_batches import MicroBatches
from dsjax.model.paging import Cache
from dsjax.model.parameters import ParameterInfo
from dsjax.model.step_description import StepDescription
from sharding import Rules
from sharding.cut import outside
from sharding.dispatch import ExpertsOfMesh
from sharding.dispatch.between import Between, ExpertHalf
from sharding.dispatch.wire import WireFormat
from sharding.placement import CopyTables


@dataclass(frozen=True)
class ExpertWork:
    """Describes a pass of tokens through a run of layers, from the leaves of a ``PassInputs`` to those of ``x``, ``cache`` and ``report``.

    passes: for each micro-batch, one for each kind of layer. tree: structure of the ``PassInputs``.
    """

    passes: tuple[LayerPass, ...]
    tree: jax.tree_util.PyTreeDef


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PassInputs:
    """Inputs of a pass: the layers' parameters except their experts, the cache, the placement of expert copies, and tokens.

    x, tokens: of the step, or of each micro-batch. report: counts of each layer, which the pass adds to; empty if not requested.
    """

    params: dict[str, Array]
    cache: Cache
    report: dict[str, Int[Array, "L S ..."]]
    copies: CopyTables
    x: list[Float[Array, "B T *n D"]]
    tokens: list[Tokens]


def run_apart(
    step: StepDescription,
    stacks: Sequence[str],
    params: Mapping[str, Array],
    x: Float[Array, "B T *n D"],
    cache: Cache,
    first_layer: int,
    tokens: Tokens,
    copies: CopyTables,
    max_micro_batches: int = 1,
) -> tuple[Float[Array, "B T *n D"], Cache, dict[str, Array]]:
    """Run tokens through the layers of ``stacks``, inside a traced step.

    Returns the tokens, the cache, and if ``dispatch.report`` is set each layer's counts.

    stacks: parameter path of each kind of layer in the run; the kinds alternate. first_layer: number of the run's first layer in the cache.
    copies: expert copies, with a leading axis of the run's layers. max_micro_batches: maximum number of micro-batches. With two or more,
        attention computes one micro-batch while the experts compute another.
    """
    own_params = {path: array for path, array in params.items() if path.startswith(tuple(f"{s}." for s in stacks))}
    num_layers, num_kinds = copies.copies_E.shape[0], len(stacks)
    xs, tokens_of_batches, batches = [x], [tokens], None
    if max_micro_batches > 1:
        batches = MicroBatches.of(tokens.groups, max_micro_batches)
        xs = jnp.split(x[:, batches.places], batches.borders, axis=1)
        tokens_of_batches = [step.tokens(groups) for groups in batches.groups]
    xs, tokens_of_batches = jax.tree.map(step.sharding.whole, (xs, tokens_of_batches))
    report = _zero_counts(step, num_layers)
    values, tree = jax.tree.flatten(PassInputs(own_params, cache, report, copies, xs, tokens_of_batches))
    passes = tuple(
        LayerPass(step, stack, first_layer, num_layers // num_kinds, part.shape[:2], kind, num_kinds)
        for part in xs
        for kind, stack in enumerate(stacks)
    )
    described_results, result_tree = jax.tree.flatten((xs, cache, report))
    results = outside(ExpertWork(passes, tree), values, described_results)
    xs, cache, report = jax.tree.unflatten(result_tree, results)
    if batches is None:
        return xs[0], cache, report
    return jnp.concatenate(xs, axis=1)[:, np.argsort(batches.places)], cache, report


def _zero_counts(step: StepDescription, num_layers: int) -> dict[str, Array]:
    """Return zeros for each layer and token device; ``LayerPass.add_counts`` describes the counts."""
    if not step.dispatch.report:
        return {}
    shape = num_layers, step.spec.num_devices
    by_token_device = NamedSharding(step.mesh, P(None, step.spec.token_axes))
    shapes = {"tokens_per_expert": (*shape, step.placement.n_physical), "rows_sent": shape, "rounds": shape}
    return {
        name: jax.lax.with_sharding_constraint(jnp.zeros(sizes, jnp.int32), by_token_device)
        for name, sizes in shapes.items()
    }


class Routed(NamedTuple):
    """Tokens as the experts read them, their physical experts and weights, rows from each token device to each expert device, and the
    ``mix`` for ``Residual.post``."""

    normed: Float[Array, "B T D"]
    slots: Int[Array, "N K"]
    weights: Float[Array, "N K"]
    counts: Int[Array, "S E"]
    mix: Any


@dataclass(frozen=True)
class LayerPass:
    """Computations of the programs for one kind of layer in a pass of tokens through a run. Equal passes have equal programs.

    stack: path of the ``num_layers`` layers among the parameters. first_layer: number of the run's first layer in the cache.
    shape: ``(B, T)`` of the tokens. kind: index of this kind among the ``num_kinds`` alternating kinds. Each method but ``between`` is
    traced; ``index`` is a layer's number in the run.
    """

    step: StepDescription
    stack: str
    first_layer: int
    num_layers: int
    shape: tuple[int, int]
    kind: int = 0
    num_kinds: int = 1

    def between(self) -> Between:
        """Return the exchange of a layer's rows between the two meshes."""
        step, (B, T) = self.step, self.shape
        apart, by_choice = step.apart, sums_by_choice(step)
        experts = step.placement.n_physical
        return Between(step.spec, step.mesh, apart.spec, apart.parts, B * T, experts, wire_of(step), by_choice)

    def add_counts(self, report: dict[str, Array], routed: Routed, index: Array) -> dict[str, Array]:
        """Return the report with this layer's counts added, of each token device: pairs of each physical expert, rows, and rounds."""
        if not report:
            return report
        between = self.between()
        counts = {
            "tokens_per_expert": between.loads(routed.slots),
            "rows_sent": jnp.sum(routed.counts, axis=1),
            "rounds": jnp.maximum(-(-jnp.max(routed.counts, axis=1) // between.capacity), 1),
        }
        return {name: report[name].at[index].add(value) for name, value in counts.items()}

    def attend(
        self,
        params: Mapping[str, Array],
        cache: Cache,
        report: dict[str, Array],
        x: Array,
        tokens: Tokens,
        copies: CopyTables,
        index: Array,
    ) -> tuple[Cache, dict[str, Array], Array, Routed, list[Array]]:
        """Compute attention and routing. Returns cache, report, tokens after attention, their routing, and the rows of the first round."""
        parts = self.step.parts
        whole = parts.sharding.whole
        with jax.default_matmul_precision("highest"):
            layer = self._layer(params, tokens, copies, index)
            x, cache = parts.attend(layer, x, cache)
            normed, mix, routing = parts.choose(layer, x)
            with jax.named_scope("experts"):
                slots, weights = parts.experts.assign(layer, routing)
                rows, counts = self.between().pack(whole(rearrange(normed, "b t d -> (b t) d")), slots, weights)
            routed = Routed(whole(normed), slots, weights, counts, jax.tree.map(whole, mix))
            return cache, self.add_counts(report, routed, index), whole(x), routed, rows

    def share(self, params: Mapping[str, Array], normed: Array, index: Array) -> Array | None:
        """Return the shared experts' output."""
        with jax.default_matmul_precision("highest"):
            return self.step.parts.share(self._layer(params, None, None, index), normed)

    def pack_round(self, routed: Routed, r: Int[Array, ""]) -> list[Array]:
        """Pack the rows of round ``r``. ``attend`` packs those of the first round."""
        with jax.named_scope("experts"):
            rows, _ = self.between().pack(rearrange(routed.normed, "b t d -> (b t) d"), routed.slots, routed.weights, r)
        return rows

    def collect_round(self, collected: Array, slots: Array, returned: Sequence[Array], r: Int[Array, ""]) -> Array:
        """Return ``collected``, the terms of earlier rounds, with the terms that round ``r`` returned filled in."""
        with jax.named_scope("experts"):
            return self.between().store_terms(collected, returned, slots, r)

    def receive(
        self,
        params: Mapping[str, Array],
        x: Array,
        shared: Array | None,
        routed: Routed,
        results: Sequence[Array] | Array,
        index: Array,
        *,
        collected: bool = False,
    ) -> Array:
        """Add the experts' output to each token. results: of the only round; or if ``collected``, the terms of all rounds."""
        with jax.default_matmul_precision("highest"), jax.named_scope("experts"):
            between = self.between()
            y = between.sum_terms(results, routed.slots) if collected else between.add(results, routed.slots)
        parts = self.step.parts
        residual = parts.products.residual(self._layer(params, None, None, index).block.mlp_residual)
        output = parts.add_shared(y.reshape(routed.normed.shape), shared)
        return parts.sharding.whole(residual.post(x, routed.mix, output))

    def _layer(
        self, params: Mapping[str, Array], tokens: Tokens | None, copies: CopyTables | None, index: Array
    ) -> Layer:
        """Return layer ``index`` of the run with its matrices sliced out, except those that products read in place."""
        step = self.step
        table = step.table.without([path for path in step.table.infos if path not in params])
        stack = operator.attrgetter(self.stack)(table.bind(params))
        graph, unsliced, sliced = step.split_stack(stack, tokens)
        index_in_stack = index // self.num_kinds
        block = nnx.merge(graph, unsliced, _take(sliced, index_in_stack))
        copies = None if copies is None else _take(copies, index)
        return Layer(block, index_in_stack, self.first_layer + index, tokens, copies)


def _take(tree: Any, index: Array) -> Any:
    """Return entry ``index`` of the first axis of each array."""
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False), tree)


@dataclass(frozen=True, eq=False)
class StackExperts:
    """The routed experts of a stack of layers, on the devices of one process.

    stack: path of the layers among the parameters. half: the experts' half of the exchange, on these devices. rules, infos: of the
    experts' parameters. tokens: total of a step, which determines the form of the product.
    """

    step: StepDescription
    stack: str
    half: ExpertHalf
    rules: Rules
    infos: Mapping[str, ParameterInfo]
    tokens: int

    def compute(
        self, experts: Mapping[str, Array], arrivals: Sequence[Array], index: Int[Array, ""]
    ) -> list[Float[Array, "m D"]]:
        """Return the outputs of layer ``index`` of the stack for each sender's rows. experts: parameters by path, laid out by ``rules``."""
        step, prefix = self.step, f"{self.stack}{EXPERTS}"
        infos = {path.removeprefix(prefix): info for path, info in self.infos.items() if path.startswith(prefix)}
        product = ExpertProduct(
            weight_dtype=infos["down.weight"].dtype,
            depth_last=infos["down.weight"].depth_last,
            platform=self.half.mesh.devices.flat[0].platform,
            mean_load=self.tokens * step.config.num_experts_per_tok / step.placement.n_physical,
            kernels=step.kernels,
            scheme=step.scheme,
            limit=step.config.swiglu_limit,
        )
        specs = {name: self.rules.spec(info.logical_axes) for name, info in infos.items()} | {"layer": P()}
        arrays = {name: experts[prefix + name] for name in infos} | {"layer": index}
        with jax.default_matmul_precision("highest"), jax.named_scope("experts"):
            return self.half.compute(arrivals, ExpertsOfMesh(product, arrays, specs))


def wire_of(step: StepDescription) -> WireFormat:
    """Return the format in which a row is packed."""
    return WireFormat(step.config.hidden_size, step.config.num_experts_per_tok, step.dtype, step.dispatch.wire == "fp8")


def sums_by_choice(step: StepDescription) -> bool:
    """Whether a token's results are summed in the same order wherever its experts are."""
    return step.experts.config.by_choice


def constrain_like(tree: Any, described: Any) -> Any:
    """Constrain a tree of arrays to the shardings of a tree of descriptions."""
    return jax.tree.map(lambda array, like: jax.lax.with_sharding_constraint(array, like.sharding), tree, described)
