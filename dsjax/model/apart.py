"""Routed experts on devices of their own: a pass through a stack of layers whose third part is computed elsewhere.

The four parts of a layer (``docs/architecture.md``) are programs of their own then, and the host takes their values from one to the next
(``docs/attention-ffn-disaggregation.md``). Here stands what each program computes. A step is traced as ever, with the whole pass in it as
one piece of work that is done outside (``sharding.cut``); ``ExpertsApart.work`` says by whom.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.model.attention import Cache
from dsjax.model.experts import ExpertProduct
from dsjax.model.layer_values import Layer, Tokens
from dsjax.model.parameters import ParameterInfo
from sharding import MeshSpec, Rules
from sharding.cut import Work, outside
from sharding.dispatch import ExpertsOfMesh
from sharding.dispatch.between import Between
from sharding.dispatch.wire import WireFormat
from sharding.placement import CopyTables

if TYPE_CHECKING:
    from dsjax.model.step import ModelStep

EXPERTS = ".moe.experts."
"""What stands in the path of every parameter that these devices have, and of no other."""


class ExpertsApart(Protocol):
    """The devices that have the routed experts, and nothing else.

    spec, mesh: of these devices, each of which has whole experts. rules: where their parameters are; infos: these, by path.
    """

    spec: MeshSpec
    mesh: Mesh
    rules: Rules
    infos: Mapping[str, ParameterInfo]

    def work(self, through: LayerPass) -> Work:
        """What takes tokens through a stack of layers: of the leaves of a ``Passing``, those of its ``x`` and ``cache``."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Passing:
    """What a pass takes: parameters of the stack but for its experts, tokens, cache, and where the copies of experts are."""

    params: dict[str, Array]
    x: Float[Array, "B T D"]
    cache: Cache
    tokens: Tokens
    copies: CopyTables


def run_apart(
    step: ModelStep,
    stack: str,
    params: Mapping[str, Array],
    x: Float[Array, "B T D"],
    cache: Cache,
    first: int,
    tokens: Tokens,
    copies: CopyTables,
) -> tuple[Float[Array, "B T D"], Cache]:
    """In a traced step: take tokens through the stack of layers at path ``stack``, the first of which is ``first`` of the cache.

    copies: of these layers, with a leading axis.
    """
    own = {path: array for path, array in params.items() if path.startswith(f"{stack}.")}
    constrain, batch = step._constrain, step.spec.batch_axes
    passing = Passing(own, constrain(x, batch), cache, jax.tree.map(lambda a: constrain(a, batch), tokens), copies)
    leaves, tree = jax.tree.flatten(passing)
    through = LayerPass(step, stack, first, copies.copies_E.shape[0], tree, tuple(x.shape))
    results, shape = jax.tree.flatten((x, cache))
    given = outside(step.apart.work(through), leaves, results)
    return jax.tree.unflatten(shape, given)


@dataclass(frozen=True)
class LayerPass:
    """A pass of so many tokens through a stack of layers, as what its programs compute. Equal passes have equal programs.

    stack: path of the layers among the parameters. first: number of the first of ``layers`` layers in the cache. tree: of ``Passing``.
    shape: ``(B, T, D)`` of the tokens. Each method but ``between`` is traced; ``index`` is a layer's number in the stack.
    """

    step: ModelStep
    stack: str
    first: int
    layers: int
    tree: Any
    shape: tuple[int, int, int]

    @cached_property
    def between(self) -> Between:
        """How a layer's tokens travel."""
        step, (B, T, D) = self.step, self.shape
        wire = WireFormat(D, step.config.num_experts_per_tok, step.dtype, step.dispatch.wire == "fp8")
        by_choice = step.dispatch.by_choice or step.in_place.ordered
        apart = step.apart
        return Between(step.spec, step.mesh, apart.spec, apart.mesh, B * T, step.placement.n_physical, wire, by_choice)

    def attend(
        self, params: Mapping[str, Array], cache: Cache, x: Array, tokens: Tokens, copies: CopyTables, index: Array
    ) -> tuple[Cache, Array, Array, Array, Array]:
        """Attention and routing: the cache, tokens after attention, the same as experts read them, physical experts, and rows to send."""
        step, (B, T, D) = self.step, self.shape
        with jax.default_matmul_precision("highest"):
            of = self._layer(params, tokens, copies, index)
            x, cache = step.attend(of, x, cache)
            normed, routing = step.choose(of, x)
            with jax.named_scope("experts"):
                slots, weights = step.assign(of, routing)
                rows = self.between.pack(step._whole(normed.reshape(B * T, D)), slots, weights)
            return cache, step._whole(x), step._whole(normed), slots, rows

    def share(self, params: Mapping[str, Array], normed: Array, index: Array) -> Array | None:
        """What the shared experts add."""
        with jax.default_matmul_precision("highest"):
            return self.step.share(self._layer(params, None, None, index), normed)

    def compute(
        self, experts: Mapping[str, Array], arrivals: Sequence[Array], index: Int[Array, ""]
    ) -> list[Float[Array, "m D"]]:
        """On the experts' devices: what they give for the rows of each token device. experts: parameters by path."""
        step, apart, (B, T, _) = self.step, self.step.apart, self.shape
        prefix = f"{self.stack}{EXPERTS}"
        infos = {path.removeprefix(prefix): info for path, info in apart.infos.items() if path.startswith(prefix)}
        product = ExpertProduct(
            weight_dtype=infos["down.weight"].dtype,
            platform=apart.mesh.devices.flat[0].platform,
            mean_load=B * T * step.config.num_experts_per_tok / step.placement.n_physical,
            kernels=step.kernels,
            scheme=step.scheme,
        )
        specs = {name: apart.rules.spec(info.logical_axes) for name, info in infos.items()}
        arrays = {name: experts[prefix + name] for name in infos}
        with jax.default_matmul_precision("highest"), jax.named_scope("experts"):
            ranks = ExpertsOfMesh(product, arrays | {"layer": index}, specs | {"layer": P()})
            return self.between.compute(arrivals, ranks)

    def receive(self, x: Array, shared: Array | None, slots: Array, returned: Sequence[Array]) -> Array:
        """Each token with the sum of what came back added to it."""
        with jax.default_matmul_precision("highest"), jax.named_scope("experts"):
            y = self.between.add(returned, slots).reshape(x.shape)
        return self.step.add_sum(x, y, shared)

    def _layer(
        self, params: Mapping[str, Array], tokens: Tokens | None, copies: CopyTables | None, index: Array
    ) -> Layer:
        """Layer ``index`` of the stack, its matrices sliced out of it but for those that products read in place."""
        step = self.step
        table = step.table.without([path for path in step.table.infos if path not in params])
        stack = operator.attrgetter(self.stack)(table.bind(params))
        in_place = step.in_place.names([] if tokens is None else [group.shape.form for group in tokens.groups])
        graph, whole, sliced = nnx.split(
            stack, lambda path, _: "experts" in path or (len(path) > 1 and path[-2] in in_place), ...
        )
        here = lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False)  # noqa: E731
        block = nnx.merge(graph, whole, jax.tree.map(here, sliced))
        return Layer(block, index, self.first + index, tokens, copies and jax.tree.map(here, copies))


def described_like(tree: Any, described: Any) -> Any:
    """A tree of arrays kept in the shardings of a tree of descriptions."""
    return jax.tree.map(lambda array, like: jax.lax.with_sharding_constraint(array, like.sharding), tree, described)
