"""The rule of ``method="auto"``."""

from __future__ import annotations

from sharding.dispatch.config import default_capacity

CPU_GATHER_TOKENS = 256
PADDED_TOKENS = 512


def choose_method(tokens: int, top_k: int, ranks: int, platform: str, overlapped: bool = False) -> str:
    """``gather``, ``padded`` or ``ragged`` for so many tokens per rank: the phase shows in that number.

    tokens: tokens of one rank (per chunk); top_k: experts a token uses; ranks: over which whole experts
    are spread (1 where only their width is split: then ``gather`` is all there is to do); overlapped: as in
    ``DispatchConfig``.

    - ``gather`` where no method could move fewer rows: when ``padded``'s capacity is all of a rank's tokens (few tokens, or
      few ranks, so that a token has an expert nearly everywhere). Two collectives, no queues.
    - On emulated CPU devices ``gather`` was the fastest at every size measured (``docs/dispatch.md``): an all-to-all there
      copies each pair's block by itself, and ``ragged`` is emulated by padding. But each device then holds every token of the
      group, in one memory: past ``CPU_GATHER_TOKENS`` tokens ``padded``, whose buffers are smaller (a third, on 32 ranks).
    - On accelerators ``padded`` for decode, up to ``PADDED_TOKENS``, where latency counts and nothing should be
      negotiated; ``ragged`` for prefill, where bytes count. This is how DeepEP's low-latency and normal kernels divide
      the work; the threshold is not measured here.
    """
    if default_capacity(tokens, top_k, ranks, overlapped) >= tokens:
        return "gather"
    if platform == "cpu":
        return "gather" if tokens <= CPU_GATHER_TOKENS else "padded"
    return "padded" if overlapped or tokens <= PADDED_TOKENS else "ragged"
