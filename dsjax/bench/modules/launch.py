"""Benchmark cases of a step's overhead outside the model: dispatching the program, reading rows from slots and writing last tokens."""

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.bench.modules.run import ModuleCase, ModuleWork
from dsjax.bench.modules.setting import Setting
from dsjax.bench.modules.timing import PreparedCase, device_loop, host_loop
from dsjax.engine.contract.commands import PageChange, RankStep, Step, int32s
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import device_state, slots
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.mesh_executor import MeshExecutor
from dsjax.engine.device.programs import Programs
from dsjax.engine.device.slots import LaunchShape, Positions
from dsjax.engine.setup.sizes import with_windows
from dsjax.model.rows import GroupShape


def launch_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Yield cases of rows with one token each, as a step's command describes them."""
    for count in tokens:
        # Slot, limit and maximum drafts; a new page (its slot, position and number).
        size, build = 4 * count * (3 + 3), partial(_launch, setting, count)
        yield ModuleCase("launch", "", {"tokens": count}, ModuleWork(0, 0, size), 4 * size, build)


def _launch(setting: Setting, rows: int) -> PreparedCase:
    """Time `MeshExecutor.launch` and `collect` for greedy rows: pack and send the rows, call the program, read and distribute the tokens.

    A stand-in for the step takes the same number of (small) arrays and returns tokens. One row in `page_size` gets a new page, the
    average while decoding.
    """
    executor = _executor(setting, rows)
    limit = setting.max_model_len - 1
    gaining = range(0, rows, setting.step.page_size)
    pages = [PageChange(slot, limit // setting.step.page_size, [1]) for slot in gaining]
    decodes = int32s(value for slot in range(rows) for value in (slot, limit))
    command = Step([RankStep([], pages, decodes, [], [])])
    return host_loop(lambda: executor.collect(executor.launch(command)))


def _executor(setting: Setting, rows: int) -> MeshExecutor:
    """Return an executor without weights whose step does nothing."""
    limits = _limits(setting, rows)
    small = {path: jnp.zeros((1,), info.storage_dtype) for path, info in setting.step.table.infos.items()}
    executor = MeshExecutor(setting.step, small, limits, Buckets((rows,), (Rectangle(1, 16),), False))
    executor.state = jax.tree.map(lambda array: jnp.zeros((1,), array.dtype), executor.state)
    real: Programs = executor.programs
    shape = real.shape(Rectangle(rows, 1), None)
    positions_width = len(dataclasses.fields(Positions)) * rows

    def nothing(params, state, packed):
        positions, outcome = jnp.zeros((1, positions_width), jnp.int32), packed[:, :rows]
        logits, hidden = jnp.zeros((1, rows, 1)), None  # `hidden` is None in an engine without drafts
        return state, positions, outcome, logits, hidden, {}

    packed = jax.device_put(np.zeros((1, shape.packed_width), np.int32), real.rows)
    program = jax.jit(nothing, donate_argnums=1, keep_unused=True).lower(small, executor.state, packed).compile()
    executor.programs = SimpleNamespace(
        shape=real.shape, get=lambda *key: program, put_rows=real.put_rows, shared=False
    )
    return executor


def input_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Yield cases of rows with one token each."""
    pages = -(-setting.max_model_len // setting.step.page_size)
    for count in tokens:
        # Slot, limit and maximum drafts; a new page; the row's page table (read); sines and cosines (written).
        moved = 4 * count * (3 + 3 + pages + 2 * setting.config.attention.qk_rope_head_dim)
        moved += 2 * count * setting.config.hidden_size * setting.dtype.itemsize
        build = partial(_inputs, setting, count, pages)
        yield ModuleCase("inputs", "", {"tokens": count}, ModuleWork(0, 0, moved), 4 * moved, build)


def _inputs(setting: Setting, rows: int, pages: int) -> PreparedCase:
    config, step, limits = setting.config, setting.step, _limits(setting, rows)
    shape = LaunchShape(GroupShape(rows, 1, pages, step.decode_form, limits.window_columns), None, step.page_size)
    decodes = np.concatenate([np.arange(rows), np.full(rows, setting.max_model_len), np.zeros(rows)])
    changes = np.stack([np.arange(rows), np.zeros(rows), np.ones(rows)], axis=1).reshape(-1)
    none = np.full(shape.packed_width - len(decodes) - len(changes), -1)
    packed = np.concatenate([decodes, changes, none]).astype(np.int32)[None]
    inputs = {"packed": jnp.asarray(packed), "x": setting.random((1, rows, config.hidden_size))}

    def one_step(inputs, _, carry):
        # Each round starts from the previous round's result, so that XLA cannot hoist work out of the loop.
        state, _, last = carry
        state, read, groups = slots.read(step, state, inputs["packed"], shape)
        tokens = step.tokens(groups)
        last = last + jnp.take_along_axis(inputs["x"], jnp.maximum(read.slot, 0)[..., None], axis=1)
        state, _ = slots.commit(step, state, Positions.of(read, shape), tokens.slots % config.vocab_size)
        return state, (tokens.rotation, tokens.slots, tokens.window_slots), last

    carry = _state(setting, rows), None, jnp.zeros_like(inputs["x"])
    made = jax.eval_shape(one_step, inputs, 0, carry)[1]
    carry = carry[0], jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), made), carry[2]
    return device_loop(one_step, inputs, carry)


def _limits(setting: Setting, rows: int) -> ExecutorLimits:
    step = setting.step
    limits = ExecutorLimits(rows, rows, 16, step.page_size, 2, 1, setting.max_model_len, setting.config.vocab_size)
    return with_windows(limits, setting.args, step)


def _state(setting: Setting, rows: int) -> DeviceState:
    """Return slots whose requests are at various positions; pages and counts are omitted because nothing here reads them."""
    described = device_state.describe(setting.step, _limits(setting, rows))
    described = dataclasses.replace(described, cache={}, copies=None, loads=None)
    state = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), described)
    starts = jnp.arange(rows, dtype=jnp.int32) % (setting.max_model_len - 1)
    return dataclasses.replace(state, slots=state.slots.at[0, :, device_state.START].set(starts))
