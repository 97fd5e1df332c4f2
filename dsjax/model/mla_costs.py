"""Cost of one MLA layer in each form: cache, floating-point operations, bytes moved.

Plain arithmetic on `ModelConfig`, for the planner and the documentation. Letters as in `docs/glossary.md`: `R` rows of
`C` query tokens each, `S` context positions of a row. A multiply-add is two operations; norms, rotation and softmax,
which are linear in the activations, are not counted.

Over V3's 61 layers, one decoded token at context `S` costs 16.99 M × S operations of attention in the absorbed forms and
5.00 M × S with a decompressed cache (`CD`); `CC` adds 2,047 M × S to expand the latents in each step. The cache
holds 1,152 bytes per token and layer in bf16, or 81,920 decompressed.

With sparse attention (docs/sparse-attention.md) a query's index scores cost 2 · I · (A + 1) operations per context position (V3.2:
16,512; absorbed attention to one position costs 278,528), and the query attends to at most `index_topk` positions.
"""

from dataclasses import dataclass

import numpy as np

from dsjax.config import ModelConfig
from dsjax.model.cache_groups import BF16, cache_groups
from dsjax.model.forms import Form, form_of
from dsjax.model.parameter_counts import attention_matrices


@dataclass(frozen=True)
class AttentionCost:
    """Cost of one layer on one device for one row group: operations and bytes moved, as integers."""

    linear_flops: int
    """Projections of the query tokens, including the form's absorbed or materialised products."""
    expansion_flops: int
    """Expansion of the whole context's latents to keys and values, in forms that expand them."""
    attention_flops: int
    """Scores and weighted sums: proportional to the context."""
    weight_bytes: int
    """Weight matrices, each read once."""
    cache_read_bytes: int
    """Context entries, each read once per row (all heads and queries of the row share the read)."""
    cache_write_bytes: int
    """Entries of the new tokens."""
    activation_bytes: int
    """Operands and results of products that are neither weights nor cache, each written once and read once. Scores are
    not counted, because attention is fused."""

    index_flops: int = 0
    """Index scores of sparse attention, proportional to the context."""

    @property
    def flops(self) -> int:
        """All operations."""
        return self.linear_flops + self.expansion_flops + self.attention_flops + self.index_flops

    @property
    def bytes(self) -> int:
        """All bytes to and from memory."""
        return self.weight_bytes + self.cache_read_bytes + self.cache_write_bytes + self.activation_bytes


def weight_values(config: ModelConfig, form: str | Form, tp: int = 1) -> int:
    """Return the matrix elements that a form multiplies with in one layer on one device (half its linear operations per token).

    Counts `attention_matrices` and the indexer's `[D, I]`. If materialised, each head has `W^UQ·W^UK [Q, M]`, `W^QR [Q, O]` and
    `W^UV·W^O [M, D]` instead of `[Q, N+O]`, `[M, N+U]` and `[U, D]` (V3: 583 M instead of 172 M over all heads).
    """
    mla, heads, width = config.mla, config.num_attention_heads // tp, config.hidden_size
    rank, nope, value, query = mla.kv_lora_rank, mla.qk_nope_head_dim, mla.v_head_dim, mla.q_lora_rank or width
    matrices, _ = attention_matrices(config, tp)
    values = sum(rows * columns for rows, columns in matrices)
    values += width * mla.indexer.n_heads if mla.indexer is not None else 0
    if form_of(form).materialised:
        values += heads * (query * (rank - nope) + rank * (width - nope - value) - value * width)
    return values


def mla_cost(
    config: ModelConfig,
    form: str | Form,
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
    """Return the cost of one layer for `rows` × `chunk` query tokens, each row with `context` positions in its cache.

    `attended`: mean number of positions that a query of the chunk sees; default `context`. For a whole prompt of `n`
    tokens in one chunk pass `(n + 1) / 2`. `tp`: devices that share the heads; the cost is per device. `cache_dtype`: see
    `cache_groups`. Itemsizes are in bytes; FP8 weights are 1 (their scales add 1/4096).
    """
    form, heads = form_of(form), config.num_attention_heads // tp
    tokens, positions = rows * chunk, rows * context
    weights, expanded = weight_values(config, form, tp), heads * form.expansion_values(config)
    seen = context if attended is None else attended
    entry, *keys = (
        group.device_page_bytes(tp) for group in cache_groups(config, (0,), cache_dtype, layout=form.layouts[0])
    )
    read, index = positions * (entry + sum(keys)), 0
    mla, indexer = config.mla, config.mla.indexer
    if indexer is not None and context > indexer.topk:
        index = 2 * tokens * seen * indexer.n_heads * (indexer.head_dim + 1)
        if not form.masks:
            read = positions * sum(keys) + tokens * indexer.topk * entry
            seen = min(seen, indexer.topk)
    # Values written by one product and read by the next: layer input and result, latents, the heads' values, expanded keys and values.
    latents = mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)
    handed = tokens * (config.hidden_size + latents + heads * form.head_values(config))
    handed += positions * (expanded // mla.kv_lora_rank)
    return AttentionCost(
        linear_flops=2 * tokens * (weights - expanded),
        expansion_flops=2 * positions * expanded,
        attention_flops=round(2 * heads * form.pair_values(config) * tokens * seen),
        weight_bytes=weights * weight_itemsize,
        cache_read_bytes=read,
        cache_write_bytes=tokens * (entry + sum(keys)),
        activation_bytes=activation_itemsize * 2 * handed,
        index_flops=round(index),
    )
