"""The case of a step's beginning: its integers taken apart, positions, rotation and cache slots; and its rows' last tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np

from dsjax.bench.modules.case import Case, Work
from dsjax.bench.modules.setting import Setting
from dsjax.bench.modules.timing import Prepared, device_loop
from dsjax.model.rope import Rotation
from dsjax.model.rows import GroupShape, RowGroup, flatten, last_tokens


def input_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[Case]:
    """Rows of one token each."""
    pages = -(-setting.max_model_len // setting.step.page_size)
    for count in tokens:
        width = 3 + pages
        moved = 4 * count * (width + 2 * setting.config.qk_rope_head_dim)
        moved += 2 * count * setting.config.hidden_size * setting.dtype.itemsize
        yield Case(
            "inputs", "", {"tokens": count}, Work(0, 0, moved), 4 * moved, lambda n=count: _inputs(setting, n, pages)
        )


def _inputs(setting: Setting, rows: int, pages: int) -> Prepared:
    config, shape = setting.config, GroupShape(rows, 1, pages, setting.step.decode_form)
    ones = np.ones((1, rows), np.int32)
    start = np.arange(rows, dtype=np.int32)[None] % (setting.max_model_len - 1)
    packed = RowGroup.pack(ones[..., None], start, ones, np.ones((1, rows, pages), np.int32))
    inputs = {"packed": jnp.asarray(packed), "x": setting.random((1, rows, config.hidden_size))}

    def one_step(inputs, _, carry):
        turn, rotated, slots, last = carry
        # One integer is new in each round, so that nothing is computed ahead of the loop.
        group = RowGroup.unpack(inputs["packed"].at[0, rows].set(turn % 7), shape)
        rotation = Rotation.at(flatten([group.positions]), config.rope, config.qk_rope_head_dim)
        found = flatten([group.slots(setting.step.page_size)])
        return turn + 1, rotation(rotated), slots + found, last + last_tokens(inputs["x"], [group])

    carry = (
        jnp.int32(0),
        setting.random((1, rows, 1, config.qk_rope_head_dim)),
        jnp.zeros((1, rows), jnp.int32),
        jnp.zeros_like(inputs["x"]),
    )
    return device_loop(one_step, inputs, carry)
