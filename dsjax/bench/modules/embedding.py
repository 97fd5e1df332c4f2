"""Cases of the embedding: its table in host memory, copied to the device, or on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 (NumPy learns bfloat16)
import numpy as np

from dsjax.bench.modules.case import ModuleCase, ModuleWork
from dsjax.bench.modules.setting import LayerStack, Setting
from dsjax.bench.modules.timing import PreparedCase, call_in_turn, host_loop
from dsjax.model.transformer import Embedding


def embedding_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Rows of the table for so many tokens.

    `device`: the step's own. `host`: gathered by NumPy from a table in host memory, and the rows sent to the device.
    `copied`: the whole table sent, and then gathered.
    """
    config = setting.config
    table = config.vocab_size * config.hidden_size * _table_dtype(setting).itemsize
    for count in tokens:
        rows = count * config.hidden_size * setting.dtype.itemsize
        read = count * config.hidden_size * _table_dtype(setting).itemsize
        yield ModuleCase(
            "embedding",
            "device",
            {"tokens": count},
            ModuleWork(0, read, rows),
            2 * table,
            lambda n=count: _on_device(setting, n),
        )
        yield ModuleCase(
            "embedding",
            "host",
            {"tokens": count},
            ModuleWork(0, read, 2 * rows),
            table,
            lambda n=count: _host(setting, n),
        )
    yield ModuleCase(
        "embedding", "copied", {"tokens": 1}, ModuleWork(0, 2 * table), 2 * table, lambda: _copied(setting)
    )


def _table_dtype(setting: Setting) -> np.dtype:
    return setting.step.table.infos["embed.weight"].dtype


def _tokens(setting: Setting, count: int, turn: int = 0) -> np.ndarray:
    return np.random.default_rng(setting.seed + turn).integers(0, setting.config.vocab_size, (1, count), np.int32)


def _on_device(setting: Setting, count: int) -> PreparedCase:
    stack = LayerStack.of(setting, lambda declare: Embedding(declare, setting.config), 1, depth=1)
    params = {path: array[0] for path, array in stack.values(setting.seed).items()}
    # Other rows in each call, as other tokens come in each step.
    inputs = [params | {"tokens": jnp.asarray(_tokens(setting, count, turn))} for turn in range(4)]

    def one(inputs, total):
        embed: Embedding = stack.table.bind({path: inputs[path] for path in stack.table.infos})
        return total + embed(inputs["tokens"], setting.dtype)

    return call_in_turn(one, inputs, jnp.zeros((1, count, setting.config.hidden_size), setting.dtype))


def _host_table(setting: Setting) -> np.ndarray:
    config = setting.config
    block = np.random.default_rng(setting.seed).standard_normal(1 << 16, np.float32).astype(_table_dtype(setting))
    return np.resize(block, (config.vocab_size, config.hidden_size))


def _host(setting: Setting, count: int) -> PreparedCase:
    table, tokens, turn = _host_table(setting), _tokens(setting, count), [0]
    device = setting.step.mesh.devices.flat[0]

    def call():
        turn[0] += 97
        rows = table[(tokens + turn[0]) % setting.config.vocab_size].astype(setting.dtype, copy=False)
        return jax.device_put(rows, device)

    return host_loop(call)


def _copied(setting: Setting) -> PreparedCase:
    table, device = _host_table(setting).view(np.uint8), setting.step.mesh.devices.flat[0]
    # `device_put` would hand out the host's own memory on the CPU platform, and copy nothing.
    return host_loop(lambda: jnp.array(table, copy=True, device=device))
