"""Random weights that depend on nothing but a tensor's name, its shape and a seed.

Goldens then hold configurations and logits only: whoever fills transformers' model and whoever fills ours get the same
numbers, on any machine and with any version of NumPy (raw Philox bits and one exact conversion, no distribution code).
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class RandomWeights:
    """A model's worth of weights. `bias_center` is the mean of the router's correction bias, its spread is ± 0.4."""

    seed: int
    bias_center: float = 0.0

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The float32 tensor of a Hugging Face name; every expert's matrix has its own name."""
        center, spread = self._range(name, shape)
        return (np.float32(center) + np.float32(spread) * _uniform(f"{self.seed}/{name}", shape)).astype(np.float32)

    def _range(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        if name.endswith("e_score_correction_bias"):
            return self.bias_center, 0.4
        if name.endswith("norm.weight"):
            return 1.0, 0.5
        if name.endswith(".bias"):
            return 0.0, 0.5
        # The standard deviation of ± s is s / √3. Routers get twice the usual gain, so that their scores spread.
        gain = 2.0 if name.endswith("mlp.gate.weight") else 1.0
        fan_in = 1 if name.endswith("embed_tokens.weight") else shape[-1]
        return 0.0, gain * math.sqrt(3 / max(fan_in, 1))


def digest_of_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """One line for a set of tensor names and shapes; tensors without elements are left out."""
    lines = [f"{name} {'x'.join(map(str, shape))}\n" for name, shape in sorted(shapes.items()) if 0 not in shape]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return f"{len(lines)} tensors, {digest[:16]}"


def _uniform(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values in [−1, 1), multiples of 2⁻²³, from 24 bits of a Philox stream keyed by `key`."""
    digest = hashlib.sha256(key.encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(math.prod(shape))
    steps = (np.asarray(bits, np.uint64) >> np.uint64(40)).astype(np.int64) - 2**23
    return (steps.astype(np.float32) / np.float32(2**23)).reshape(shape)
