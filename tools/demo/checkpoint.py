"""A training run's state on disk: parameters, moments, step and processor time, in one `.npz`."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

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


def restore(run: Path, params: dict[str, Array], state: State) -> tuple[dict[str, Array], State, int, float] | None:
    """The last checkpoint of `run` in the structure of `params` and `state`; None where there is none."""
    found = sorted(run.glob("step-*.npz"))
    if not found:
        return None
    with np.load(found[-1]) as saved:
        params = {path: jnp.asarray(saved[f"params/{path}"]) for path in params}
        state = {
            path: {name: jnp.asarray(saved[f"state/{path}/{name}"]) for name in moments}
            for path, moments in state.items()
        }
        return params, state, int(saved["step"]), float(saved["processor_seconds"])
