"""The case of a launch: what a step costs beside the model: the runner's own work around a program that does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.bench.modules.case import Case, Work
from dsjax.bench.modules.setting import Setting
from dsjax.bench.modules.timing import Prepared, host_loop
from dsjax.engine.buckets import Buckets, Rectangle
from dsjax.engine.plan import ExecutorLimits, RankPlan, ScheduledRow, StepPlan
from dsjax.engine.programs import Programs
from dsjax.engine.request import Request
from dsjax.engine.runner import MeshRunner
from dsjax.engine.sampling_params import SamplingParams


def launch_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[Case]:
    """Rows of one token each, as the runner packs them, with page tables for `max_model_len`."""
    pages = -(-setting.max_model_len // setting.step.page_size)
    for count in tokens:
        size = 4 * count * (3 + pages)
        yield Case("launch", "", {"tokens": count}, Work(0, 0, size), 4 * size, lambda n=count: _launch(setting, n))


def _launch(setting: Setting, rows: int) -> Prepared:
    """`MeshRunner.execute` of greedy rows: they are packed, sent, the program called, the tokens read and sorted out.

    In place of the step stands a program that takes as many arrays, small ones, and gives back tokens.
    """
    runner = _runner(setting, rows)
    length = setting.max_model_len - 1
    pages = list(range(1, 1 + -(-length // setting.step.page_size)))
    params, scheduled = SamplingParams(temperature=0), []
    for row in range(rows):
        request = Request(str(row), [1] * length, length, params, 1, 0)
        request.slot, request.admissions, request.pages = row, 1, pages
        scheduled.append(ScheduledRow(request, length - 1, 1))
    plan = StepPlan([RankPlan(scheduled, [])])
    return host_loop(lambda: runner.execute(plan))


def _runner(setting: Setting, rows: int) -> MeshRunner:
    """A runner without weights, whose step does nothing."""
    limits = ExecutorLimits(
        rows, rows, 16, setting.step.page_size, 2, 1, setting.max_model_len, setting.config.vocab_size
    )
    small = {path: jnp.zeros((1,), info.storage_dtype) for path, info in setting.step.table.infos.items()}
    runner = MeshRunner(setting.step, small, limits, Buckets((rows,), (Rectangle(1, 16),), False))
    runner.cache = {name: jnp.zeros((1,), setting.dtype) for name in runner.cache}
    shapes = runner.programs.shapes(Rectangle(rows, 1), None)

    def nothing(params, cache, packed):
        return packed[:, :rows], jnp.zeros((1, rows, 1)), cache, {}

    packed = jax.device_put(np.zeros((1, shapes[0].packed_width), np.int32), runner.programs.rows)
    program = jax.jit(nothing, donate_argnums=1, keep_unused=True).lower(small, runner.cache, packed).compile()
    own: Programs = runner.programs
    runner.programs = SimpleNamespace(shapes=own.shapes, step=lambda shapes: program, rows=own.rows)
    return runner
