"""The step: the one program that serving runs, the dry run compiles and the planner measures.

A step takes row groups (see ``docs/architecture.md``), runs all layers against the paged cache, and returns its tokens' hidden
states, and logits of the requested tokens. ``dsjax/model/layer_parts.py`` computes a layer; ``dsjax/model/mtp.py`` drafts further
tokens from the hidden states with the MTP module. Everything is traced under ``jax.jit`` with shardings; only cache access and
expert dispatch use ``shard_map``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.config.layers import LayerRun
from dsjax.model.apart import run_apart
from dsjax.model.layer_values import Layer, Tokens
from dsjax.model.paging import Cache
from dsjax.model.parameters import reinterpret
from dsjax.model.rows import RowGroup
from dsjax.model.step_description import StepDescription
from dsjax.model.transformer import MTP, DecoderLayer, Transformer, by_layer, first_module
from dsjax.model.two_batch import run_in_halves
from sharding.host_memory import rows_from_host
from sharding.on_ranks import OneRank, on_ranks
from sharding.placement import CopyTables


class ModelStep(StepDescription):
    """A model on a mesh, ready to be traced: all static properties of a step except its row groups' shapes."""

    def hidden(
        self,
        params: Mapping[str, Array],
        cache: Cache,
        groups: Sequence[RowGroup],
        copies: CopyTables | None,
        x: Float[Array, "B T *n D"] | None = None,
    ) -> tuple[Float[Array, "B T *n D"], Cache, dict[str, Array]]:
        """Run all groups through all layers.

        copies: locations of each expert's copies, with a leading axis of MoE layers; None in a model without experts. Rows after the
        model's own layers belong to the MTP module and are ignored.
        x: output of the previous pipeline stage; None in the first stage.

        Returns hidden states of all token slots, for ``logits`` and the MTP module; the updated cache; and dispatch reports stacked over
        MoE layers (empty unless ``dispatch.report``). Hidden states are after the final norm; before the last stage, or if the model
        has several streams (``ModelConfig.streams``), they are the last layer's output.
        """
        # Compute float32 products in float32: XLA's default is TF32 on GPUs and bf16 passes on TPUs. Other dtypes are not affected.
        with jax.default_matmul_precision("highest"):
            model: Transformer = self.table.bind(params)
            tokens = self.tokens(groups)
            if x is None:
                x = self.without_padding(model.residual.enter(self.embed(model, tokens.ids)), tokens)
            x = self.sharding.whole(x)
            first_layer, first_moe_layer, reports = 0, 0, []
            for run in self.config.layer_runs:
                moe_kinds = sum(kind.routed for kind in run.kinds)
                moe_layers = slice(first_moe_layer, first_moe_layer + moe_kinds * run.count)
                run_copies = None if not moe_kinds else jax.tree.map(lambda array: _part(array, moe_layers), copies)  # noqa: B023
                x, cache, report = self._run(model, run, params, x, cache, first_layer, tokens, run_copies)
                reports += [[report]] * bool(report)  # already in layer order
                first_layer, first_moe_layer = first_layer + run.layers, moe_layers.stop
            reports = by_layer(reports) or {}
            return (self.passed_on(model, x) if self.is_last_stage else self.sharding.whole(x)), cache, reports

    def passed_on(self, owner: Transformer | MTP, x: Float[Array, "B T *n D"]) -> Float[Array, "B T *n D"]:
        """Apply the final norm after the last layer of the model or of an MTP module, unless the model has several streams."""
        return self.sharding.whole(x) if self.config.streams else self.final(owner, x)

    def final(self, owner: Transformer | MTP, x: Float[Array, "B T *n D"]) -> Float[Array, "B T D"]:
        """Return the LM head's input from the last layer's output of the model or of an MTP module."""
        output = self.sharding.whole(self.products.residual(owner.residual).leave(x))
        return self.sharding.whole(self.products.normalise(owner.final_norm, output))

    def logits(
        self, params: Mapping[str, Array], hidden: Float[Array, "B J *n D"], *, module: bool = False
    ) -> Float[Array, "B J V"]:
        """Return float32 logits of ``hidden``'s result, or of ``mtp.further``'s if ``module``. The vocabulary is sharded over ``tp``
        if ``tp`` divides it."""
        with jax.default_matmul_precision("highest"), jax.named_scope("head"):
            model: Transformer = self.table.bind(params)
            if self.config.streams:
                hidden = self.final(first_module(model.mtp) if module else model, hidden)
            out_spec = self.logits_spec(hidden.shape[1])
            tokens_split = out_spec[1] is not None
            if tokens_split:
                hidden = self.sharding.split(self.sharding.whole(hidden))
            logits = self.products.project(model, hidden, self.dtype, tokens_split=tokens_split)
            return self.sharding.constrain(logits, *out_spec)

    def without_padding(self, x: Float[Array, "B T *n D"], tokens: Tokens) -> Float[Array, "B T *n D"]:
        """Set padding in ``x`` to zero if products are native. Zero rows stay zero, and native kernels skip them."""
        return jnp.where(jnp.expand_dims(tokens.active, range(2, x.ndim)), x, 0) if self.products.native else x

    def embed(self, model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return rows of the embedding table, which is on the devices or in host memory."""
        if "embedded_vocab" not in self.rules.in_host:
            return model.embed(tokens, self.dtype)
        table = model.embed.weight
        rows = rows_from_host(table[...], tokens, mesh=self.mesh, batch_axes=self.spec.batch_axes)
        return reinterpret(rows, table.info.dtype).astype(self.dtype)

    def _run(
        self, model: Transformer, run: LayerRun, params, x, cache, first: int, tokens: Tokens, copies: CopyTables | None
    ):
        """Run a run of layers. first: its first layer's number in the cache. copies: of its layers with experts, in layer order."""
        shapes = [group.shape for group in tokens.groups]
        if copies is not None and self.apart is not None:
            stacks, num_micro_batches = [kind.stack for kind in run.kinds], self.num_micro_batches(shapes)
            return run_apart(self, stacks, params, x, cache, first, tokens, copies, num_micro_batches)
        split = [self.split_stack(getattr(model, kind.stack), tokens) for kind in run.kinds]
        if copies is not None:  # [layers, …] → [repetitions, kinds with experts, …]
            moe_kinds = sum(kind.routed for kind in run.kinds)
            copies = jax.tree.map(
                lambda array: rearrange(array, "(count kind) ... -> count kind ...", kind=moe_kinds), copies
            )
            if self.runs_in_halves(shapes):
                merges = [partial(nnx.merge, graph, whole) for graph, whole, _ in split]
                weights = [sliced for *_, sliced in split]
                return run_in_halves(self, merges, weights, x, cache, jnp.int32(first), tokens, copies)
        if self.runs_rank_by_rank:
            return self._rank_by_rank(split, run.count, x, cache, jnp.int32(first), tokens, copies)

        def body(carry, xs):
            x, cache, index = carry
            weights, copies = xs
            blocks = [nnx.merge(graph, whole, sliced) for (graph, whole, _), sliced in zip(split, weights, strict=True)]
            x, cache, report = self._period(blocks, [None] * len(blocks), index, first, x, cache, tokens, copies)
            return (x, cache, index + 1), report

        weights = [sliced for *_, sliced in split]
        (x, cache, _), reports = jax.lax.scan(body, (x, cache, jnp.int32(0)), (weights, copies))
        return x, cache, by_layer([reports]) or {}

    def _period(self, blocks, binds, index, first, x, cache, tokens: Tokens, copies: CopyTables | None):
        """Run one repetition: the ``index``-th layer of each kind. Return the tokens, the cache, and a report per layer with experts."""
        reports = []
        for offset, (block, bind) in enumerate(zip(blocks, binds, strict=True)):
            layer_copies = None
            if not hasattr(block, "mlp"):  # routed experts
                layer_copies = jax.tree.map(lambda array: array[len(reports)], copies)  # noqa: B023
            layer = first + index * len(blocks) + offset
            x, cache, report = self.run_layer(Layer(block, index, layer, tokens, layer_copies, bind), x, cache)
            reports += [report] * (layer_copies is not None)
        return x, cache, reports

    def run_first(self, stack: DecoderLayer, x, cache, layer, tokens: Tokens, copies: CopyTables | None):
        """Run the first layer of a stack rank by rank. Arrays of reports and of copies have a leading axis of 1."""
        copies = jax.tree.map(lambda array: array[:, None], copies)
        return self._rank_by_rank([self.split_stack(stack, tokens)], 1, x, cache, layer, tokens, copies)

    def _rank_by_rank(self, split, count: int, x, cache, first, tokens: Tokens, copies: CopyTables | None):
        """Run a run of layers in one ``on_ranks`` region. A layer's weights are sliced in the branches that read them (``Layer.bind``)."""
        graphs, wholes, weights = zip(*split, strict=True)  # per kind, from ``split_stack``
        on_one_rank = replace(self, mesh=OneRank(self.mesh))

        def run(wholes, weights, x, cache, first, tokens, copies):
            def body(carry, index):
                x, cache = carry
                at_layer = lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False)  # noqa: E731
                binds = [
                    lambda graph=graph, whole=whole, stack=stack: nnx.merge(graph, whole, jax.tree.map(at_layer, stack))
                    for graph, whole, stack in zip(graphs, wholes, weights, strict=True)
                ]
                blocks, layer_copies = [bind() for bind in binds], jax.tree.map(at_layer, copies)
                x, cache, report = on_one_rank._period(blocks, binds, index, first, x, cache, tokens, layer_copies)
                return (x, cache), report

            (x, cache), reports = jax.lax.scan(body, (x, cache), jnp.arange(count))
            return x, cache, by_layer([reports]) or {}

        def laid_out(state: nnx.State) -> nnx.State:
            specs = [self.rules.spec(leaf.info.logical_axes) for _, leaf in nnx.to_flat_state(state)]
            return jax.tree.unflatten(jax.tree.structure(state), specs)

        by_rank, of_cache = P(self.spec.batch_axes), P(None, self.spec.batch_axes)
        in_specs = (tuple(map(laid_out, wholes)), tuple(map(laid_out, weights)), by_rank, of_cache, P(), by_rank, P())
        out_specs = by_rank, of_cache, P(None, self.spec.token_axes)
        return on_ranks(run, self.mesh, in_specs, out_specs)(wholes, weights, x, cache, first, tokens, copies)

    def run_layer(self, layer: Layer, x: Float[Array, "B T *n D"], cache: Cache):
        """Run all parts of a decoder layer in sequence. Return the tokens, the cache, and the dispatch report."""
        parts = self.parts
        x, cache = parts.attend(layer, x, cache)
        if hasattr(layer.block, "mlp"):
            return parts.multiply_dense(layer, x), cache, {}
        x, report = parts.receive(layer, parts.compute(layer, parts.send(layer, x)))
        return x, cache, report


def _part(array: Array, rows: slice) -> Array:
    return array if array.shape[0] == rows.stop - rows.start else array[rows]
