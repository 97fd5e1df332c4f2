"""Rotary embedding settings, and their two spellings in a `config.json`.

Original: `rope_theta` and `rope_scaling {"type": …}`. Transformers 5: `rope_parameters {"rope_type", "rope_theta", …}`.
`dsjax/model/rope.py` computes the frequencies.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dsjax.config.checks import check_boolean, check_choice, check_integer, check_mapping, check_number, reject
from dsjax.errors import ConfigError

_DEFAULT_THETA = 10000.0
_YARN_KEYS = (
    "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"
)  # fmt: skip
_TYPES = {"default": "default", "yarn": "yarn", "deepseek_yarn": "yarn"}
"""`rope_type` → `RopeConfig.type`. `deepseek_yarn`, vLLM's name that sarvam's configurations use, is plain YaRN."""


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return the YaRN magnitude `0.1 · mscale · ln(factor) + 1`; 1 if `factor` is at most 1 (arXiv 2309.00071 §3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: plain (`type="default"`) or YaRN-stretched (`type="yarn"`, arXiv 2309.00071).

    The YaRN fields are ignored under `"default"`. `mscale`, `mscale_all_dim` and `attention_factor` are `None` if
    `config.json` does not set them. `interleave`: rotated pairs are (x0, x1), (x2, x3), …, else (x0, x_{O/2}), ….
    `truncate`: round the ramp's ends outwards to whole dimensions.
    """

    theta: float = _DEFAULT_THETA
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    interleave: bool = True
    truncate: bool = True

    def __post_init__(self):
        check_number("rope_theta", self.theta, least=1, above=True)
        check_choice("rope_scaling.type", self.type, ("default", "yarn"))
        check_boolean("rope_interleave", self.interleave)
        if self.type == "default":
            return
        check_number("rope_scaling.factor", self.factor, least=1)
        check_integer("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings, least=1)
        check_number("rope_scaling.beta_slow", self.beta_slow, least=0, above=True)
        check_number("rope_scaling.beta_fast", self.beta_fast, least=0, above=True)
        if self.beta_fast < self.beta_slow:
            raise reject("rope_scaling.beta_fast", self.beta_fast, f"at least beta_slow, which is {self.beta_slow:g}")
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            if getattr(self, name) is not None:
                check_number(f"rope_scaling.{name}", getattr(self, name), least=0)
        check_boolean("rope_scaling.truncate", self.truncate)

    @property
    def cos_sin_scale(self) -> float:
        """Factor on cos and sin (transformers' `attention_scaling`).

        `attention_factor` if given; else `yarn_mscale(mscale) / yarn_mscale(mscale_all_dim)` if both are given and not
        zero; else `yarn_mscale(1)`. DeepSeek's own remote code differs in the last case: if `mscale_all_dim` is zero or
        missing, it keeps `mscale` and divides by 1. We follow transformers.
        """
        if self.type == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_correction(self) -> float:
        """Factor on the softmax scale: `yarn_mscale(factor, mscale_all_dim)²` if `mscale_all_dim` is given and not zero, else 1.

        Transformers' V2 and V3 classes (`yarn_apply_mscale`) and DeepSeek's remote code agree.
        """
        if self.type == "default" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2

    def to_dict(self) -> dict[str, Any]:
        """Return `rope_theta`, `rope_scaling` (null under `"default"`) and `rope_interleave`, in the original spelling."""
        scaling = None
        if self.type != "default":
            given = {key: getattr(self, key) for key in _YARN_KEYS if getattr(self, key) is not None}
            scaling = {"type": self.type, "rope_type": self.type, **given}
        return {"rope_theta": self.theta, "rope_scaling": scaling, "rope_interleave": self.interleave}


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Read the rotary settings of a `config.json` in either spelling, or in both if they agree.

    Raises `ConfigError` on an unknown key or type, a missing YaRN field, or two spellings that contradict each other.
    """
    top_theta = {}
    if raw.get("rope_theta") is not None:
        top_theta["theta"] = check_number("rope_theta", raw["rope_theta"], least=1, above=True)
    spellings = {}
    for name in ("rope_scaling", "rope_parameters"):
        if raw.get(name) is not None:
            spellings[name] = _read_spelling(name, check_mapping(name, raw[name]))
    settings: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, given in [("rope_theta", top_theta), *spellings.items()]:
        for key, value in given.items():
            if key in settings and settings[key] != value:
                raise ConfigError(
                    f"config field `{source}`: found {key} = {value!r}, but `{origin[key]}` says {settings[key]!r}; "
                    "accepted is one spelling, or both with the same values"
                )
            settings[key], origin[key] = value, source
    if settings.get("type") == "yarn":
        for key in ("factor", "original_max_position_embeddings"):
            if key not in settings:
                raise ConfigError(f"config field `{next(iter(spellings))}.{key}`: not found, YaRN needs it")
    if raw.get("rope_interleave") is not None:
        settings["interleave"] = raw["rope_interleave"]
    return RopeConfig(**settings)


def _read_spelling(name: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `RopeConfig` fields that one of the two JSON objects sets, with unified types and without nulls."""
    kinds = [
        _TYPES[check_choice(f"{name}.{key}", raw[key], tuple(_TYPES))]
        for key in ("type", "rope_type")
        if raw.get(key) is not None
    ]
    if len(set(kinds)) > 1:
        raise reject(f"{name}.rope_type", raw["rope_type"], f"what `type` says, which is {raw['type']!r}, or none")
    settings: dict[str, Any] = {"type": kinds[0] if kinds else "default"}
    for key, value in raw.items():
        if key in ("type", "rope_type") or value is None:
            continue
        if key == "rope_theta":
            settings["theta"] = check_number(f"{name}.rope_theta", value, least=1, above=True)
        elif key == "partial_rotary_factor":
            if value != 1:
                raise reject(f"{name}.{key}", value, "1: MLA rotates all of qk_rope_head_dim")
        elif key not in _YARN_KEYS:
            raise ConfigError(f"config field `{name}.{key}`: unknown; accepted are {', '.join(_YARN_KEYS)}")
        elif settings["type"] == "default":
            raise reject(f"{name}.{key}", value, 'no such key under type "default"')
        elif key in ("beta_fast", "beta_slow") and value == 0:
            continue  # Transformers reads 0 as "not given".
        elif key == "truncate":
            settings[key] = check_boolean(f"{name}.{key}", value)
        elif key == "original_max_position_embeddings":
            settings[key] = check_integer(f"{name}.{key}", value, least=1)
        else:
            settings[key] = check_number(f"{name}.{key}", value, least=1 if key == "factor" else 0)
    return settings
