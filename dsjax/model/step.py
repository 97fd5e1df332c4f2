"""The step: the one program that serving runs, the dry run compiles and the planner measures.

A step takes row groups (see ``docs/architecture.md``), runs all layers against the paged cache, and gives the hidden
states of its tokens, and the logits of those that are asked for. What a layer does is in ``dsjax/model/layer_parts.py``; how the
MTP module drafts further tokens from the hidden states, in ``dsjax/model/mtp.py``. All of it is traced under ``jax.jit`` with
shardings; only cache access and expert dispatch are ``shard_map``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.model.apart import run_apart
from dsjax.model.layer_values import Layer, Tokens
from dsjax.model.paging import Cache
from dsjax.model.rows import RowGroup
from dsjax.model.step_description import StepDescription
from dsjax.model.transformer import DecoderLayer, Transformer
from dsjax.model.two_batch import run_in_halves
from sharding.host_memory import rows_from_host
from sharding.on_ranks import on_ranks
from sharding.placement import CopyTables


class ModelStep(StepDescription):
    """A model on a mesh, ready to be traced: everything static about a step but its row groups' shapes."""

    def hidden(
        self,
        params: Mapping[str, Array],
        cache: Cache,
        groups: Sequence[RowGroup],
        copies: CopyTables | None,
        x: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache, dict[str, Array]]:
        """Run all groups through all layers.

        copies: where the copies of each expert are, of all MoE layers (a leading axis); None in a model without experts. More
        layers than the model has are not read: the MTP module's come last.
        x: of a stage behind the first, what the one before gave.

        Returns the hidden states of all token slots after the final norm, which ``logits`` multiplies by the head, or of a
        stage before the last as its layers leave them; the updated cache; and dispatch reports stacked over MoE layers (empty
        unless ``dispatch.report``).
        """
        # float32 means float32: XLA would use TF32 on GPUs and bf16 passes on TPUs. Other dtypes have one meaning.
        with jax.default_matmul_precision("highest"):
            model: Transformer = self.table.bind(params)
            tokens = self.tokens(groups)
            if x is None:
                x = self.embed(model, tokens.ids)
                if self.in_place.native:  # a row of zeros stays one through all layers, and native kernels pass it over
                    x = jnp.where(tokens.active[..., None], x, 0)
            x = self.sharding.whole(x)
            layer, reports = jnp.int32(0), {}
            if copies is not None:
                copies = jax.tree.map(lambda array: _first(array, self.config.num_moe_layers), copies)
            for stack in model.stacks:
                if self.apart is not None and hasattr(stack, "moe"):
                    first = self.config.num_dense_layers
                    most = self.micro_batches([group.shape for group in groups])
                    x, cache, reports = run_apart(self, "moe_layers", params, x, cache, first, tokens, copies, most)
                    continue
                x, cache, layer, report = self._run_stack(stack, x, cache, layer, tokens, copies)
                reports |= report
            if not self.ends:
                return self.sharding.whole(x), cache, reports
            normed = self.in_place.normalise(model.final_norm, self.sharding.whole(x))
            return self.sharding.whole(normed), cache, reports

    def logits(self, params: Mapping[str, Array], hidden: Float[Array, "B J D"]) -> Float[Array, "B J V"]:
        """Float32 logits of hidden states that ``hidden`` gave; the vocabulary is spread over ``tp`` where that divides it."""
        with jax.default_matmul_precision("highest"), jax.named_scope("head"):
            model: Transformer = self.table.bind(params)
            placed = self.logits_spec(hidden.shape[1])
            by_data = placed[1] is not None
            if by_data:
                hidden = self.sharding.split(self.sharding.whole(hidden))
            logits = self.in_place.project(model, hidden, self.dtype, by_data=by_data)
            return self.sharding.constrain(logits, *placed)

    def embed(self, model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The rows of the embedding, wherever that lies."""
        if "embedded_vocab" not in self.rules.in_host:
            return model.embed(tokens, self.dtype)
        return model.embed(tokens, self.dtype, partial(rows_from_host, mesh=self.mesh, batch_axes=self.spec.batch_axes))

    def _run_stack(self, stack: DecoderLayer, x, cache, layer, tokens: Tokens, copies: CopyTables | None):
        graph, whole, weights = split = self.split(stack, tokens)
        own_copies = None if hasattr(stack, "mlp") else copies

        def merge(weights) -> DecoderLayer:
            return nnx.merge(graph, whole, weights)

        if own_copies is not None and self.in_halves([group.shape for group in tokens.groups]):
            x, cache, reports = run_in_halves(self, merge, weights, x, cache, layer, tokens, own_copies)
            return x, cache, layer + self.config.num_moe_layers, reports

        if self.rank_by_rank:
            layers = jax.tree.leaves(weights)[0].shape[0]
            x, cache, reports = self._rank_by_rank(split, layers, x, cache, layer, tokens, own_copies)
            return x, cache, layer + layers, reports
        first = layer

        def body(carry, xs):
            x, cache, layer = carry
            weights, copies = xs
            of = Layer(merge(weights), layer - first, layer, tokens, copies)
            x, cache, report = self.run_layer(of, x, cache)
            return (x, cache, layer + 1), report

        (x, cache, layer), reports = jax.lax.scan(body, (x, cache, layer), (weights, own_copies))
        return x, cache, layer, reports

    def run_first(self, stack: DecoderLayer, x, cache, layer, tokens: Tokens, copies: CopyTables | None):
        """The first layer of a stack, where ranks run each by itself; arrays of reports and copies have a leading axis of 1."""
        return self._rank_by_rank(self.split(stack, tokens), 1, x, cache, layer, tokens, copies)

    def _rank_by_rank(self, split, layers: int, x, cache, layer, tokens: Tokens, copies: CopyTables | None):
        """The first ``layers`` of a stack as one region of each rank. A layer's arrays are sliced in the branches that read them."""
        graph, whole, weights = split

        def run(whole, weights, x, cache, first, tokens, copies):
            def body(carry, index):
                x, cache = carry
                own = lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False)  # noqa: E731
                bind = lambda: nnx.merge(graph, whole, jax.tree.map(own, weights))  # noqa: E731
                of = Layer(bind(), index, first + index, tokens, jax.tree.map(own, copies), bind)
                x, cache, report = self.run_layer(of, x, cache)
                return (x, cache), report

            (x, cache), reports = jax.lax.scan(body, (x, cache), jnp.arange(layers))
            return x, cache, reports

        def laid_out(state: nnx.State) -> nnx.State:
            specs = [self.rules.spec(leaf.info.logical_axes) for _, leaf in nnx.to_flat_state(state)]
            return jax.tree.unflatten(jax.tree.structure(state), specs)

        by_rank, of_cache = P(self.spec.batch_axes), P(None, self.spec.batch_axes)
        in_specs = (laid_out(whole), laid_out(weights), by_rank, of_cache, P(), by_rank, P())
        out_specs = by_rank, of_cache, P(None, self.spec.token_axes)
        return on_ranks(run, self.mesh, in_specs, out_specs)(whole, weights, x, cache, layer, tokens, copies)

    def run_layer(self, of: Layer, x: Float[Array, "B T D"], cache: Cache):
        """All parts of a decoder layer, one after the other; gives the tokens, the cache, and the dispatch's report."""
        parts = self.parts
        x, cache = parts.attend(of, x, cache)
        if hasattr(of.block, "mlp"):
            return parts.multiply_dense(of, x), cache, {}
        x, report = parts.receive(of, parts.compute(of, parts.send(of, x)))
        return x, cache, report


def _first(array: Array, layers: int) -> Array:
    return array if array.shape[0] == layers else array[:layers]
