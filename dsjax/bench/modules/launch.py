"""The case of a launch: what a step costs beside the model: the executor's own work around a program that does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.bench.modules.case import ModuleCase, ModuleWork
from dsjax.bench.modules.setting import Setting
from dsjax.bench.modules.timing import PreparedCase, host_loop
from dsjax.engine.contract.commands import PageChange, RankStep, Step, int32s
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.device.mesh_executor import MeshExecutor
from dsjax.engine.device.programs import Programs
from dsjax.engine.device.slots import StepRows


def launch_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Rows of one token each, as a step's command names them: slot and limit, and a page for each that it gains."""
    for count in tokens:
        size = 4 * count * (3 + 3)
        yield ModuleCase(
            "launch", "", {"tokens": count}, ModuleWork(0, 0, size), 4 * size, lambda n=count: _launch(setting, n)
        )


def _launch(setting: Setting, rows: int) -> PreparedCase:
    """`MeshExecutor.launch` and `collect` of greedy rows: they are laid out, sent, the program called, the tokens read and sorted out.

    In place of the step stands a program that takes as many arrays, small ones, and gives back tokens. Of the rows one in
    `page_size` gains a page, which is what decoding needs on average.
    """
    executor = _executor(setting, rows)
    length = setting.max_model_len - 1
    gaining = range(0, rows, setting.step.page_size)
    pages = [PageChange(slot, length // setting.step.page_size, [1]) for slot in gaining]
    decodes = int32s(value for slot in range(rows) for value in (slot, length))
    command = Step([RankStep([], pages, decodes, [], [])])
    return host_loop(lambda: executor.collect(executor.launch(command)))


def _executor(setting: Setting, rows: int) -> MeshExecutor:
    """An executor without weights, whose step does nothing."""
    limits = ExecutorLimits(
        rows, rows, 16, setting.step.page_size, 2, 1, setting.max_model_len, setting.config.vocab_size
    )
    small = {path: jnp.zeros((1,), info.storage_dtype) for path, info in setting.step.table.infos.items()}
    executor = MeshExecutor(setting.step, small, limits, Buckets((rows,), (Rectangle(1, 16),), False))
    device = executor.device
    device.state = jax.tree.map(lambda array: jnp.zeros((1,), array.dtype), device.state)
    own: Programs = executor.programs
    shape = own.shape(Rectangle(rows, 1), None)
    handed_on = StepRows.packed_width(shape.sampled)

    def nothing(params, state, packed):
        made = jnp.ones((1, 2 * rows), jnp.int32)
        outcome = jnp.concatenate([packed[:, :rows], made], axis=1)
        return (
            state,
            jnp.zeros((1, handed_on), jnp.int32),
            outcome,
            jnp.zeros((1, rows, 1)),
            jnp.zeros((1, rows, 1)),
            {},
        )

    packed = jax.device_put(np.zeros((1, shape.packed_width), np.int32), own.rows)
    program = jax.jit(nothing, donate_argnums=1, keep_unused=True).lower(small, executor.state, packed).compile()
    device.programs = SimpleNamespace(shape=own.shape, step=lambda shape, scored: program, rows=own.rows, shared=False)
    return executor
