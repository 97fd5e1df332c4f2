"""A training run's state on disk: parameters, moments, step and processor time, in one `.npz`; and a trained model."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.checkpoint.safetensors import SafetensorsFile
from dsjax.config import ModelConfig, load_config
from dsjax.model.parameter_table import parameter_table
from dsjax.model.parameters import ParameterTable
from tools.demo.optimizer import State

KEPT = 2


def save(run: Path, params: dict[str, Array], state: State, step: int, processor_seconds: float) -> None:
    """Write `step-N.npz`, whole or not at all, and delete all but the last two."""
    arrays = {f"params/{path}": value for path, value in params.items()}
    arrays |= {f"state/{path}/{name}": value for path, moments in state.items() for name, value in moments.items()}
    partial = run / "partial.npz"
    np.savez(partial, step=step, processor_seconds=processor_seconds, **{k: np.asarray(v) for k, v in arrays.items()})
    partial.replace(run / f"step-{step:06}.npz")
    for old in sorted(run.glob("step-*.npz"))[:-KEPT]:
        old.unlink()


def restore(run: Path) -> tuple[dict[str, Array], State, int, float] | None:
    """Parameters, moments, step and processor seconds of the last checkpoint in `run`; None where there is none."""
    found = sorted(run.glob("step-*.npz"))
    if not found:
        return None
    params, state = {}, {}
    with np.load(found[-1]) as saved:
        for name in saved.files:
            kind, _, path = name.partition("/")
            if kind == "params":
                params[path] = jnp.asarray(saved[name])
                state.setdefault(path, {})
            elif kind == "state":
                path, _, moment = path.rpartition("/")
                state.setdefault(path, {})[moment] = jnp.asarray(saved[name])
        return params, state, int(saved["step"]), float(saved["processor_seconds"])


def read_model(folder: Path) -> tuple[ModelConfig, ParameterTable, dict[str, Array]]:
    """A folder's model: its configuration, the table of its parameters, and these in float32."""
    config = load_config(folder)
    params = from_hf_tensors(config, SafetensorsFile(folder / "model.safetensors"), weights="f32")
    return config, parameter_table(config, weights="f32"), {path: jnp.asarray(value) for path, value in params.items()}
