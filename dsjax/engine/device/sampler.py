"""Choosing the next token on the device: greedy inside the step, everything else in small programs beside it.

A request's draw depends on its own seed, the number of tokens it has made, and its own logits, on nothing else: not on its
row, its rank, or what runs beside it. Before a draw, the host's changes are applied to the logits in vLLM's order: biases of single tokens,
then penalties by counts, then packed masks of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int

from dsjax.engine.contract.sampling_params import MAX_LOGPROBS
from dsjax.model.softmax import log_softmax

NOT_FINITE = -1
"""Instead of a token where a logit is NaN or infinite."""
NONE_ALLOWED = -2
"""Instead of a token where none may be taken."""
BIASES_PER_POSITION = 64
"""Biases that one run of the program has room for, times its positions; longer lists take further runs."""


def greedy(logits: Float[Array, "B R V"]) -> Int[Array, "B R"]:
    """The most probable token (lowest id of equals), or −1 where any logit is not finite.

    Two plain reductions: XLA's CPU backend computes ``argmax``, a reduction of pairs, one element at a time.
    """
    most = jnp.max(logits, axis=-1)  # NaN if any logit is
    finite = jnp.isfinite(most) & jnp.isfinite(jnp.min(logits, axis=-1))
    return jnp.where(finite, _first(logits, most), NOT_FINITE)


def _first(logits: Float[Array, "*b V"], most: Float[Array, "*b"]) -> Int[Array, "*b"]:
    V = logits.shape[-1]
    return jnp.min(jnp.where(logits == most[..., None], jnp.arange(V, dtype=jnp.int32), V), axis=-1)


@jax.tree_util.register_dataclass
@dataclass
class SlotSampling:
    """How tokens are drawn: of each slot in the device's state, ``[B, slots]``; of each row of a launch, ``[B, R]``, from its slot's.

    The fields are those of ``commands.Sampling``.
    """

    num_prompt_tokens: Int[Array, "B Z"]
    seed: Int[Array, "B Z"]  # uint32, the low word
    seed_high: Int[Array, "B Z"]  # uint32
    top_k: Int[Array, "B Z"]  # 0: all
    temperature: Float[Array, "B Z"]  # 0: greedy
    top_p: Float[Array, "B Z"]
    min_p: Float[Array, "B Z"]
    presence: Float[Array, "B Z"]
    frequency: Float[Array, "B Z"]
    repetition: Float[Array, "B Z"]


class Scores(NamedTuple):
    """Log-probability and place of one token at each position, and the most probable tokens with theirs."""

    logprobs: Float[Array, "*b"]
    ranks: Int[Array, "*b"]
    top_tokens: Int[Array, "*b 20"]
    top_logprobs: Float[Array, "*b 20"]


class Wanted(NamedTuple):
    """What any row of a launch asks of its draw: the same on all devices, so that all take the same branch. Booleans."""

    truncation: Array | bool  # top-k or top-p
    penalties: Array | bool = False
    masks: Array | bool = False


def sample(
    logits: Float[Array, "B R V"],
    changed: Float[Array, "B R V"],
    rows: SlotSampling,
    num_made: Int[Array, "B R"],
    wanted: Wanted,
) -> Int[Array, "B R"]:
    """Draw each row's token; ``NOT_FINITE`` or ``NONE_ALLOWED`` where that is impossible.

    logits: the model's; changed: what bias, penalties and masks made of them. num_made: tokens that each row's request has made so far.

    Tokens outside min-p, then top-k, then top-p, get probability 0; the draw inverts the cumulative distribution *in vocabulary
    order* at one uniform number, so that rounding which swaps two nearly equal tokens in a sorted order changes nothing.
    Truncation is skipped when no row wants it.
    """
    finite = jnp.isfinite(jnp.max(logits, axis=-1)) & jnp.isfinite(jnp.min(logits, axis=-1))
    most = jnp.max(changed, axis=-1)
    scaled = changed / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[..., None]
    least = jnp.max(scaled, axis=-1) + jnp.log(rows.min_p)  # log 0 = −∞ keeps all
    scaled = jnp.where(scaled >= least[..., None], scaled, -jnp.inf)
    least = jax.lax.cond(
        wanted.truncation, _threshold, lambda scaled, rows: jnp.full(scaled.shape[:-1], -jnp.inf), scaled, rows
    )
    probs = jax.nn.softmax(jnp.where(scaled >= least[..., None], scaled, -jnp.inf), axis=-1)
    tokens = jnp.where(
        rows.temperature > 0, _invert(probs, _uniform(rows.seed_high, rows.seed, num_made)), _first(changed, most)
    ).astype(jnp.int32)
    tokens = jnp.where(most > -jnp.inf, tokens, NONE_ALLOWED)
    return jnp.where(finite, tokens, NOT_FINITE)


def score(logits: Float[Array, "*b V"], tokens: Int[Array, "*b"]) -> Scores:
    """``Scores`` of each token, all from one array, so that the most probable token's is the greatest to the bit, and its place is 1."""
    logprobs = log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[..., None], axis=-1)
    top, top_tokens = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    return Scores(chosen[..., 0], jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32) + 1, top_tokens, top)


def _threshold(scaled: Float[Array, "B R V"], rows: SlotSampling) -> Float[Array, "B R"]:
    """The least logit that top-k and top-p keep; equals of it are kept too. Those that min-p dropped are −∞.

    Both are the greatest logit at or above which there is enough: k tokens, or the probability p. It is searched for bit by
    bit, which is 64 plain reductions. Sorting the vocabulary gives the same, but takes 18 times as long on CPU.
    """
    V = scaled.shape[-1]
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, V), V)
    kth = _greatest_with(scaled, jnp.ones(scaled.shape, jnp.int32), k)
    probs = jax.nn.softmax(jnp.where(scaled >= kth[..., None], scaled, -jnp.inf), axis=-1)
    least = _greatest_with(scaled, probs, rows.top_p)
    # Rounding lets the sum reach 1 before the last token; top-p 1 keeps all the same, as where no row wants truncation.
    return jnp.where(rows.top_p >= 1, kth, jnp.maximum(kth, least))


