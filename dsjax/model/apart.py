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
    """Describes a pass of tokens through a run of layers, from the leaves of a ``Passing`` to those of ``x``, ``cache`` and ``report``.

    passes: for each micro-batch, one for each kind of layer. tree: structure of the ``Passing``.
    """

    passes: tuple[LayerPass, ...]
    tree: jax.tree_util.PyTreeDef


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Passing:
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
    first: int,
    tokens: Tokens,
    copies: CopyTables,
    most: int = 1,
) -> tuple[Float[Array, "B T *n D"], Cache, dict[str, Array]]:
    """Run tokens through the layers of ``stacks``, inside a traced step; the first layer is layer ``first`` of the cache.

    Returns the tokens, the cache, and if ``dispatch.report`` is set each layer's counts.

    stacks: parameter path of each kind of layer in the run; the kinds alternate. copies: expert copies of these layers, with a leading
        layer axis. most: maximum number of micro-batches; with two or more, attention and experts compute different ones at once.
    """
    own = {path: array for path, array in params.items() if path.startswith(tuple(f"{stack}." for stack in stacks))}
    layers, kinds = copies.copies_E.shape[0], len(stacks)
    whole = step.sharding.whole
    xs, of_tokens, batches = [x], [tokens], None
    if most > 1:
        batches = MicroBatches.of(tokens.groups, most)
        xs = jnp.split(x[:, batches.places], batches.borders, axis=1)
        of_tokens = [step.tokens(groups) for groups in batches.groups]
    xs, of_tokens = jax.tree.map(whole, (xs, of_tokens))
    report = _nothing_counted(step, layers)
    leaves, tree = jax.tree.flatten(Passing(own, cache, report, copies, xs, of_tokens))
    passes = tuple(
        LayerPass(step, stack, first, layers // kinds, one.shape[:2], kind, kinds)
        for one in xs
        for kind, stack in enumerate(stacks)
    )
    results, shape = jax.tree.flatten((xs, cache, report))
    xs, cache, report = jax.tree.unflatten(shape, outside(ExpertWork(passes, tree), leaves, results))
    if batches is None:
        return xs[0], cache, report
    return jnp.concatenate(xs, axis=1)[:, np.argsort(batches.places)], cache, report


def _nothing_counted(step: StepDescription, layers: int) -> dict[str, Array]:
    """Return zero counts for each layer and token device; ``LayerPass.count`` describes them."""
    if not step.dispatch.report:
        return {}
    devices, over_tokens = step.spec.num_devices, NamedSharding(step.mesh, P(None, step.spec.token_axes))
    shapes = {"tokens_per_expert": (step.placement.n_physical,), "rows_sent": (), "rounds": ()}
    return {
        name: jax.lax.with_sharding_constraint(jnp.zeros((layers, devices, *rest), jnp.int32), over_tokens)
        for name, rest in shapes.items()
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

    stack: path of the ``layers`` layers among the parameters. first: number of the run's first layer in the cache. shape: ``(B, T)`` of
    the tokens. kind, kinds: index of this kind among the alternating kinds, and their number. Each method but ``between`` is traced;
    ``index`` is a layer's number in the run.
    """

    step: StepDescription
    stack: str
    first: int
    layers: int
    shape: tuple[int, int]
    kind: int = 0
    kinds: int = 1

    def between(self) -> Between:
        """Return the exchange of a layer's rows between the two meshes."""
        step, (B, T) = self.step, self.shape
        apart, by_choice = step.apart, sums_by_choice(step)
        experts = step.placement.n_physical
        return Between(step.spec, step.mesh, apart.spec, apart.parts, B * T, experts, wire_of(step), by_choice)

    def count(self, report: dict[str, Array], routed: Routed, index: Array) -> dict[str, Array]:
        """Return the report with this layer's counts added, of each token device: pairs of each physical expert, rows, and rounds."""
        if not report:
            return report
        between = self.between()
        rounds = jnp.maximum(-(-jnp.max(routed.counts, axis=1) // between.capacity), 1)
        more = {"tokens_per_expert": between.loads(routed.slots), "rows_sent": jnp.sum(routed.counts, axis=1)}
        return {name: report[name].at[index].add(value) for name, value in (more | {"rounds": rounds}).items()}

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
            of = self._layer(params, tokens, copies, index)
            x, cache = parts.attend(of, x, cache)
            normed, mix, routing = parts.choose(of, x)
            with jax.named_scope("experts"):
                slots, weights = parts.experts.assign(of, routing)
                rows, counts = self.between().pack(whole(rearrange(normed, "b t d -> (b t) d")), slots, weights)
            routed = Routed(whole(normed), slots, weights, counts, jax.tree.map(whole, mix))
            return cache, self.count(report, routed, index), whole(x), routed, rows

    def share(self, params: Mapping[str, Array], normed: Array, index: Array) -> Array | None:
        """Return the shared experts' output."""
        with jax.default_matmul_precision("highest"):
            return self.step.parts.share(self._layer(params, None, None, index), normed)

    def further(self, routed: Routed, r: Int[Array, ""]) -> list[Array]:
        """Pack the rows of round ``r``."""
        with jax.named_scope("experts"):
            rows, _ = self.between().pack(rearrange(routed.normed, "b t d -> (b t) d"), routed.slots, routed.weights, r)
        return rows

    def keep(self, kept: Array, slots: Array, returned: Sequence[Array], r: Int[Array, ""]) -> Array:
        """Return the terms of the rounds before ``r`` and those that came back in it."""
        with jax.named_scope("experts"):
            return self.between().keep(kept, returned, slots, r)

    def receive(
        self,
        params: Mapping[str, Array],
        x: Array,
        shared: Array | None,
        routed: Routed,
        returned: Sequence[Array],
        index: Array,
    ) -> Array:
        """Add to each token the sum of the results of the only round."""
        with jax.default_matmul_precision("highest"), jax.named_scope("experts"):
            y = self.between().add(returned, routed.slots)
        return self._added(params, x, y, shared, routed, index)

    def receive_kept(
        self, params: Mapping[str, Array], x: Array, shared: Array | None, routed: Routed, kept: Array, index: Array
    ) -> Array:
        """Add to each token the sum of the results of all rounds."""
        with jax.default_matmul_precision("highest"), jax.named_scope("experts"):
            y = self.between().add_kept(kept, routed.slots)
        return self._added(params, x, y, shared, routed, index)

    def _added(
        self, params, x: Array, y: Float[Array, "N D"], shared: Array | None, routed: Routed, index: Array
    ) -> Array:
        parts = self.step.parts
        residual = parts.products.residual(self._layer(params, None, None, index).block.mlp_residual)
        return parts.sharding.whole(
            residual.post(x, routed.mix, parts.add_shared(y.reshape(routed.normed.shape), shared))
        )

    def _layer(
        self, params: Mapping[str, Array], tokens: Tokens | None, copies: CopyTables | None, index: Array
    ) -> Layer:
        """Return layer ``index`` of the run with its matrices sliced out, except those that products read in place."""
        step = self.step
        table = step.table.without([path for path in step.table.infos if path not in params])
        stack = operator.attrgetter(self.stack)(table.bind(params))
        graph, whole, sliced = step.split(stack, tokens)
        own = index // self.kinds
        at = lambda array, index: jax.lax.dynamic_index_in_dim(array, index, keepdims=False)  # noqa: E731
        block = nnx.merge(graph, whole, jax.tree.map(lambda array: at(array, own), sliced))
        copies = copies and jax.tree.map(lambda array: at(array, index), copies)
        return Layer(block, own, self.first + index, tokens, copies)


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
        specs = {name: self.rules.spec(info.logical_axes) for name, info in infos.items()}
        arrays = {name: experts[prefix + name] for name in infos}
        with jax.default_matmul_precision("highest"), jax.named_scope("experts"):
            return self.half.compute(
                arrivals, ExpertsOfMesh(product, arrays | {"layer": index}, specs | {"layer": P()})
            )


def wire_of(step: StepDescription) -> WireFormat:
    """Return the format in which a row is packed."""
    return WireFormat(step.config.hidden_size, step.config.num_experts_per_tok, step.dtype, step.dispatch.wire == "fp8")


def sums_by_choice(step: StepDescription) -> bool:
    """Whether a token's results are summed in the same order wherever its experts are."""
    return step.experts.config.by_choice


def described_like(tree: Any, described: Any) -> Any:
    """Constrain a tree of arrays to the shardings of a tree of descriptions."""
    return jax.tree.map(lambda array, like: jax.lax.with_sharding_constraint(array, like.sharding), tree, described)
