"""Attention sizes of multi-head latent attention, and of the indexer of sparse attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsjax.config.checks import check_integer, reject


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """The sparse attention indexer, which scores the tokens that a query may attend to. `config.json` prefixes its fields with `index_`."""

    topk: int  # tokens that a query attends to (docs/sparse-attention.md); in some families, compressed entries
    n_heads: int  # index query heads
    head_dim: int  # width of an index query

    def __post_init__(self):
        for name, least in (("topk", 1), ("n_heads", 1), ("head_dim", 2)):
            check_integer(f"index_{name}", getattr(self, name), least)

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> IndexerConfig:
        """Read the indexer's fields of `config.json`."""
        return cls(*(raw.get(f"index_{field.name}") for field in dataclasses.fields(cls)))

    def to_dict(self) -> dict[str, int]:
        """Return the indexer's fields of `config.json`."""
        return {f"index_{name}": value for name, value in dataclasses.asdict(self).items()}


INDEXER_KEYS = tuple(f"index_{field.name}" for field in dataclasses.fields(IndexerConfig))
"""The indexer's fields in `config.json`."""


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention. Names are Hugging Face's."""

    kinds = ("mla",)  # values of `LayerKind.attention`
    index_format = "fp8"  # DeepSeek's code rounds index queries and keys to it (`--index-scores`)
    q_lora_rank: int | None  # width of the query latent; None: queries are projected in one step
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: IndexerConfig | None = None  # for sparse attention (V3.2); None: a query attends to all tokens before it

    def __post_init__(self):
        least = {"kv_lora_rank": 1, "qk_nope_head_dim": 1, "qk_rope_head_dim": 2, "v_head_dim": 1}
        if self.q_lora_rank is not None:
            least["q_lora_rank"] = 1
        for name, value in least.items():
            check_integer(name, getattr(self, name), value)
        check_rotated(self.qk_rope_head_dim, self.indexer)
        if self.indexer is not None and self.q_lora_rank is None:
            raise reject("q_lora_rank", None, "an integer: index queries are made from the query latent")

    @property
    def qk_head_dim(self) -> int:
        """Query and key width per head: non-rotary plus rotary."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of the part of a cached token that attention uses as the value."""
        return self.kv_lora_rank

    def compressors(self, kind: str) -> tuple[tuple[int, int, int], ...]:
        """Return (entry width, number of series, rate) of each compressor of a layer: none."""
        return ()

    def weights(self, kind: str, heads: int, width: int, tp: int) -> tuple[list[tuple[int, int]], int, int]:
        """Return one device's weights of an attention layer, without biases: shapes `[in, out]` of the matrices that can be quantised, the
        number of others, and how many of those are always float32. kind: see `LayerKind.attention`. tp: devices that share the `heads`.
        """
        heads, rank, query = heads // tp, self.kv_lora_rank, self.q_lora_rank or width
        matrices = [(rank, heads * (self.qk_nope_head_dim + self.v_head_dim)), (heads * self.v_head_dim, width)]
        matrices += [(query, heads * self.qk_head_dim), (width, rank + self.qk_rope_head_dim)]
        matrices += [(width, query)] if self.q_lora_rank is not None else []
        others = rank + (self.q_lora_rank or 0)
        if self.indexer is not None:
            index = self.indexer.head_dim
            matrices += [(query, self.indexer.n_heads * index), (width, index)]
            others += 2 * index + width * self.indexer.n_heads
        return matrices, others, 0


def check_rotated(width: int, indexer: IndexerConfig | None) -> None:
    """Raise `ConfigError` if `width` values of a head or an index head cannot be rotated."""
    if width % 2:
        raise reject("qk_rope_head_dim", width, "an even number: rotary dimensions come in pairs")
    if indexer is not None and indexer.head_dim < width:
        raise reject("index_head_dim", indexer.head_dim, f"at least qk_rope_head_dim, {width}")
