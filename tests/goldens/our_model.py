"""Our model filled with `RandomWeights` under Hugging Face's tensor names, and the bound its logits must keep."""

import jax
import numpy as np
from goldens.random_weights import RandomWeights

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.checkpoint.names import TensorNames
from dsjax.config import ModelConfig
from dsjax.model.parameter_table import parameter_table

# Each configuration is compiled for one call on a tiny model: XLA's optimisations would cost more than they save.
COMPILE_QUICKLY = {"xla_backend_optimization_level": 0}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that our loader wants of a checkpoint."""
    return TensorNames(config, parameter_table(config, weights="f32").infos).expected()


def hf_tensors(config: ModelConfig, weights: RandomWeights) -> dict[str, np.ndarray]:
    return {name: weights.tensor(name, shape) for name, shape in expected_shapes(config).items()}


def logits_of(config: ModelConfig, tensors: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Float32 logits `[B, S, V]` of token ids `[B, S]`, from a checkpoint's tensors, through the loader."""
    return logits_of_parameters(config, from_hf_tensors(config, tensors), tokens)


def logits_of_parameters(config: ModelConfig, params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """The same from our parameters, as loaded in float32 on one device."""
    table = parameter_table(config, weights="f32")
    run = jax.jit(lambda p, t: table.bind(p)(t).logits, compiler_options=COMPILE_QUICKLY)
    return np.asarray(run(params, tokens))


def bound(reference: np.ndarray) -> float:
    """1e-4 of the largest logit, at least 1e-4. Measured: at most 1.3 % of it, which is float32 sums in another order."""
    return 1e-4 * max(1.0, float(np.abs(reference).max()))
