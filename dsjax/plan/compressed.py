"""Times of DeepSeek-V4's attention and hyper-connections: operations of sparse attention over windows and compressed entries.

The kernels have no published times: attention is priced as FlashMLA's over the positions that a query sees.
"""

from dsjax.config import ModelConfig
from dsjax.config.deepseek_v4 import KINDS
from dsjax.model.compressed.costs import seen
from dsjax.model.parameter_counts import attention_matrices, compressor_columns
from dsjax.plan.chip import Chip
from dsjax.plan.precision import BF16
from dsjax.plan.sparse import choice, gathered_decode, gathered_prefill

COMPRESSED = tuple(KINDS)
"""Kinds of attention that are priced here."""


def compressed_projections(chip: Chip, config: ModelConfig, kind: str, tp: int, tokens: float) -> float:
    """Return the seconds of one layer's projections. Every device of a replica computes those of the compressors and the indexer."""
    matrices, _ = attention_matrices(config, tp, kind)
    time = sum(chip.product(tokens, columns, rows) for rows, columns in matrices)
    others = compressor_columns(config, kind), config.v4.indexer.n_heads if kind == "csa" else 0
    return time + sum(chip.bf16_product(tokens, columns, config.hidden_size) for columns in others if columns)


def compressed_attention(
    chip: Chip,
    config: ModelConfig,
    kind: str,
    heads: int,
    tokens: float,
    tokens_read: float,
    context: float,
    prompt: float | None,
) -> float:
    """Return the seconds of attention in one layer; arguments as in `sparse_attention`."""
    before, chunk = (context - 1, 1) if prompt is None else (context - (prompt + 1) / 2, prompt)
    visible = seen(config, kind, max(before, 0), chunk)
    width = config.v4.head_dim
    positions = visible.window + visible.entries
    rows = tokens_read / context if tokens_read else tokens
    index_seconds = 0.0
    if visible.scored:
        sizes = {
            group.name: group.entry_bytes
            for group in chip.precision.cache_groups(config, range(config.num_hidden_layers))
        }
        keys = (rows if prompt is None else tokens / prompt) * visible.scored * sizes["c4_index"]
        index_seconds = choice(chip, config, tokens, visible.scored, keys)
    if prompt is not None:
        dense = chip.absorbed_prompts(heads, tokens, positions, width, width)
        return index_seconds + (
            gathered_prefill(chip, heads, tokens, positions, width, width) if visible.scored else dense
        )
    if visible.scored:
        return index_seconds + gathered_decode(chip, heads, tokens, positions, width, width)
    # A request's drafts are additional query rows over the same positions.
    return chip.decode_attention(heads * max(1.0, tokens / rows), rows, positions, width, width)


def hyper_connections(chip: Chip, config: ModelConfig, tokens: float) -> float:
    """Seconds of one layer's hyper-connections: two blocks that project all streams, read them twice, and write them once."""
    (streams,), width = config.streams, config.hidden_size
    projected = chip.bf16_product(tokens, streams * (streams + 2), streams * width)
    return 2 * (projected + chip.stream(BF16 * tokens * width * (3 * streams + 2)))
