"""Transformers' DeepSeek classes, filled with `RandomWeights`: the reference that logits are compared with. Needs torch."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from goldens.random_weights import RandomWeights
from safetensors import safe_open
from transformers.modeling_layers import MtpModel

_CLASSES = {
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "deepseek_v32": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM),
    # Kimi-K2's remote code is DeepSeek-V3's under another name; transformers has no class of that name.
    "kimi_k2": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "kimi_k25": (transformers.Kimi_K25Config, transformers.Kimi_K25ForConditionalGeneration),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM),
    "sarvam_mla": (transformers.SarvamMLAConfig, transformers.DeepseekV3ForCausalLM),
}


def reference_model(raw: Mapping[str, Any], weights: RandomWeights) -> torch.nn.Module:
    """Build transformers' model of a `config.json`, float32, eager attention and experts, and fill in the weights."""
    config_class, model_class = _CLASSES[raw["model_type"]]
    config = config_class(**{key: value for key, value in raw.items() if key != "model_type"})
    # The fused expert products want sizes that are multiples of 4; eager takes any.
    for part in (config, config.get_text_config()):
        part._attn_implementation = "eager"
        part._experts_implementation = "eager"
    model = model_class(config).to(torch.float32).eval()
    state = {
        # A text part's weights are those of the text model alone.
        name: torch.from_numpy(_value(weights, name.replace("model.language_model.", "model."), value))
        for name, value in model.state_dict().items()
    }
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    for indexer in _indexers(model):
        _break_ties_by_position(indexer)
    return model


def _indexers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("self_attn.indexer")]


def _break_ties_by_position(indexer: torch.nn.Module) -> None:
    """Have an indexer choose the lower position of equal scores, which torch's `topk` leaves open, and keep its least `margin`.

    The margin is the distance between the last score that is chosen and the first that is not, where the two differ.
    """
    forward, indexer.margin = indexer.forward, float("inf")

    def topk(scores: torch.Tensor, k: int, dim: int):
        ordered, indices = scores.sort(dim=dim, descending=True, stable=True)
        if k < scores.shape[-1]:
            gaps = (ordered[..., k - 1] - ordered[..., k])[ordered[..., k] > -1e30]
            indexer.margin = min([indexer.margin, *gaps[gaps > 0].flatten().tolist()])
        return torch.return_types.topk((ordered[..., :k], indices[..., :k]))

    def forward_with_ties(*args, **kwargs):
        with patch.object(torch.Tensor, "topk", topk):
            return forward(*args, **kwargs)

    indexer.forward = forward_with_ties


def _value(weights: RandomWeights, name: str, value: torch.Tensor) -> np.ndarray:
    """A tensor of the model in memory, where transformers 5 has the experts of a layer stacked, gate over up."""
    prefix, fused, kind = name.partition(".mlp.experts.")
    if not fused:
        return weights.tensor(name, tuple(value.shape))
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    experts, rows, columns = value.shape
    shape = (rows // len(parts), columns)
    own = lambda e: [weights.tensor(f"{prefix}.mlp.experts.{e}.{part}.weight", shape) for part in parts]  # noqa: E731
    return np.stack([np.concatenate(own(e)) for e in range(experts)])


def saved_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that `save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with safe_open(Path(directory) / "model.safetensors", framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@torch.no_grad()
def reference_logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits `[B, S, V]` of token ids `[B, S]`."""
    return model(torch.from_numpy(tokens)).logits.numpy()


@torch.no_grad()
def reference_mtp_logits(model: torch.nn.Module, weights: RandomWeights, tokens: np.ndarray) -> np.ndarray:
    """Logits `[B, S, V]` of transformers' first MTP layer behind `model`, from token ids `[B, S + 1]`.

    It reads the main model's last state of a position and the token after it, and predicts the one after that.
    """
    layer = f"model.layers.{model.config.num_hidden_layers}."
    names = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
    module = MtpModel(model, 1).to(torch.float32).eval()
    state = {}
    for own, value in module.state_dict().items():
        if own.startswith("layers.0."):
            name = own.removeprefix("layers.0.")
            for theirs, original in names.items():
                name = name.replace(theirs, original)
            value = torch.from_numpy(_value(weights, layer + name, value))
        state[own] = value
    module.load_state_dict(state, strict=True)
    inputs, following = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
    positions = torch.arange(inputs.shape[1]).expand(inputs.shape)
    states = model(inputs, output_hidden_states=True).hidden_states[-1]
    return model.lm_head(module.forward_layer(0, states, positions, None, input_ids=following)).numpy()


@torch.no_grad()
def routing_margin(model: torch.nn.Module, tokens: np.ndarray) -> float:
    """The least distance, over tokens and layers, between a chosen group, expert or context token and the best one not chosen.

    Where it is of the size of rounding errors, a comparison of logits would compare luck.
    """
    margins = [float("inf")]

    def record(router: torch.nn.Module, _, output) -> None:
        logits = output[0]
        if hasattr(router, "e_score_correction_bias"):
            choice, best_of_group = logits.sigmoid() + router.e_score_correction_bias, 2
        else:
            choice, best_of_group = logits.softmax(-1), 1
        grouped = getattr(router, "topk_method", "noaux_tc") != "greedy"
        if grouped and router.topk_group < router.num_group:
            groups = choice.view(len(choice), router.num_group, -1)
            scores = groups.topk(best_of_group, dim=-1).values.sum(-1)
            margins.append(_gap(scores, router.topk_group))
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(router.topk_group).indices, 1).bool()
            choice = groups.masked_fill(~chosen[..., None], float("-inf")).flatten(1)
        margins.append(_gap(choice, router.top_k))

    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    handles = [router.register_forward_hook(record) for router in routers]
    model(torch.from_numpy(tokens))
    for handle in handles:
        handle.remove()
    return min(margins + [indexer.margin for indexer in _indexers(model)])


def _gap(scores: torch.Tensor, k: int) -> float:
    """The least difference between the k-th and the next score of a row; infinite where there is no next."""
    if k == scores.shape[-1]:
        return float("inf")
    ordered = scores.sort(dim=-1, descending=True).values
    return (ordered[:, k - 1] - ordered[:, k]).min().item()


def settled_weights(
    raw: Mapping[str, Any], bias_center: float, tokens: np.ndarray, first_seed: int
) -> tuple[RandomWeights, torch.nn.Module]:
    """The first seed whose routing decisions are clear by 2e-4, and the model. Float32 sums differ by some 5e-6."""
    for seed in range(first_seed, first_seed + 100):
        weights = RandomWeights(seed, bias_center)
        model = reference_model(raw, weights)
        if routing_margin(model, tokens) > 2e-4:
            return weights, model
    raise RuntimeError(f"no seed from {first_seed} on gives clear routing decisions for {raw}")
