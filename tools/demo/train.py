"""Train the demo model on the running CPython's own library.

    nice python -m tools.demo.train RUN_FOLDER                  # the recipe behind the bundled weights
    nice python -m tools.demo.train RUN_FOLDER --steps 100      # a trial

A run stopped half-way continues from its last checkpoint when the same command is given again, and ends where the
uninterrupted run would have. `log.jsonl` in the run folder has a line every ten steps. `export.py` makes the Hugging Face
checkpoint. The same library, JAX version and kind of processor give the same weights.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.config import load_config
from dsjax.model.parameter_table import parameter_table
from tools.demo import optimizer
from tools.demo.checkpoint import restore, save
from tools.demo.corpus import describe_differences, read_corpus
from tools.demo.data import Batches, encode_training_text
from tools.demo.schedule import Schedule
from tools.demo.step import initial_parameters, train_step

FOLDER = Path(__file__).parents[2] / "configs" / "models" / "demo"
LOG_EVERY, SAVE_EVERY = 10, 100

# A step's temporaries are gigabytes that glibc would map and unmap each time; page faults then took half of the time. One thread: two were
# 1.3 times as fast for 1.6 times the processor time, and far worse beside other work; and sums are then always added in the same order.
# Read when a process starts, hence the restart in `command`.
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "PJRT_NPROC": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def train(run: Path, schedule: Schedule, seed: int) -> None:
    """Train the dense demo."""
    config = load_config(FOLDER)
    table = parameter_table(config, weights="f32")
    batches = read_batches(run, schedule, config.bos_token_id, seed)
    tokens = schedule.steps * schedule.batch_tokens
    print(f"{len(batches.stream):,} tokens an epoch; {tokens:,} to train on", flush=True)

    def begin():
        params = initial_parameters(table, seed)
        return params, optimizer.init_state(params)

    def advance(params, state, step: int):
        return train_step(
            params,
            state,
            jnp.asarray(batches(step * schedule.batch_tokens, schedule.row_length(step))),
            jnp.int32(step),
            jnp.float32(schedule.rate(step)),
            jnp.float32(schedule.mtp_weight(step)),
            jnp.float32(schedule.bias_speed(step)),
            table=table,
            config=config,
            settings=optimizer.Settings(),
            capacity_factor=schedule.capacity_factor,
        )

    run_steps(run, schedule, seed, begin, advance, SAVE_EVERY)


def read_batches(run: Path, schedule, bos_id: int, seed: int = 0):
    """The training text in batches, tokenised once a run; notes where the corpus is another than that of the bundled weights."""
    stream = run / "tokens.npy"
    if not stream.exists():
        files, heldout = read_corpus()
        if difference := describe_differences(files, heldout):
            print(f"note: {difference}", file=sys.stderr)
        run.mkdir(parents=True, exist_ok=True)
        part = stream.with_suffix(".part")
        with open(part, "wb") as file:
            np.save(file, encode_training_text(files, FOLDER))
        part.replace(stream)
    return Batches(np.load(stream), schedule.batch_tokens, bos_id, seed)


def run_steps(run: Path, schedule, seed: int, begin: Callable, advance: Callable, save_every: int) -> None:
    """Train up to `schedule.steps`, from the last checkpoint in `run` where there is one.

    begin: gives parameters and the optimizer's state. advance: takes both and the step's number, gives both and the measurements.
    """
    jax.config.update("jax_compilation_cache_dir", str(run / "compiled"))
    (run / "recipe.json").write_text(json.dumps({"seed": seed, **dataclasses.asdict(schedule)}, indent=2) + "\n")
    params, state, first, used = restore(run) or (*begin(), 0, 0.0)
    if first:
        print(f"continuing after step {first}", flush=True)
    meter = Meter(run / "log.jsonl", schedule, used)
    for step in range(first, schedule.steps):
        params, state, measured = advance(params, state, step)
        meter.add(step, {name: float(value) for name, value in measured.items()})
        if (step + 1) % save_every == 0 or step + 1 == schedule.steps:
            save(run, params, state, step + 1, meter.processor_seconds)


class Meter:
    """Averages measurements over `LOG_EVERY` steps into a log line and a progress line."""

    def __init__(self, path: Path, schedule, processor_seconds: float):
        self.path, self.schedule = path, schedule
        self._before = processor_seconds
        self._since, self._pending = time.monotonic(), []

    @property
    def processor_seconds(self) -> float:
        """How long the processor has computed in the whole run so far, with the starts of interrupted parts."""
        return self._before + time.process_time()

    def add(self, step: int, measured: dict[str, float]) -> None:
        """Take one step's measurements."""
        self._pending.append(measured)
        if (step + 1) % LOG_EVERY and step + 1 != self.schedule.steps:
            return
        now, count = time.monotonic(), len(self._pending)
        line = {name: sum(m[name] for m in self._pending) / count for name in measured}
        line |= {
            "step": step + 1,
            "tokens": (step + 1) * self.schedule.batch_tokens,
            "row_length": self.schedule.row_length(step),
            "rate": self.schedule.rate(step),
            "tokens_per_second": count * self.schedule.batch_tokens / (now - self._since),
            "processor_seconds": self.processor_seconds,
        }
        with self.path.open("a") as log:
            log.write(json.dumps({k: round(v, 5) for k, v in line.items()}) + "\n")
        done = (step + 1) / self.schedule.steps
        told = "  ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in line.items() if name in measured)
        print(
            f"[{'█' * int(20 * done):<20}] {step + 1}/{self.schedule.steps}  {told}  "
            f"{line['tokens_per_second']:,.0f} tokens/s  {self.processor_seconds:,.0f} processor s",
            flush=True,
        )
        self._since, self._pending = now, []


def command(description: str, schedule: type, train: Callable) -> None:
    """Read a run's folder, its seed and the fields of `schedule` from the command line, and train."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run", type=Path, help="folder for checkpoints and the log")
    parser.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(schedule):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    arguments = vars(parser.parse_args())
    if SETTINGS.keys() - os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], SETTINGS | os.environ)
    train(arguments.pop("run"), seed=arguments.pop("seed"), schedule=schedule(**arguments))


if __name__ == "__main__":
    command(__doc__.splitlines()[0], Schedule, train)
