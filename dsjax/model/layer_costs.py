"""Costs and cache groups of a layer of any kind: MLA and compressed attention behind one interface, and the other products."""

from collections.abc import Iterable

import numpy as np

from dsjax.config import ModelConfig
from dsjax.config.layers import LayerKind
from dsjax.model.cache_groups import CacheGroup, cache_groups
from dsjax.model.compressed.costs import compressed_cost
from dsjax.model.compressed.groups import compressed_groups
from dsjax.model.forms import Form
from dsjax.model.mla_costs import AttentionCost, mla_cost
from dsjax.model.parameter_counts import expert_parameters, mlp_parameters


def attention_cost(config: ModelConfig, attention: str, form: str | Form, **work) -> AttentionCost:
    """Return the cost of one layer's attention. attention: see `LayerKind`. form: the MLA form. work: the other arguments of `mla_cost`."""
    return mla_cost(config, form, **work) if attention == "mla" else compressed_cost(config, attention, **work)


def smallest_pages(
    config: ModelConfig, layers: Iterable[int], dtype: np.dtype, *, fp8_index: bool = False
) -> tuple[CacheGroup, ...]:
    """Return the cache groups of these layers, with ``ModelConfig.page_tokens`` tokens on a page. fp8_index: see ``cache_groups``."""
    if config.v4 is not None:
        return compressed_groups(config, layers, dtype, config.page_tokens)
    return cache_groups(config, layers, dtype, fp8_index=fp8_index)


def values_beside(config: ModelConfig, kind: LayerKind, tp: int = 1) -> int:
    """Return multiply-adds per token of one layer's products on one device, without attention and routed experts."""
    values = 2 * residual_values(config)
    if not kind.routed:
        return values + mlp_parameters(config, config.intermediate_size // tp)
    return (
        values
        + config.n_shared_experts * expert_parameters(config) // tp
        + config.n_routed_experts * config.hidden_size
    )


def residual_values(config: ModelConfig) -> int:
    """Return multiply-adds per token of one block's residual connection: the hyper-connections' projection and mixing of streams."""
    return sum(n * config.hidden_size * (n * (n + 2) + n) for n in config.streams)
