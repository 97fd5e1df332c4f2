"""Cost of one layer of DeepSeek-V4's attention: operations, and bytes moved. Plain arithmetic on `ModelConfig`, as in `mla_costs`.

Letters as in `docs/glossary.md`. A query attends to its window and to compressed entries of `rate` tokens each: to all entries in "hca"
layers, to the `index_topk` with the highest index scores in "csa" layers. An index score takes 2 · I · (A + 1) operations. A head's score
and weighted sum take 2 · M multiply-adds, since a cached entry is both key and value.
"""

from typing import NamedTuple

import numpy as np

from dsjax.config import ModelConfig
from dsjax.model.cache_groups import BF16
from dsjax.model.compressed.groups import compressed_groups
from dsjax.model.mla_costs import AttentionCost
from dsjax.model.parameter_counts import attention_matrices, compressor_columns


class Seen(NamedTuple):
    """Context read by a query, averaged over a chunk: window tokens, compressed entries attended to, entries scored by the indexer."""

    window: float
    entries: float
    scored: float


def seen(config: ModelConfig, attention: str, before: float, chunk: float = 1) -> Seen:
    """Return the context that ``chunk`` queries after ``before`` positions read in a layer of this kind."""
    rate, end = config.v4.rate(attention), before + chunk
    window = _mean(1, config.v4.sliding_window, before, chunk)
    if rate is None:
        return Seen(window, 0, 0)
    visible = _mean(rate, end, before, chunk)
    if attention == "hca" or end // rate <= config.v4.indexer.topk:
        return Seen(window, visible, 0)
    return Seen(window, _mean(rate, config.v4.indexer.topk, before, chunk), visible)


def _mean(rate: int, most: float, before: float, chunk: float) -> float:
    """Return the mean of ``min(most, p // rate)`` over p = before + 1, …, before + chunk."""

    def total(end: float) -> float:
        below = min(end, most * rate - 1)
        windows = max(below // rate, 0)
        return rate * windows * (windows - 1) / 2 + windows * (below - rate * windows + 1) + most * (end - below)

    return (total(before + chunk) - total(before)) / chunk


def compressed_cost(
    config: ModelConfig,
    attention: str,
    *,
    rows: int,
    chunk: int,
    context: int,
    attended: float | None = None,
    weight_itemsize: int = 2,
    cache_dtype: np.dtype = BF16,
    activation_itemsize: int = 2,
    tp: int = 1,
) -> AttentionCost:
    """Return the cost of one layer of kind ``attention``. Arguments as in `mla_cost`. The fold of gates and values is not counted."""
    heads, tokens, rate = config.num_attention_heads // tp, rows * chunk, config.v4.rate(attention)
    before, queries = (context - 1, 1) if attended is None else (max(0, attended - (chunk + 1) / 2), chunk)
    found, width = seen(config, attention, before, queries), config.v4.head_dim
    columns, index = compressor_columns(config, attention), config.v4.indexer.n_heads if attention == "csa" else 0
    matrices, _ = attention_matrices(config, tp, attention)
    weights = sum(rows * columns for rows, columns in matrices) + config.hidden_size * (columns + index)
    # Values written by one product and read by the next: the layer's input, latents, gates and values in float32, the heads' queries and
    # values, the output of each group of heads, and index queries.
    handed = config.hidden_size + config.v4.q_lora_rank + width + columns * 4 // activation_itemsize
    handed += heads * 2 * width + config.v4.o_groups * config.v4.o_lora_rank // tp
    handed += index * config.v4.indexer.head_dim
    layer = (*config.v4.attention, "window").index(attention)  # the MTP module's layer follows the model's
    groups = compressed_groups(config, (layer,), np.dtype(cache_dtype), config.page_tokens)
    sizes = {group.name: group.entry_bytes for group in groups}
    window, state = sizes["window"], sizes.get("state4", 0) + sizes.get("state128", 0)
    entry, key = sizes.get("c4", 0) + sizes.get("c128", 0), sizes.get("c4_index", 0)
    read = rows * (min(context, config.v4.sliding_window + chunk - 1) * window + state)
    if rate is not None:
        entries = rows * (context // rate)
        read += entries * key + tokens * config.v4.indexer.topk * entry if found.scored else entries * entry
    return AttentionCost(
        linear_flops=2 * tokens * weights,
        expansion_flops=0,
        attention_flops=round(2 * heads * 2 * width * tokens * (found.window + found.entries)),
        weight_bytes=weights * weight_itemsize,
        cache_read_bytes=read,
        cache_write_bytes=tokens * window + rows * state + (tokens * (entry + key) // rate if rate else 0),
        activation_bytes=activation_itemsize * 2 * tokens * handed,
        index_flops=round(2 * tokens * found.scored * index * (config.v4.indexer.head_dim + 1)),
    )
