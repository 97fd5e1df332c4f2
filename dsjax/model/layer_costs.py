"""What a layer costs whatever its kind: `mla_costs` and `compressed.costs` behind one name, and the products beside attention."""

from dsjax.config import ModelConfig
from dsjax.config.layers import LayerKind
from dsjax.model.compressed.costs import compressed_cost
from dsjax.model.forms import Form
from dsjax.model.mla_costs import AttentionCost, mla_cost
from dsjax.model.parameter_counts import expert_parameters, mlp_parameters


def attention_cost(config: ModelConfig, attention: str, form: str | Form, **work) -> AttentionCost:
    """Return the cost of one layer's attention. attention: see `LayerKind`. form: the MLA form. work: the other arguments of `mla_cost`."""
    return mla_cost(config, form, **work) if attention == "mla" else compressed_cost(config, attention, **work)


def values_beside(config: ModelConfig, kind: LayerKind, tp: int = 1) -> int:
    """Multiply-adds of a token in one layer's products on one device, beside attention and routed experts."""
    values = 2 * residual_values(config)
    if not kind.routed:
        return values + mlp_parameters(config, config.intermediate_size // tp)
    return (
        values
        + config.n_shared_experts * expert_parameters(config) // tp
        + config.n_routed_experts * config.hidden_size
    )


def residual_values(config: ModelConfig) -> int:
    """Multiply-adds of a token in one block's residual connection: hyper-connections' projection, and the mixture of streams."""
    return sum(n * config.hidden_size * (n * (n + 2) + n) for n in config.streams)
