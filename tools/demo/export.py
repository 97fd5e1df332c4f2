"""Write a run's last checkpoint as the demo model's `model.safetensors`, in bfloat16 under Hugging Face's names.

python -m tools.demo.export RUN_FOLDER [--folder configs/models/demo]
"""

import argparse
from pathlib import Path

import numpy as np

from dsjax.checkpoint.load import to_hf_tensors
from dsjax.checkpoint.safetensors import TensorSpec, write_file
from dsjax.config import load_config
from dsjax.model.parameter_table import abstract_parameters
from tools.demo.checkpoint import restore
from tools.demo.train import FOLDER


def export(run: Path, folder: Path) -> int:
    """Write `folder/model.safetensors` beside its `config.json`; returns the step that it holds.

    Raises:
        FileNotFoundError: `run` holds no checkpoint.
    """
    config = load_config(folder)
    found = restore(run)
    if found is None:
        raise FileNotFoundError(f"no step-*.npz in {run}: run tools.demo.train first")
    params, _, step, _ = found
    infos = abstract_parameters(config)  # balancing biases stay float32, for example, as in DeepSeek's checkpoints
    tensors = to_hf_tensors(config, {path: np.asarray(params[path]).astype(infos[path].dtype) for path in params})
    specs = {name: TensorSpec(value.dtype, value.shape) for name, value in tensors.items()}
    write_file(folder / "model.safetensors", specs, tensors.__getitem__)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="with the model's config.json")
    arguments = parser.parse_args()
    step = export(arguments.run, arguments.folder)
    size = (arguments.folder / "model.safetensors").stat().st_size
    print(f"step {step}: {size:,} bytes in {arguments.folder / 'model.safetensors'}")


if __name__ == "__main__":
    main()
