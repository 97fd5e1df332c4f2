"""Muon for matrices, AdamW for everything else: pure functions over `{path: array}`.

Muon (Jordan et al., 2024) replaces a matrix's momentum by the nearest orthogonal matrix; Liu et al. (arXiv 2502.16982,
Moonlight, a model of DeepSeek-V3's shape) scale its step to the size of AdamW's, so that both share one learning rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Kind = Literal["muon", "adam", "fixed"]
State = dict[str, dict[str, Array]]

# Coefficients of the quintic iteration (Jordan et al.): they push singular values quickly into 0.7…1.2, not exactly to 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Settings:
    """What does not change during a run; the learning rate comes with each step."""

    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-10
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """Largest global norm of the gradients that AdamW sees; Muon's step has the same size whatever its gradient."""


def kind_of(path: str) -> Kind:
    """Which rule a parameter follows. The router's bias is not learnt by gradient (see `balance.py`)."""
    if path.endswith(("router.bias", "router.experts_of_token")):
        return "fixed"
    is_matrix = path.endswith(".weight") and not any(part in path for part in ("router", "residual"))
    return "muon" if is_matrix and path not in ("embed.weight", "head.weight") else "adam"


def rate_factor(path: str) -> float:
    """A parameter's share of the learning rate: AdamW's parameters are easily upset by the rate that suits Muon's."""
    if kind_of(path) == "muon" or path.endswith((".sink", ".base", "compressor.bias")):
        return 1.0
    if path.endswith("residual.weight"):
        return 0.1
    return 0.5 if path in ("embed.weight", "head.weight") else 0.3


def init_state(params: Mapping[str, Array]) -> State:
    """Zero moments for every parameter."""
    moments = {"muon": ("momentum",), "adam": ("mean", "square"), "fixed": ()}
    return {path: {name: jnp.zeros_like(value) for name in moments[kind_of(path)]} for path, value in params.items()}


def update(
    params: dict[str, Array], gradients: Mapping[str, Array], state: State, step: Array, rate: Array, settings: Settings
) -> tuple[dict[str, Array], State, Float[Array, ""]]:
    """One step (`step` counts from 0) at learning rate `rate`; also gives the global norm of AdamW's gradients."""
    squares = [jnp.sum(jnp.square(gradients[path])) for path in params if kind_of(path) == "adam"]
    norm = jnp.sqrt(sum(squares))
    clip = jnp.minimum(1.0, settings.clip_norm / (norm + 1e-6))
    new_params, new_state = {}, {}
    for path, value in params.items():
        match kind_of(path):
            case "muon":
                delta, new_state[path] = _muon(path, gradients[path], state[path], settings)
            case "adam":
                delta, new_state[path] = adam(gradients[path] * clip, state[path], step, settings)
            case "fixed":
                new_params[path], new_state[path] = value, {}
                continue
        decay = settings.weight_decay if path.endswith(".weight") else 0.0
        new_params[path] = value - rate * (rate_factor(path) * delta + decay * value)
    return new_params, new_state, norm


def adam(gradient: Array, state: dict[str, Array], step: Array, settings: Settings) -> tuple[Array, dict[str, Array]]:
    """The direction of one parameter's step (Kingma and Ba 2014, arXiv 1412.6980), and its new moments; `step` counts from 0."""
    mean = settings.beta1 * state["mean"] + (1 - settings.beta1) * gradient
    square = settings.beta2 * state["square"] + (1 - settings.beta2) * jnp.square(gradient)
    count = step.astype(jnp.float32) + 1
    corrected = mean / (1 - settings.beta1**count)
    scale = jnp.sqrt(square / (1 - settings.beta2**count)) + settings.eps
    return corrected / scale, {"mean": mean, "square": square}


def _muon(path: str, gradient: Array, state: dict[str, Array], settings: Settings):
    momentum = settings.momentum * state["momentum"] + gradient
    nesterov = gradient + settings.momentum * momentum
    fused = "gate_up" in path  # [..., D, 2, F]: gate and up are two matrices
    matrices = jnp.moveaxis(nesterov, -2, -3) if fused else nesterov
    delta = orthogonalise(matrices) * 0.2 * max(matrices.shape[-2:]) ** 0.5
    return jnp.moveaxis(delta, -3, -2) if fused else delta, {"momentum": momentum}


def orthogonalise(matrices: Float[Array, "*b I J"], iterations: int = 5) -> Float[Array, "*b I J"]:
    """Roughly `U Vᵀ` of each matrix `U S Vᵀ`, by Newton–Schulz iterations on the smaller side."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else jnp.swapaxes(matrices, -1, -2)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    a, b, c = _QUINTIC

    def iterate(_, x):
        gram = x @ jnp.swapaxes(x, -1, -2)
        return a * x + (b * gram + c * gram @ gram) @ x

    x = jax.lax.fori_loop(0, iterations, iterate, x)
    return x if wide else jnp.swapaxes(x, -1, -2)
