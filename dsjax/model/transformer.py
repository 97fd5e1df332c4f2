"""The model's parts put together: decoder layers in two stacks, embedding, head, and the MTP modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig
from dsjax.model.mla import MLA
from dsjax.model.mlp import MLP
from dsjax.model.moe import MoE
from dsjax.model.norm import RMSNorm
from dsjax.model.parameters import Declaration, Matrix, ParameterInfo, ParameterTable, Weights, reinterpret, value_of


class DecoderLayer(nnx.Module):
    """Attention, then an MLP or experts: each is given the normed input, and its output is added to the input.

    Declared with a leading ``layers`` axis.
    """

    def __init__(self, declare: Declaration, config: ModelConfig, *, num_physical: int = 0, materialise: bool = False):
        D = config.hidden_size
        self.attn_norm = RMSNorm(declare, D, config.rms_norm_eps)
        self.attn = MLA(declare, config, materialise=materialise)
        self.mlp_norm = RMSNorm(declare, D, config.rms_norm_eps)
        if num_physical:
            self.moe = MoE(declare, config, num_physical)
        else:
            self.mlp = MLP(declare, D, config.intermediate_size, "mlp_width")


class Embedding(nnx.Module):
    """Token embedding table."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        self.weight = declare.parameter((config.vocab_size, config.hidden_size), ("embedded_vocab", "embed"))

    def __call__(
        self, tokens: Int[Array, "*b"], dtype, look_up: Callable[[Array, Array], Array] | None = None
    ) -> Float[Array, "*b D"]:
        """Rows of the table, in the compute dtype. look_up: gives them of a table that lies elsewhere, as it is stored."""
        if look_up is None:
            return value_of(self.weight)[tokens].astype(dtype)
        return reinterpret(look_up(self.weight[...], tokens), self.weight.info.dtype).astype(dtype)


class MTP(nnx.Module):
    """Multi-token prediction modules (V3 report §2.2): what they own beside the shared embedding and head."""

    def __init__(self, declare: Declaration, config: ModelConfig, *, num_physical: int, materialise: bool):
        D, depth = config.hidden_size, config.num_nextn_predict_layers
        stacked = declare.stacked(depth)
        self.embed_norm = RMSNorm(stacked, D, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(stacked, D, config.rms_norm_eps)
        self.eh_proj = Matrix(stacked, (2 * D, D), (None, "embed"), quantise=False)
        self.layers = DecoderLayer(stacked, config, num_physical=num_physical, materialise=materialise)
        self.final_norm = RMSNorm(stacked, D, config.rms_norm_eps)


class Transformer(nnx.Module):
    """All parameters of a model. The ways to run it are ``step.py`` (serving) and ``dense.py`` (training, reference).

    begins, ends: whether it has the model's first, its last layers; if not, it is a stage, without the embedding or the head.
    """

    def __init__(
        self,
        declare: Declaration,
        config: ModelConfig,
        *,
        num_physical: int,
        materialise: bool,
        mtp: bool,
        begins: bool = True,
        ends: bool = True,
    ):
        self.config = config
        mtp = mtp and config.num_nextn_predict_layers > 0
        if begins or (ends and (mtp or config.tie_word_embeddings)):
            self.embed = Embedding(declare, config)
        if config.num_dense_layers:
            self.dense_layers = DecoderLayer(declare.stacked(config.num_dense_layers), config, materialise=materialise)
        if config.num_moe_layers:
            self.moe_layers = DecoderLayer(
                declare.stacked(config.num_moe_layers), config, num_physical=num_physical, materialise=materialise
            )
        if not ends:
            return
        self.final_norm = RMSNorm(declare, config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head = Matrix(declare, (config.hidden_size, config.vocab_size), ("embed", "vocab"), quantise=False)
        if mtp:
            self.mtp = MTP(declare, config, num_physical=num_physical, materialise=materialise)

    @property
    def stacks(self) -> list[DecoderLayer]:
        """The stacks of layers in order, with their leading ``layers`` axis."""
        return [getattr(self, name) for name in ("dense_layers", "moe_layers") if hasattr(self, name)]

    def head_weight(self, dtype) -> Float[Array, "D V"]:
        """The output projection ``[D, V]``, which is the embedding's transpose where the two are tied."""
        if self.config.tie_word_embeddings:
            return value_of(self.embed.weight).astype(dtype).T
        return self.head.value(dtype)

    def stored_head(self) -> tuple[Array, bool]:
        """The output projection as it lies in memory, and whether that is transposed: ``[V, D]``, the embedding, where the two are tied.

        A transposed one is widened, as its bits are read along the model's width.
        """
        if self.config.tie_word_embeddings:
            return value_of(self.embed.weight).astype(np.float32), True
        return self.head.weight[...], False


def parameter_table(
    config: ModelConfig,
    *,
    weights: Weights = "bf16",
    platform: str = "cpu",
    num_physical: int | None = None,
    materialise: bool = False,
    mtp: bool = True,
    shared_apart: bool = True,
    derived_dtype: np.dtype | None = None,
    begins: bool = True,
    ends: bool = True,
) -> ParameterTable:
    """The model's structure and its parameters, holding no memory.

    weights: how matrices are kept; platform: where (see ``parameters.storage_dtype``); num_physical: physical experts,
    default the logical ones; materialise: with the products that the MLA form ``AM_CC_ME`` wants, which are derived
    from the others and in no checkpoint (``init == "derived"``); mtp: with the MTP modules, where the model has any. shared_apart:
    False where the shared expert is one of the physical experts, and has no parameters beside them. derived_dtype: as of ``Declaration``.
    begins, ends: as of ``Transformer``.
    """
    if not shared_apart:
        config = dataclasses.replace(config, n_shared_experts=0)
    num_physical = config.n_routed_experts if num_physical is None else num_physical
    declare = Declaration(weights, platform, derived_dtype=derived_dtype)
    model = Transformer(
        declare, config, num_physical=num_physical, materialise=materialise, mtp=mtp, begins=begins, ends=ends
    )
    return ParameterTable.of(model)


def abstract_parameters(config: ModelConfig, **options) -> dict[str, ParameterInfo]:
    """``{path: ParameterInfo}`` of a model; options as ``parameter_table``'s."""
    return dict(parameter_table(config, **options).infos)
