"""The case of a step's beginning and end: its rows read from the slots, positions, rotation and cache slots; rows' last tokens entered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.bench.modules.case import ModuleCase, ModuleWork
from dsjax.bench.modules.setting import Setting
from dsjax.bench.modules.timing import PreparedCase, device_loop
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import device_state, slots
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.slots import LaunchShape
from dsjax.model.rope import Rotation
from dsjax.model.rows import GroupShape, flatten


def input_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Rows of one token each."""
    pages = -(-setting.max_model_len // setting.step.page_size)
    for count in tokens:
        # Slot, limit and most drafts; a page that is gained; the row's page table, read; rotation, read and written.
        moved = 4 * count * (3 + 3 + pages + 2 * setting.config.qk_rope_head_dim)
        moved += 2 * count * setting.config.hidden_size * setting.dtype.itemsize
        yield ModuleCase(
            "inputs",
            "",
            {"tokens": count},
            ModuleWork(0, 0, moved),
            4 * moved,
            lambda n=count: _inputs(setting, n, pages),
        )


def _inputs(setting: Setting, rows: int, pages: int) -> PreparedCase:
    config, step = setting.config, setting.step
    shape = LaunchShape(GroupShape(rows, 1, pages, step.decode_form), None, step.page_size)
    own = np.concatenate([np.arange(rows), np.full(rows, setting.max_model_len), np.zeros(rows)])
    changes = np.stack([np.arange(rows), np.zeros(rows), np.ones(rows)], axis=1).reshape(-1)
    packed = np.concatenate([own, changes, [-1, -1, -1]]).astype(np.int32)[None]
    inputs = {"packed": jnp.asarray(packed), "x": setting.random((1, rows, config.hidden_size))}

    def one_step(inputs, _, carry):
        # Each round begins where the one before has ended, so that nothing is computed ahead of the loop.
        state, rotated, written, last = carry
        state, read, groups = slots.read(step, state, inputs["packed"], shape)
        rotation = Rotation.at(flatten([groups[0].positions]), config.rope, config.qk_rope_head_dim)
        found = flatten([groups[0].slots(step.page_size)])
        last = last + jnp.take_along_axis(inputs["x"], jnp.maximum(read.slot, 0)[..., None], axis=1)
        state, _ = slots.commit(step, state, read, found % config.vocab_size)
        return state, rotation(rotated), written + found, last

    carry = (
        _state(setting, rows),
        setting.random((1, rows, 1, config.qk_rope_head_dim)),
        jnp.zeros((1, rows), jnp.int32),
        jnp.zeros_like(inputs["x"]),
    )
    return device_loop(one_step, inputs, carry)


def _state(setting: Setting, rows: int) -> DeviceState:
    """Slots whose requests stand at positions of all kinds; without pages and counts, which are not read here."""
    limits = ExecutorLimits(rows, rows, 16, setting.step.page_size, 2, 1, setting.max_model_len, 1)
    described = dataclasses.replace(device_state.describe(setting.step, limits), cache={}, copies=None, loads=None)
    state = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), described)
    return dataclasses.replace(state, start=jnp.arange(rows, dtype=jnp.int32)[None] % (setting.max_model_len - 1))