def _greatest_with(x: Float[Array, "B R V"], weights: Array, enough: Array) -> Float[Array, "B R"]:
    """The greatest value of ``x`` such that the weights of it and all greater ones reach ``enough``; −∞ where none does."""
    sign = jnp.uint32(1 << 31)

    def key(x):  # orders as the floats do
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return jnp.where(bits & sign != 0, ~bits, bits | sign)

    keys = key(x)

    def try_bit(i, threshold):
        candidate = threshold | (sign >> i.astype(jnp.uint32))
        total = jnp.sum(jnp.where(keys >= candidate[..., None], weights, 0), axis=-1)
        return jnp.where(total >= enough, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(x.shape[:-1], jnp.uint32))
    threshold = jnp.maximum(threshold, key(jnp.float32(-jnp.inf)))
    return jax.lax.bitcast_convert_type(jnp.where(threshold & sign != 0, threshold ^ sign, ~threshold), jnp.float32)


def _uniform(high: Int[Array, "B R"], low: Int[Array, "B R"], num_made: Int[Array, "B R"]) -> Float[Array, "B R"]:
    """One number in [0, 1) for each row, from the two words of its seed and its count of tokens.

    Threefry under key 0 is a permutation of 64 bits, so no two seeds give the same key. Below 2³² it is `fold_in(key(0), seed)`.
    """

    def draw(high, low, number):
        words = threefry_2x32(jnp.zeros(2, jnp.uint32), jnp.stack([high, low]))
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), number))

    return jax.vmap(jax.vmap(draw))(high, low, num_made)


def _invert(probs: Float[Array, "B R V"], uniform: Float[Array, "B R"]) -> Int[Array, "B R"]:
    """The first token whose cumulative probability exceeds ``uniform`` of the total; never one of probability 0."""
    cumulative = jnp.cumsum(probs, axis=-1)
    target = uniform[..., None] * cumulative[..., -1:]
    index = jnp.sum(cumulative <= target, axis=-1)
    last = probs.shape[-1] - 1 - jnp.argmax(probs[..., ::-1] > 0, axis=-1)
    return jnp.minimum(index, last)


def bias_width(num_positions: int) -> int:
    """Biases of a rank that one run takes, for launches of ``num_positions`` positions a rank."""
    return BIASES_PER_POSITION * num_positions


def mask_words(vocab_size: int) -> int:
    """int32 words of a packed mask."""
    return -(-vocab_size // 32)


def add_biases(
    logits: Float[Array, "J V"], place: Int[Array, "J"], biases: Int[Array, "_ 4"], first: Int[Array, ""] | int = 0
) -> Float[Array, "J V"]:
    """Add biases to the logits of single positions. place: the number in the output of the token that each position makes.

    biases: index of a position, token, bits of a float32 bias, and the number in the output from which it holds no more. first: the token
    that ``logits[:, 0]`` belongs to, where the vocabulary is spread over devices.
    """
    J, V = logits.shape
    index, token, bits, until = biases.T
    applies = (index >= 0) & (place[jnp.maximum(index, 0)] < until) & (token >= first) & (token < first + V)
    at = jnp.where(applies, index, J), jnp.where(applies, token - first, V)  # beyond the end: dropped
    return logits.at[at].add(jax.lax.bitcast_convert_type(bits, jnp.float32), mode="drop")


def penalise(
    logits: Float[Array, "J V"],
    counts: Int[Array, "J V"],
    presence: Float[Array, "J"],
    frequency: Float[Array, "J"],
    repetition: Float[Array, "J"],
) -> Float[Array, "J V"]:
    """Penalties as vLLM and OpenAI define them.

    counts: 2 × (times in the output) + (1 if in the prompt). With a count or in the prompt, the logit is divided by ``repetition``
    where positive and else multiplied; ``frequency`` × times is subtracted; and ``presence`` if there is any time.
    """
    times = counts >> 1
    factor = jnp.where(counts > 0, repetition[:, None], 1.0)
    x = jnp.where(logits > 0, logits / factor, logits * factor)
    return x - frequency[:, None] * times - jnp.where(times > 0, presence[:, None], 0.0)


def allowed(mask: Int[Array, "J W"], vocab_size: int) -> Bool[Array, "J V"]:
    """A packed mask unpacked: bit ``t % 32`` of word ``t // 32`` says that token t may be made."""
    bits = (mask[..., None] >> jnp.arange(32)) & 1
    return bits.reshape(*mask.shape[:-1], -1)[..., :vocab_size] != 0


def counts_along_drafts(
    counts: Int[Array, "J V"], tokens: Int[Array, "J"], number: Int[Array, "J"], most_drafts: int, most: int
) -> Int[Array, "J V"]:
    """The counts before each position, if the drafts before it in its row are what was made there.

    counts: of each position's slot. tokens: a row's last token at ``number`` 0, then its drafts.
    """
    is_draft = (number > 0)[:, None]
    own = jnp.where(is_draft, 2 * jax.nn.one_hot(tokens, counts.shape[-1], dtype=counts.dtype), 0)
    drafted = own
    for _ in range(most_drafts - 1):
        drafted = own + jnp.where(is_draft, jnp.roll(drafted, 1, axis=0), 0)
    return jnp.minimum(counts + drafted, 2 * most + 1)
