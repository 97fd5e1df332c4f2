"""The rule of ``method="auto"``."""

from __future__ import annotations

from sharding.dispatch.config import default_capacity

CPU_GATHER_TOKENS = 64
PADDED_TOKENS = 512


def choose_method(tokens: int, top_k: int, ranks: int, platform: str) -> str:
    """``gather``, ``padded`` or ``ragged`` for so many tokens per rank: the phase shows in that number.

    tokens: tokens of one rank (per chunk); top_k: experts a token uses; ranks: size of the EP group, width parts included.

    - ``gather`` where no method could move fewer rows: when ``padded``'s capacity is all of a rank's tokens (few tokens, or
      few ranks, so that a token has an expert nearly everywhere). Two collectives, no queues.
    - On CPU, where an all-to-all copies each pair's block by itself, ``gather`` up to ``CPU_GATHER_TOKENS``, then ``padded``;
      measured, see ``docs/dispatch.md``. ``ragged`` is emulated there by padding and never the better one.
    - On accelerators ``padded`` for decode, up to ``PADDED_TOKENS``, where latency counts and nothing should be
      negotiated; ``ragged`` for prefill, where bytes count. This is how DeepEP's low-latency and normal kernels divide
      the work; the threshold is not measured here.
    """
    if default_capacity(tokens, top_k, ranks) >= tokens:
        return "gather"
    if platform == "cpu":
        return "gather" if tokens <= CPU_GATHER_TOKENS else "padded"
    return "padded" if tokens <= PADDED_TOKENS else "ragged"
