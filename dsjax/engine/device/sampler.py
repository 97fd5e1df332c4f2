"""Token sampling on the device. Greedy sampling runs inside the step, everything else in small separate programs.

A request's draw depends only on its seed, its number of sampled tokens and its logits: not on its row, its rank or the rest of the batch.
Before a draw, the logits are changed in vLLM's order: logit biases, then penalties, then token bitmasks.
Shapes: B DP ranks, R rows or J positions of a rank, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int

from dsjax.engine.contract.sampling_params import MAX_LOGPROBS
from dsjax.model.softmax import log_softmax

NOT_FINITE = -1
"""Returned instead of a token if a logit is NaN or infinite."""
NONE_ALLOWED = -2
"""Returned instead of a token if no token is allowed."""
BIASES_PER_POSITION = 64
"""Biases per position that one run of the bias program has room for; longer lists take several runs."""


def greedy(logits: Float[Array, "B R V"]) -> Int[Array, "B R"]:
    """Return the most probable token (the lowest id on ties), or ``NOT_FINITE`` if any logit is NaN or infinite.

    Two plain reductions replace ``argmax``, which XLA's CPU backend computes one element at a time.
    """
    max_logit = jnp.max(logits, axis=-1)  # NaN if any logit is
    finite = jnp.isfinite(max_logit) & jnp.isfinite(jnp.min(logits, axis=-1))
    return jnp.where(finite, _first_equal(logits, max_logit), NOT_FINITE)


def _first_equal(logits: Float[Array, "*b V"], most: Float[Array, "*b"]) -> Int[Array, "*b"]:
    V = logits.shape[-1]
    return jnp.min(jnp.where(logits == most[..., None], jnp.arange(V, dtype=jnp.int32), V), axis=-1)


@jax.tree_util.register_dataclass
@dataclass
class SlotSampling:
    """Sampling parameters of each row of a launch, copied from its slot. The fields correspond to ``commands.Sampling``."""

    num_prompt_tokens: Int[Array, "*b"]
    seed: Int[Array, "*b"]  # uint32, the low word
    seed_high: Int[Array, "*b"]  # uint32
    top_k: Int[Array, "*b"]  # 0: all
    temperature: Float[Array, "*b"]  # 0: greedy
    top_p: Float[Array, "*b"]
    min_p: Float[Array, "*b"]
    presence: Float[Array, "*b"]
    frequency: Float[Array, "*b"]
    repetition: Float[Array, "*b"]

    @classmethod
    def unpack(cls, columns: Int[Array, "*b 10"]) -> SlotSampling:
        """Return the parameters from int32 columns in the order of the fields, which hold the bits of the other types."""
        dtypes = [jnp.int32, jnp.uint32, jnp.uint32, jnp.int32, *[jnp.float32] * 6]
        return cls(*(jax.lax.bitcast_convert_type(columns[..., i], dtype) for i, dtype in enumerate(dtypes)))


SAMPLING_COLUMNS = len(fields(SlotSampling))
"""Number of columns that ``SlotSampling.unpack`` takes."""


class Scores(NamedTuple):
    """Log-probability and rank of one token at each position, and the most probable tokens with their log-probabilities."""

    logprobs: Float[Array, "*b"]
    ranks: Int[Array, "*b"]
    top_tokens: Int[Array, "*b 20"]
    top_logprobs: Float[Array, "*b 20"]


class SamplingOps(NamedTuple):
    """Booleans: whether any row of a launch needs each operation. Equal on all devices, so that all take the same branch."""

    truncation: Array | bool  # top-k or top-p
    penalties: Array | bool = False
    masks: Array | bool = False


def sample(
    logits: Float[Array, "B R V"],
    changed: Float[Array, "B R V"],
    rows: SlotSampling,
    num_sampled: Int[Array, "B R"],
    ops: SamplingOps,
) -> Int[Array, "B R"]:
    """Draw each row's token; return ``NOT_FINITE`` or ``NONE_ALLOWED`` where that is impossible.

    logits: the model's logits; changed: logits after biases, penalties and masks. num_sampled: tokens that each row's request has
    sampled so far.

    Tokens outside min-p, then top-k, then top-p, get probability 0. The draw inverts the cumulative distribution *in vocabulary
    order* at one uniform number, so the result does not depend on the sorted order of two nearly equal tokens, which rounding can swap.
    Truncation is skipped if no row wants it.
    """
    finite = jnp.isfinite(jnp.max(logits, axis=-1)) & jnp.isfinite(jnp.min(logits, axis=-1))
    max_changed = jnp.max(changed, axis=-1)
    scaled = changed / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[..., None]
    threshold = jnp.max(scaled, axis=-1) + jnp.log(rows.min_p)  # log 0 = −∞ keeps all
    scaled = jnp.where(scaled >= threshold[..., None], scaled, -jnp.inf)
    threshold = jax.lax.cond(
        ops.truncation, _threshold, lambda scaled, rows: jnp.full(scaled.shape[:-1], -jnp.inf), scaled, rows
    )
    probs = jax.nn.softmax(jnp.where(scaled >= threshold[..., None], scaled, -jnp.inf), axis=-1)
    tokens = jnp.where(
        rows.temperature > 0,
        _invert(probs, _uniform(rows.seed_high, rows.seed, num_sampled)),
        _first_equal(changed, max_changed),
    ).astype(jnp.int32)
    tokens = jnp.where(max_changed > -jnp.inf, tokens, NONE_ALLOWED)
    return jnp.where(finite, tokens, NOT_FINITE)


def score(logits: Float[Array, "*b V"], tokens: Int[Array, "*b"]) -> Scores:
    """Return ``Scores`` of each token. All come from one array, so the most probable token has exactly the greatest score, and rank 1."""
    logprobs = log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[..., None], axis=-1)
    top, top_tokens = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    return Scores(chosen[..., 0], jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32) + 1, top_tokens, top)


def _threshold(scaled: Float[Array, "B R V"], rows: SlotSampling) -> Float[Array, "B R"]:
    """Return the smallest logit that top-k and top-p keep; ties are kept too. Logits dropped by min-p are −∞.

    Each threshold is the greatest logit such that the logits at or above it make up k tokens, or the probability p. A bitwise search
    finds both with 64 plain reductions. Sorting the vocabulary gives the same result, but takes 18 times as long on CPU.
    """
    V = scaled.shape[-1]
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, V), V)
    top_k_logit = _greatest_with_weight(scaled, jnp.ones(scaled.shape, jnp.int32), k)
    probs = jax.nn.softmax(jnp.where(scaled >= top_k_logit[..., None], scaled, -jnp.inf), axis=-1)
    enough = jnp.maximum(
        rows.top_p, jnp.finfo(jnp.float32).tiny
    )  # a top-p that is 0 in float32 keeps the most probable token
    top_p_logit = _greatest_with_weight(scaled, probs, enough)
    # Rounding can make the sum reach 1 before the last token. top-p 1 must still keep all tokens, as without truncation.
    return jnp.where(rows.top_p >= 1, top_k_logit, jnp.maximum(top_k_logit, top_p_logit))


def _greatest_with_weight(x: Float[Array, "B R V"], weights: Array, enough: Array) -> Float[Array, "B R"]:
    """Return the greatest value v of ``x`` such that the weights of all values ≥ v sum to at least ``enough``; −∞ if there is none."""
    sign = jnp.uint32(1 << 31)

    def key(x):  # as unsigned integers in the same order: all bits of negative floats flipped, else the sign bit
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return jnp.where(bits & sign != 0, ~bits, bits | sign)

    keys = key(x)

    def try_bit(i, threshold):
        candidate = threshold | (sign >> i.astype(jnp.uint32))
        total = jnp.sum(jnp.where(keys >= candidate[..., None], weights, 0), axis=-1)
        return jnp.where(total >= enough, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(x.shape[:-1], jnp.uint32))
    threshold = jnp.maximum(threshold, key(jnp.float32(-jnp.inf)))  # −∞ if no value has enough weight
    return jax.lax.bitcast_convert_type(jnp.where(threshold & sign != 0, threshold ^ sign, ~threshold), jnp.float32)


def _uniform(high: Int[Array, "B R"], low: Int[Array, "B R"], num_sampled: Int[Array, "B R"]) -> Float[Array, "B R"]:
    """Return one number in [0, 1) per row, from its 64-bit seed (two words) and its number of sampled tokens.

    Threefry with key 0 permutes the seeds, so different seeds give different keys. Below 2³² the key is ``fold_in(key(0), seed)``.
    """

    def draw(high, low, number):
        key_words = threefry_2x32(jnp.zeros(2, jnp.uint32), jnp.stack([high, low]))
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key_words, impl="threefry2x32"), number))

    return jax.vmap(jax.vmap(draw))(high, low, num_sampled)


def _invert(probs: Float[Array, "B R V"], uniform: Float[Array, "B R"]) -> Int[Array, "B R"]:
    """Return the first token whose cumulative probability exceeds ``uniform`` × total; never a token with probability 0."""
    cumulative = jnp.cumsum(probs, axis=-1)
    target = uniform[..., None] * cumulative[..., -1:]
    index = jnp.sum(cumulative <= target, axis=-1)
    last_possible = probs.shape[-1] - 1 - jnp.argmax(probs[..., ::-1] > 0, axis=-1)
    return jnp.minimum(index, last_possible)


def bias_width(num_positions: int) -> int:
    """Return the number of biases per rank that one run takes, for launches with ``num_positions`` positions per rank."""
    return BIASES_PER_POSITION * num_positions


def mask_words(vocab_size: int) -> int:
    """Return the number of int32 words of a bitmask."""
    return -(-vocab_size // 32)


def add_biases(
    logits: Float[Array, "J V"], place: Int[Array, "J"], biases: Int[Array, "_ 4"], first: Int[Array, ""] | int = 0
) -> Float[Array, "J V"]:
    """Add biases to the logits of single positions. place: output index of the token sampled at each position.

    biases: rows of position index, token, bits of a float32 bias, and the output index from which the bias no longer applies.
    first: the token of ``logits[:, 0]``, if the vocabulary is sharded over devices.
    """
    J, V = logits.shape
    position, token, bits, until = biases.T
    applies = (position >= 0) & (place[jnp.maximum(position, 0)] < until) & (token >= first) & (token < first + V)
    indices = jnp.where(applies, position, J), jnp.where(applies, token - first, V)  # beyond the end: dropped
    return logits.at[indices].add(jax.lax.bitcast_convert_type(bits, jnp.float32), mode="drop")


def penalise(
    logits: Float[Array, "J V"],
    counts: Int[Array, "J V"],
    presence: Float[Array, "J"],
    frequency: Float[Array, "J"],
    repetition: Float[Array, "J"],
) -> Float[Array, "J V"]:
    """Apply penalties as vLLM and OpenAI define them.

    counts: 2 × (times in the output) + (1 if in the prompt). For tokens in the output or the prompt, a positive logit is divided by
    ``repetition``, any other multiplied. ``frequency`` × times is subtracted, and ``presence`` if the token is in the output.
    """
    times = counts >> 1
    factor = jnp.where(counts > 0, repetition[:, None], 1.0)
    x = jnp.where(logits > 0, logits / factor, logits * factor)
    return x - frequency[:, None] * times - jnp.where(times > 0, presence[:, None], 0.0)


def allowed(mask: Int[Array, "J W"], vocab_size: int) -> Bool[Array, "J V"]:
    """Unpack a bitmask: bit ``t % 32`` of word ``t // 32`` is set if token t is allowed."""
    bits = (mask[..., None] >> jnp.arange(32)) & 1
    return bits.reshape(*mask.shape[:-1], -1)[..., :vocab_size] != 0


def counts_along_drafts(
    counts: Int[Array, "J V"], tokens: Int[Array, "J"], number: Int[Array, "J"], most_drafts: int, most: int
) -> Int[Array, "J V"]:
    """Return the token counts before each position samples, as if the drafts of its row up to there were accepted.

    counts: of each position's slot, as in ``penalise``. tokens: a row's last token at ``number`` 0, then its drafts. most: greatest count.
    """
    is_draft = (number > 0)[:, None]
    own_draft = jnp.where(is_draft, 2 * jax.nn.one_hot(tokens, counts.shape[-1], dtype=counts.dtype), 0)
    drafts_so_far = own_draft
    for _ in range(most_drafts - 1):
        drafts_so_far = own_draft + jnp.where(is_draft, jnp.roll(drafts_so_far, 1, axis=0), 0)
    return jnp.minimum(counts + drafts_so_far, 2 * most + 1)
