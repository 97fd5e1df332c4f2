"""The case of a launch: what a step costs beside the model: sending its integers, calling the program, reading the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.bench.modules.case import Case, Work
from dsjax.bench.modules.setting import Setting
from dsjax.bench.modules.timing import Prepared, host_loop


def launch_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[Case]:
    """Rows of one token each, as the step packs them, with page tables for `max_model_len`."""
    pages = -(-setting.max_model_len // setting.step.page_size)
    for count in tokens:
        size = 4 * count * (3 + pages)
        yield Case(
            "launch", "", {"tokens": count}, Work(0, 0, size), 4 * size, lambda n=count: _launch(setting, n, pages)
        )


def _launch(setting: Setting, rows: int, pages: int) -> Prepared:
    """A program that takes as many arrays as the step does, small ones, and does nothing with them."""
    params = {path: jnp.zeros((1,), info.storage_dtype) for path, info in setting.step.table.infos.items()}
    packed = np.zeros((1, rows * (3 + pages)), np.int32)
    cache = {"latent": jnp.zeros((1,), setting.dtype), "rope": jnp.zeros((1,), setting.dtype)}

    def program(params, cache, packed):
        return packed[:, :rows] + 1, cache, jnp.sum(packed)

    compiled = jax.jit(program, donate_argnums=1, keep_unused=True).lower(params, cache, jnp.asarray(packed)).compile()
    held = [cache]

    def call():
        tokens, held[0], _ = compiled(params, held[0], jax.device_put(packed))
        return np.asarray(jax.block_until_ready(tokens))

    return host_loop(call)
