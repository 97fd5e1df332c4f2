"""Logits changed on the device as the host prepared it: biases of single tokens, penalties by counts, packed masks of tokens.

In vLLM's order: bias, then penalties, then masks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BIASES_PER_POSITION = 64
"""Biases that one run of the program has room for, times its positions; longer lists take further runs."""


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
    return logits.at[at].add(lax.bitcast_convert_type(bits, jnp.float32), mode="drop")


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
