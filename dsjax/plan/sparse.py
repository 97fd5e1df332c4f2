"""Times of sparse attention (docs/sparse-attention.md): indexer projections, index scores, top-k selection, attention to the selection.

Only the rates of the attention kernels are published; those of scores and selection are assumptions with wide ranges.
"""

from dsjax.config import ModelConfig
from dsjax.plan.chip import Chip
from dsjax.plan.figure import assumed, assumption
from dsjax.plan.operations import FLASH_MLA_FLOPS, bundled_device
from dsjax.plan.precision import BF16

SOURCE = "FlashMLA README (H800): sparse decode 410 TFLOP/s with an FP8 cache, sparse prefill 640, dense decode 660"
SPARSE_DECODE_FLOPS, SPARSE_PREFILL_FLOPS = 410e12, 640e12
SCORE_PASSES = 3
"""Memory passes of a float32 score: one write, and two reads by the top-k selection."""


def index_projections(chip: Chip, config: ModelConfig, tokens: float) -> float:
    """Return the seconds of a layer's index queries, keys and head weights, which each device of a replica computes for all its tokens."""
    indexer = config.mla.indexer
    query = chip.product(tokens, indexer.n_heads * indexer.head_dim, config.mla.q_lora_rank)
    key = chip.product(tokens, indexer.head_dim, config.hidden_size)
    return query + key + chip.bf16_product(tokens, indexer.n_heads, config.hidden_size)


def sparse_attention(
    chip: Chip, config: ModelConfig, heads: int, tokens: float, tokens_read: float, context: float, prompt: float | None
) -> float:
    """Return the seconds in one layer of `tokens` that see `context` positions each (see `StepModel.attention`). heads: per device.

    prompt: new tokens of a prompt; None in decode. Prefill uses the faster of masked attention to all positions and absorbed attention to
    the selected ones.
    """
    _, key = chip.precision.cache_groups(config, (0,))
    keys_read = tokens_read if prompt is None else tokens_read + tokens
    chosen = choice(chip, config, tokens, context, keys_read * key.page_bytes)
    mla = config.mla
    rank = mla.kv_lora_rank
    latent = rank + mla.qk_rope_head_dim
    topk = mla.indexer.topk
    if prompt is None:
        return chosen + gathered_decode(chip, heads, tokens, float(topk), latent, rank)
    masked = chip.prefill_attention(heads, tokens, tokens / prompt, context, mla.qk_head_dim + mla.v_head_dim)
    positions = mean_chosen(topk, context - (prompt + 1) / 2, prompt)
    return chosen + min(masked, gathered_prefill(chip, heads, tokens, positions, latent, rank))


def choice(chip: Chip, config: ModelConfig, tokens: float, visible: float, key_bytes: float) -> float:
    """Return the seconds of one layer's index scores of `tokens` over `visible` keys each, and of the top-k selection.

    Scores are products of all index heads with the keys, in FP8 with an FP8 cache. key_bytes: bytes of all keys, which are read once.
    """
    fp8 = chip.precision.cache < BF16
    peak = chip.hardware.fp8_flops if fp8 else chip.hardware.bf16_flops
    indexer = config.attention.indexer
    flops = 2.0 * tokens * visible * indexer.n_heads * (indexer.head_dim + 1)
    scores = max(flops / (assumption("index scores, share of peak") * peak), chip.stream(key_bytes))
    return scores + chip.stream(4.0 * SCORE_PASSES * tokens * visible)


def gathered_decode(chip: Chip, heads: int, tokens: float, positions: float, latent: int, rank: int) -> float:
    """Return the seconds of one layer's attention to `positions` selected positions in decode."""
    slower = FLASH_MLA_FLOPS / SPARSE_DECODE_FLOPS
    gathered = assumed((1 + slower) / 2, 1.0, slower, "sparse ÷ dense decode attention", SOURCE)
    return chip.decode_attention(heads, tokens, positions, latent, rank) * gathered


def gathered_prefill(chip: Chip, heads: int, tokens: float, positions: float, latent: int, rank: int) -> float:
    """Return the seconds of one layer's attention to `positions` selected positions in prefill."""
    best = SPARSE_PREFILL_FLOPS / bundled_device("h800").bf16_flops
    share = assumed(0.9 * best, 0.6 * best, best, "sparse prefill attention, share of peak", SOURCE)
    return 2.0 * heads * (latent + rank) * tokens * positions / (share * chip.hardware.bf16_flops)


def mean_chosen(topk: int, cached: float, prompt: float) -> float:
    """Return the mean positions that a prompt token attends to after `cached` ones: all up to its own, at most `topk`."""
    below = min(max(topk - cached, 0.0), prompt)
    return (below * (cached + (below + 1) / 2) + (prompt - below) * topk) / prompt
