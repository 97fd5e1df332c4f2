"""Model families: a row for each supported `model_type` of `config.json`, with its differences from DeepSeek-V3."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """Differences of one `model_type` from DeepSeek-V3. The transformers class of the family is the reference.

    architecture: written into `config.json`. routers: the supported topk_method -> scoring_func pairs.
    sparse: an indexer selects what layers attend to: tokens (docs/sparse-attention.md) or compressed entries.
    index_interleave: the indexer rotates pairs (0, 1), (2, 3), …; otherwise (0, O/2), ….
    always_interleaved: MLA rotates interleaved pairs regardless of `rope_interleave`.
    requires_mlp_list: transformers' class reads only `mlp_layer_types` and ignores `first_k_dense_replace`.
    has_forms: its attention is MLA, which has several forms; other attention has one.
    defaults: defaults of fields missing from `config.json` that differ from `ModelConfig`'s.
    """

    architecture: str = "DeepseekV3ForCausalLM"
    routers: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"noaux_tc": "sigmoid"})
    sparse: bool = False
    index_interleave: bool = False
    always_interleaved: bool = False
    requires_mlp_list: bool = False
    has_forms: bool = True
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def matches(self, attention: Any) -> bool:
        """Return whether an `MlaConfig` describes the family's attention."""
        return (attention.indexer is not None) == self.sparse


FAMILIES = {
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        routers={"greedy": "softmax", "group_limited_greedy": "softmax"},
        always_interleaved=True,
        defaults={"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    ),
    "deepseek_v3": Family(),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", sparse=True, always_interleaved=True),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM",
        routers={"noaux_tc": "sqrtsoftplus"},
        sparse=True,
        index_interleave=True,
        always_interleaved=True,
        has_forms=False,
        defaults={"scoring_func": "sqrtsoftplus"},
    ),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", requires_mlp_list=True, defaults={"first_k_dense_replace": 1}),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM",
        sparse=True,
        index_interleave=True,
        always_interleaved=True,
        defaults={"first_k_dense_replace": 3},
    ),
    "kimi_k2": Family(),
    "sarvam_mla": Family("SarvamMLAForCausalLM", defaults={"q_lora_rank": None, "first_k_dense_replace": 1}),
}
WITH_TEXT_PART = ("kimi_k25",)
"""Each `model_type` whose `config.json` nests a model of `FAMILIES` as `text_config`. Its vision part is not read."""
SPARSE = tuple(name for name, family in FAMILIES.items() if family.sparse)
