"""The pass of the MTP module, which drafts further tokens from the hidden states of a step.

The module is a decoder layer with its own norms and projection, in the same cache. Its cache entries are made from drafts, some of which
turn out wrong, so ``filled`` records beside the cache which slots hold an entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dsjax.model import paging
from dsjax.model.apart import run_apart
from dsjax.model.layer_values import Layer
from dsjax.model.paging import Cache
from dsjax.model.rows import RowGroup, with_tokens
from dsjax.model.transformer import Transformer, first_module
from sharding.placement import CopyTables

if TYPE_CHECKING:
    from dsjax.model.step import ModelStep


def further(
    step: ModelStep,
    params: Mapping[str, Array],
    cache: Cache,
    filled: Bool[Array, "P G"] | None,
    groups: Sequence[RowGroup],
    hidden: Float[Array, "B T *n D"],
    next_tokens: Int[Array, "B T"],
    copies: CopyTables | None,
) -> tuple[Float[Array, "B T *n D"], Cache, Bool[Array, "P G"] | None, dict[str, Array]]:
    """Run the first MTP module over the groups' token slots: predict one token further from each hidden state and its next token.

    ``h' = M [RMSNorm(Emb(t_{i+1})) ; RMSNorm(h_i)]``, one decoder layer, its own final norm (V3 report §2.2,
    equations 21 to 23). The entry of slot i in the module's layer of the cache, layer ``num_hidden_layers``, has the position
    of its hidden state.

    filled: mask (P, page_size) of the cache slots that hold an entry of the module; pages are spread over the DP ranks. The
        active tokens' slots are marked first; then each token attends to the filled slots of its context and to itself.
        None: every slot of the context is filled.
    groups: positions, lengths, page tables and forms are read; tokens are not.
    hidden: from ``ModelStep.hidden``, or from this function for one more token. next_tokens: the token after each.
    copies: of all ``num_moe_layers_with_mtp``; the module's experts come last.

    Returns hidden states, which ``ModelStep.logits`` takes with ``module`` and this function takes for one more token; the
    updated cache and ``filled``; and dispatch reports with a leading axis of 1, which continue those of ``ModelStep.hidden``.
    """
    sharding, products = step.sharding, step.products
    layers, moe_layers = step.config.num_hidden_layers, step.config.num_moe_layers
    scope = f"mtp_{hidden.shape[1]}"  # drafting has several passes, told apart by their tokens per rank
    with jax.default_matmul_precision("highest"), jax.named_scope(scope):
        model: Transformer = step.table.bind(params)
        module = first_module(model.mtp)
        tokens = step.tokens(with_tokens(groups, next_tokens))
        if filled is not None:
            filled = mark(step, filled, tokens.window_slots if step.mtp_fills_windows else tokens.slots, True)
        tokens = replace(tokens, filled=filled)
        normalise = products.normalise
        embedded, hidden = (
            step.without_padding(array, tokens) for array in (step.embed(model, tokens.ids), sharding.whole(hidden))
        )
        x = sharding.whole(module.join(hidden, embedded, products.multiply(jnp.int32(0)), normalise))
        own_copies = None if copies is None else jax.tree.map(lambda array: array[moe_layers : moe_layers + 1], copies)
        if step.apart is not None:
            x, cache, reports = run_apart(step, ["mtp.layers"], params, x, cache, layers, tokens, own_copies)
        elif step.runs_rank_by_rank:
            x, cache, reports = step.run_first(model.mtp.layers, x, cache, jnp.int32(layers), tokens, own_copies)
        else:
            own_copies = jax.tree.map(lambda array: array[0], own_copies)
            layer = Layer(module.layers, jnp.int32(0), jnp.int32(layers), tokens, own_copies)
            x, cache, report = step.run_layer(layer, x, cache)
            reports = jax.tree.map(lambda array: array[None], report)
        return step.passed_on(module, x), cache, filled, reports


def mark(step: ModelStep, filled: Bool[Array, "P G"], slots: Int[Array, "B T"], value: bool) -> Bool[Array, "P G"]:
    """Return ``filled`` with each DP rank's ``slots`` set to ``value``; −1 is dropped."""

    def local(filled, slots):
        return paging.mark(filled, slots[0], value)

    by_rank = P(step.spec.batch_axes)
    marked = jax.shard_map(local, mesh=step.mesh, in_specs=(by_rank, by_rank), out_specs=by_rank, check_vma=False)
    return marked(filled, slots)
