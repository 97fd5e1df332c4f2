"""Attention sizes by family: `ModelConfig.mla` for multi-head latent attention, `ModelConfig.v4` for DeepSeek-V4."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsjax.config.checks import check_integer, reject


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """The sparse attention indexer, which scores the tokens that a query may attend to. `config.json` prefixes these fields with `index_`.

    topk: tokens that a query attends to (docs/sparse-attention.md); in `deepseek_v4`, compressed entries. n_heads, head_dim: of index
    queries.
    """

    topk: int
    n_heads: int
    head_dim: int

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
    """Multi-head latent attention. Names are Hugging Face's.

    q_lora_rank: width of the query latent; None: queries are projected in one step. indexer: for sparse attention (V3.2); None: a query
    attends to all tokens before it.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: IndexerConfig | None = None

    def __post_init__(self):
        least = {"kv_lora_rank": 1, "qk_nope_head_dim": 1, "qk_rope_head_dim": 2, "v_head_dim": 1}
        least |= {} if self.q_lora_rank is None else {"q_lora_rank": 1}
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


def check_rotated(width: int, indexer: IndexerConfig | None) -> None:
    """Raise `ConfigError` if `width` values of a head or an index head cannot be rotated."""
    if width % 2:
        raise reject("qk_rope_head_dim", width, "an even number: rotary dimensions come in pairs")
    if indexer is not None and indexer.head_dim < width:
        raise reject("index_head_dim", indexer.head_dim, f"at least qk_rope_head_dim, {width}")
