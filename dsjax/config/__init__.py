"""What a model is: its configuration, checked where it is made.

::

    config = load_config("deepseek-v3")          # bundled name, directory, or path of a config.json
    config.num_moe_layers, config.softmax_scale
"""

from dsjax.config.attention import MlaConfig
from dsjax.config.model_config import ModelConfig, bundled_models, load_config
from dsjax.config.quantization import QuantizationConfig
from dsjax.config.rope import RopeConfig

__all__ = ["MlaConfig", "ModelConfig", "QuantizationConfig", "RopeConfig", "bundled_models", "load_config"]
