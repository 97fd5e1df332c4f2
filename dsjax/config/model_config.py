"""A model's configuration: one frozen dataclass with Hugging Face's field names, validated on construction.

`dsjax/config/families.py` lists the supported families: DeepSeek-V3's and related ones. If a model's remote code and transformers
differ, dsjax follows transformers.
"""

import dataclasses
import importlib.resources
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsjax.config.attention import MlaConfig
from dsjax.config.checks import check_boolean, check_choice, check_integer, check_mapping, check_number, reject
from dsjax.config.deepseek_v4 import DeepseekV4
from dsjax.config.families import FAMILIES, Family
from dsjax.config.hugging_face import read_fields, text_part, write_fields
from dsjax.config.layers import LayerKind, LayerRun
from dsjax.config.quantization import Quantization
from dsjax.config.rope import RopeConfig
from dsjax.errors import ConfigError, why_unreadable

# Minimum value of each integer field.
_INTEGERS = {
    "vocab_size": 1, "hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
    "max_position_embeddings": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0,
}  # fmt: skip
_EXPERT_INTEGERS = {
    "moe_intermediate_size": 1, "n_shared_experts": 0, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model's shape and arithmetic, as `config.json` describes them. Names are Hugging Face's.

    Attention has a separate configuration: `v4` for `deepseek_v4` (docs/deepseek-v4.md), else `mla`; the other is None.
    `n_routed_experts = 0` is a model without experts: every layer is dense, and the expert and router fields have no
    effect. `router`: a subclass that replaces `dsjax.model.router.ExpertRouter`; `config.json` has no such field.
    Construction raises `ConfigError` with the name of an invalid field.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    mla: MlaConfig | None = None
    v4: DeepseekV4 | None = None

    moe_intermediate_size: int = 0
    n_routed_experts: int = 0
    n_shared_experts: int = 0
    num_experts_per_tok: int = 0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    n_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    scoring_func: str = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    router: type | None = None

    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    num_nextn_predict_layers: int = 0
    quantization: Quantization | None = None
    torch_dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    hidden_act: str = "silu"
    initializer_range: float = 0.02

    def __post_init__(self):
        check_choice("model_type", self.model_type, tuple(FAMILIES))
        for name, least in _INTEGERS.items():
            check_integer(name, getattr(self, name), least)
        check_integer("n_routed_experts", self.n_routed_experts, least=0)
        if self.moe_layer_freq != 1 or isinstance(self.moe_layer_freq, bool):
            raise reject("moe_layer_freq", self.moe_layer_freq, "1: every layer after the dense ones has experts")
        check_number("rms_norm_eps", self.rms_norm_eps, least=0, above=True)
        check_number("initializer_range", self.initializer_range, least=0)
        check_boolean("tie_word_embeddings", self.tie_word_embeddings)
        check_boolean("attention_bias", self.attention_bias)
        check_choice("torch_dtype", self.torch_dtype, ("float32", "bfloat16", "float16"))
        check_choice("hidden_act", self.hidden_act, ("silu",))
        self._check_tokens()
        if self.family.always_interleaved and not self.rope.interleave:
            raise reject("rope_interleave", False, f"true: MLA of {self.model_type} rotates interleaved pairs only")
        self._check_v4()
        if self.is_moe:
            self._check_experts()

    def _check_v4(self) -> None:
        of_v4 = self.model_type == "deepseek_v4"
        if (self.v4 is not None, self.mla is None) != (of_v4, of_v4):
            raise reject("model_type", self.model_type, "deepseek_v4 with `v4` alone, and any other with `mla` alone")
        if self.v4 is None:
            if not self.family.matches(self.mla):
                raise reject("model_type", self.model_type, "a family whose attention `mla` describes")
            return
        if not self.is_moe:
            raise reject("n_routed_experts", 0, "an integer of at least 1: every layer of deepseek_v4 has experts")
        if self.num_attention_heads % self.v4.o_groups:
            raise reject("o_groups", self.v4.o_groups, f"a divisor of num_attention_heads, {self.num_attention_heads}")
        if self.attention_bias:
            raise reject("attention_bias", True, "false in a deepseek_v4 model")

    def _check_tokens(self) -> None:
        named = [("bos_token_id", self.bos_token_id)] if self.bos_token_id is not None else []
        for name, token in named + [("eos_token_id", token) for token in self.eos_token_id]:
            if check_integer(name, token, least=0) >= self.vocab_size:
                raise reject(name, token, f"a token id below vocab_size, which is {self.vocab_size}")

    def _check_experts(self) -> None:
        for name, least in _EXPERT_INTEGERS.items():
            check_integer(name, getattr(self, name), least)
        check_boolean("norm_topk_prob", self.norm_topk_prob)
        check_number("routed_scaling_factor", self.routed_scaling_factor, least=0, above=True)
        routers = self.family.routers
        check_choice("topk_method", self.topk_method, tuple(routers), f" in a {self.model_type} model")
        scores = (routers[self.topk_method],)
        check_choice("scoring_func", self.scoring_func, scores, f' with topk_method "{self.topk_method}"')
        if self.model_type == "deepseek_v2" and self.norm_topk_prob:
            raise reject("norm_topk_prob", True, "false: deepseek_v2 does not normalise the chosen weights")
        experts, groups = self.n_routed_experts, self.n_group
        if experts % groups:
            raise reject("n_group", groups, f"a divisor of n_routed_experts, which is {experts}")
        if self.topk_group > groups:
            raise reject("topk_group", self.topk_group, f"at most n_group, which is {groups}")
        if self.topk_method == "noaux_tc" and self.experts_per_group < 2:
            raise reject(
                "n_group", groups, f"at most {experts // 2}: a group is scored by its two best of {experts} experts"
            )
        selectable = experts if self.topk_method == "greedy" else self.topk_group * self.experts_per_group
        if self.num_experts_per_tok > selectable:
            raise reject(
                "num_experts_per_tok",
                self.num_experts_per_tok,
                f"at most {selectable}, the experts a token can choose from "
                f"({self.topk_group} of {groups} groups of {self.experts_per_group})",
            )

    @property
    def family(self) -> Family:
        """The model's row in `FAMILIES`."""
        return FAMILIES[self.model_type]

    @property
    def is_moe(self) -> bool:
        """Whether any layer has routed experts, MTP layers included."""
        return self.n_routed_experts > 0

    @property
    def routed_groups(self) -> tuple[int, int] | None:
        """Number of the router's expert groups, and maximum groups per token; None if a token may choose any experts."""
        limited = self.router is None and self.n_group > 1 and self.topk_method != "greedy"
        return (self.n_group, self.topk_group) if limited else None

    @property
    def num_dense_layers(self) -> int:
        """Layers of the main model with a dense MLP; they come first."""
        return min(self.first_k_dense_replace, self.num_hidden_layers) if self.is_moe else self.num_hidden_layers

    @property
    def num_moe_layers(self) -> int:
        """Layers of the main model with routed experts."""
        return self.num_hidden_layers - self.num_dense_layers

    @property
    def streams(self) -> tuple[int, ...]:
        """Extra axis of hidden states between tokens and width: the number of residual streams, or empty for a single stream."""
        return () if self.v4 is None else (self.v4.hc_mult,)

    @property
    def residual(self) -> str:
        """Kind of residual connection: a name in `dsjax.model.transformer.RESIDUALS`."""
        return "addition" if self.v4 is None else "streams"

    @property
    def page_tokens(self) -> int:
        """Page sizes must be a multiple of this many tokens. For deepseek_v4: whole compression windows of each rate, and at least the
        sliding window, of which a request keeps one full page (128)."""
        if self.v4 is None:
            return 1
        whole = math.lcm(*self.v4.rates)
        return -(-self.v4.sliding_window // whole) * whole

    @property
    def head_groups(self) -> int:
        """Number of head groups that must not be split over devices: one per head, or those of a grouped output projection."""
        return self.num_attention_heads if self.v4 is None else self.v4.o_groups

    def widths_over_tp(self, in_blocks: bool) -> dict[str, int]:
        """Return name → width of what `tp` splits besides routed experts. in_blocks: include heads, whose FP8 blocks it must not cut."""
        widths = {"dense MLP width": self.intermediate_size} if self.num_dense_layers else {}
        if self.n_shared_experts:
            widths["shared expert width"] = self.n_shared_experts * self.moe_intermediate_size
        if in_blocks:
            heads, own = self.num_attention_heads, self.attention
            widths["query heads' width"] = heads * own.qk_head_dim
            if self.mla is not None:
                widths["key and value heads' width"] = heads * (own.qk_nope_head_dim + own.v_head_dim)
            widths["value heads' width"] = heads * own.v_head_dim
        return widths

    @property
    def swiglu_limit(self) -> float | None:
        """Limit to which a SwiGLU's gate and up are clipped (`gated`); None: no clipping."""
        return None if self.v4 is None else self.v4.swiglu_limit

    @property
    def mtp_kind(self) -> LayerKind:
        """Kind of an MTP module's layer."""
        return LayerKind("mtp.layers", "moe" if self.is_moe else "dense") if self.v4 is None else self.v4.mtp_kind

    @property
    def layer_runs(self) -> tuple[LayerRun, ...]:
        """Runs of the main model's layers, by kind."""
        if self.v4 is not None:
            return self.v4.layer_runs
        dense, moe = LayerKind("dense_layers", "dense"), LayerKind("moe_layers", "moe")
        runs = LayerRun((dense,), self.num_dense_layers), LayerRun((moe,), self.num_moe_layers)
        return tuple(run for run in runs if run.count)

    def part(self, first: int, layers: int) -> "ModelConfig":
        """Return the configuration of `layers` of the model's layers, from `first` on. Only their number and their attention change."""
        return dataclasses.replace(self, num_hidden_layers=layers, v4=self.v4 and self.v4.part(first, layers))

    def split_at(self, *borders: int) -> "ModelConfig":
        """Return the same model with stacks split at these layers, as stages split them, if stacks are named by their first layer."""
        return dataclasses.replace(self, v4=self.v4 and dataclasses.replace(self.v4, borders=borders))

    def with_layers(self, attention: str, layers: int) -> "ModelConfig":
        """Return the configuration of a model with only `layers` layers of this kind of attention, and without MTP modules."""
        v4 = self.v4 and dataclasses.replace(self.v4, attention=(attention,) * layers, num_hash_layers=0)
        return dataclasses.replace(self, num_hidden_layers=layers, num_nextn_predict_layers=0, v4=v4)

    @property
    def experts_per_group(self) -> int:
        """Routed experts per router group."""
        return self.n_routed_experts // self.n_group

    @property
    def attention(self) -> MlaConfig | DeepseekV4:
        """Attention sizes of either family. Both classes have the fields that the planner and the engine read."""
        return self.mla or self.v4

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores before the softmax, including YaRN's correction."""
        return self.attention.qk_head_dim**-0.5 * self.rope.softmax_correction

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Read Hugging Face's `config.json`, in the original or the transformers-5 spelling.

        If the model has a vision part, only its text part is read. Keys that cannot change inference are ignored, unknown
        keys give a warning, and keys that would change the arithmetic in an unsupported way raise `ConfigError`.
        """
        return cls(**read_fields(cls, text_part(check_mapping("config.json", raw))))

    def to_dict(self) -> dict[str, Any]:
        """Return Hugging Face's `config.json` in the original spelling; `from_dict` reads it back to an equal config."""
        return write_fields(self)


INDEX_FORMATS = (MlaConfig.index_format, DeepseekV4.index_format)
"""Formats to which DeepSeek's code rounds index queries and keys (`--index-scores`)."""
MOST_BYTES = 10_000_000
"""Maximum bytes that `load_config` reads, so that it does not read a device or a weights file to the end."""


def bundled_models() -> tuple[str, ...]:
    """Return the bundled names for `load_config`: the folders of `configs/models` that hold a `config.json`."""
    models = importlib.resources.files("configs") / "models"
    return tuple(sorted(entry.name for entry in models.iterdir() if (entry / "config.json").is_file()))


def load_config(name_or_path: str | Path) -> ModelConfig:
    """Load a configuration from a bundled name (`deepseek-v3`), a directory with `config.json`, or a `config.json` file.

    A bundled name takes precedence over a directory of the same name; use `./demo` for the directory. Raises `ConfigError`.
    """
    if str(name_or_path) in bundled_models():
        source = importlib.resources.files("configs") / "models" / str(name_or_path) / "config.json"
        text = source.read_text(encoding="utf-8")
    else:
        path = Path(os.path.expanduser(name_or_path))
        source = path / "config.json" if path.is_dir() else path
        try:
            with source.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            text = data.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"no model configuration at {str(name_or_path)!r} ({source}: {why_unreadable(error)}); expected a directory with "
                f"config.json, the path of one, or a bundled name: {', '.join(bundled_models())}"
            ) from error
        if len(data) > MOST_BYTES:
            raise ConfigError(
                f"{source} has more than {MOST_BYTES:,} bytes, expected a config.json, which has a few thousand"
            )
    try:
        return ModelConfig.from_dict(json.loads(text))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
