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
    """Return the mean of ``min(most, p // rate)`` over p = before + 1, …, before + chunk.

    ``total`` sums 0, 1, … ``windows - 1`` for ``rate`` positions each, ``windows`` for those up to ``below``, and ``most`` for the rest.
    """

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
    """Return the cost of one layer of kind ``attention``, without the compressors' sums. Arguments as in `mla_cost`."""
    heads, tokens, rate = config.num_attention_heads // tp, rows * chunk, config.v4.rate(attention)
    if attended is None:  # every query reads the whole context
        read_by_query = seen(config, attention, before=context - 1)
    else:  # the mean over a chunk, which begins half a chunk before
        read_by_query = seen(config, attention, before=max(0, attended - (chunk + 1) / 2), chunk=chunk)
    width = config.v4.head_dim
    columns = compressor_columns(config, attention)
    index = config.v4.indexer.n_heads if attention == "csa" else 0
    matrices, _ = attention_matrices(config, tp, attention)
    weights = sum(num_in * num_out for num_in, num_out in matrices) + config.hidden_size * (columns + index)
    # Values written by one product and read by the next: the layer's input, latents, gates and values in float32, the heads' queries and
    # values, the output of each group of heads, and index queries.
    handed = config.hidden_size + config.v4.q_lora_rank + width + columns * 4 // activation_itemsize
    handed += heads * 2 * width + config.v4.o_groups * config.v4.o_lora_rank // tp
    handed += index * config.v4.indexer.head_dim
    layer = (*config.v4.attention, "window").index(attention)  # the MTP module's layer follows the model's
    groups = compressed_groups(config, (layer,), np.dtype(cache_dtype), config.page_tokens)
    sizes = {group.name: group.entry_bytes for group in groups}
    window_bytes = sizes["window"]
    state_bytes = sizes.get("state4", 0) + sizes.get("state128", 0)
    entry_bytes = sizes.get("c4", 0) + sizes.get("c128", 0)
    key_bytes = sizes.get("c4_index", 0)
    read = rows * (min(context, config.v4.sliding_window + chunk - 1) * window_bytes + state_bytes)
    written = tokens * window_bytes + rows * state_bytes
    if rate is not None:
        num_entries = rows * (context // rate)
        if read_by_query.scored:
            read += num_entries * key_bytes + tokens * config.v4.indexer.topk * entry_bytes
        else:
            read += num_entries * entry_bytes
        written += tokens * (entry_bytes + key_bytes) // rate
    return AttentionCost(
        linear_flops=2 * tokens * weights,
        expansion_flops=0,
        attention_flops=round(2 * heads * 2 * width * tokens * (read_by_query.window + read_by_query.entries)),
        weight_bytes=weights * weight_itemsize,
        cache_read_bytes=read,
        cache_write_bytes=written,
        activation_bytes=activation_itemsize * 2 * tokens * handed,
        index_flops=round(2 * tokens * read_by_query.scored * index * (config.v4.indexer.head_dim + 1)),
    )
