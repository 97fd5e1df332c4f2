"""Convert the demo model to sparse attention, as DeepSeek-V3.2 was made from DeepSeek-V3.1 (arXiv 2512.02556, section 2.1.1).

    nice python -m tools.demo.convert_sparse RUN_FOLDER                   # the recipe behind the bundled weights
    python -m tools.demo.export RUN_FOLDER --folder configs/models/demo-sparse
    python -m tools.demo.evaluate --run RUN_FOLDER --folder configs/models/demo-sparse

First attention stays dense, and only the indexers learn: from `attention_divergence`. Then queries attend to what indexers choose; these go
on learning, of the chosen positions alone, and the rest of the model learns the next tokens. No gradient passes between the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig, load_config
from dsjax.model.parameter_table import parameter_table
from dsjax.model.parameters import ParameterTable
from tools.demo import optimizer
from tools.demo.checkpoint import read_model
from tools.demo.experts import experts_within
from tools.demo.step import attention_divergence, initial_parameters, losses, seeing_all
from tools.demo.train import FOLDER, command, read_batches, run_steps

SPARSE_FOLDER = FOLDER.parent / "demo-sparse"
SAVE_EVERY = 10
SETTINGS = optimizer.Settings(weight_decay=0.0)


@dataclass(frozen=True)
class Schedule:
    """What changes with the step. Rows are as long as the model's positions: shorter ones would hardly choose."""

    warmup_steps: int = 60
    """Steps of the first stage, at a constant rate after the first few."""
    steps: int = 120
    """Both stages have so many steps together."""
    batch_tokens: int = 4096
    length: int = 2048
    index_rate: float = 0.003
    """The indexers' learning rate in the first stage; in the second it is a third of that, and falls to nothing."""
    model_rate: float = 0.0002
    """The learning rate of everything else, at the beginning of the second stage."""
    capacity_factor: float = 1.3
    first_token: int = 3080 * 4096
    """Tokens of the dense model's training: batches go on where it ended."""

    def row_length(self, step: int) -> int:
        """Tokens a row."""
        return self.length

    def sparse(self, step: int) -> bool:
        """Whether a step is of the second stage."""
        return step >= self.warmup_steps

    def remaining(self, step: int) -> float:
        """What the decay has left: 1 in the first stage, 0 after the second."""
        return min(1.0, (self.steps - step) / max(1, self.steps - self.warmup_steps))

    def rate(self, step: int) -> float:
        """Learning rate of the indexers."""
        if self.sparse(step):
            return self.index_rate / 3 * self.remaining(step)
        return self.index_rate * min(1.0, (step + 1) / 5)


def is_index(path: str) -> bool:
    """Whether a parameter is an indexer's."""
    return ".indexer." in path


def adam(params: Mapping[str, Array], gradients: Mapping[str, Array], state: optimizer.State, step, rate):
    """``params`` after a step of Adam for all, and their moments; gradients are clipped to a global norm of 1."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(gradient)) for gradient in gradients.values()))
    clip = jnp.minimum(1.0, SETTINGS.clip_norm / (norm + 1e-6))
    new, moments = {}, {}
    for path, value in params.items():
        delta, moments[path] = optimizer.adam(gradients[path] * clip, state[path], step, SETTINGS)
        new[path] = value - rate * delta
    return new, moments


def zero_moments(params: Mapping[str, Array]) -> optimizer.State:
    """Make zero moments of every parameter that learns: the router's correction biases stay as they are, as at the end of V3's training."""
    return {
        path: {} if optimizer.kind_of(path) == "fixed" else {name: jnp.zeros_like(value) for name in ("mean", "square")}
        for path, value in params.items()
    }


@partial(jax.jit, static_argnames=("table", "config", "sparse", "capacity_factor"), donate_argnums=(0, 1))
def convert_step(
    params: dict[str, Array],
    state: optimizer.State,
    rows: Int[Array, "B S+2"],
    step: Int[Array, ""],
    index_rate: Float[Array, ""],
    model_rate: Float[Array, ""],
    *,
    table: ParameterTable,
    config: ModelConfig,
    sparse: bool,
    capacity_factor: float,
) -> tuple[dict[str, Array], optimizer.State, dict[str, Array]]:
    """New parameters and moments, and the step's measurements. step: of this stage, from 0. sparse: of the second stage."""
    if not sparse:
        table = parameter_table(seeing_all(config), weights="f32")

    learns = {path for path in params if state[path] and (sparse or is_index(path))}

    def total(learning, fixed):
        found, _ = losses(
            fixed | learning, table, rows, experts_within(capacity_factor), attention_divergence, unroll=sparse
        )
        text = found["loss"] + 0.1 * found["mtp_loss"] if sparse else 0.0
        return text + found["index_loss"], found

    parts = [{path: params[path] for path in params if (path in learns) == chosen} for chosen in (True, False)]
    gradients, measured = jax.grad(total, has_aux=True)(*parts)
    new, moments = dict(parts[1]), dict(state)
    for of_index, rate in ((True, index_rate), (False, model_rate)):
        group = {path: params[path] for path in learns if is_index(path) == of_index}
        changed, own = adam(group, gradients, state, step, rate)
        new, moments = new | changed, moments | own
    return new, moments, measured


def begin(table: ParameterTable, seed: int) -> dict[str, Array]:
    """The dense demo's parameters in float32, with indexers drawn beside them."""
    (_, _, trained), drawn = read_model(FOLDER), initial_parameters(table, seed)
    return {path: drawn[path] if is_index(path) else trained[path] for path in table.infos}


def convert(run: Path, schedule: Schedule, seed: int) -> None:
    """Convert the dense demo."""
    config = load_config(SPARSE_FOLDER)
    table = parameter_table(config, weights="f32")
    batches = read_batches(run, schedule, config.bos_token_id)

    def start() -> tuple[dict[str, Array], optimizer.State]:
        params = begin(table, seed)
        return params, zero_moments(params)

    def advance(params: dict[str, Array], state: optimizer.State, step: int):
        sparse = schedule.sparse(step)
        if step == schedule.warmup_steps:
            state = zero_moments(params)  # of the indexers, too: their loss is another one from here on
        return convert_step(
            params,
            state,
            jnp.asarray(batches(schedule.first_token + step * schedule.batch_tokens, schedule.row_length(step))),
            jnp.int32(step - schedule.warmup_steps if sparse else step),
            jnp.float32(schedule.rate(step)),
            jnp.float32(schedule.model_rate * schedule.remaining(step)),
            table=table,
            config=config,
            sparse=sparse,
            capacity_factor=schedule.capacity_factor,
        )

    run_steps(run, schedule, seed, start, advance, SAVE_EVERY)


if __name__ == "__main__":
    command(__doc__.splitlines()[0], Schedule, convert)
