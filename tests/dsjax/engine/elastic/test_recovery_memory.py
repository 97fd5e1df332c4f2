"""The most memory that a change of mesh takes: what lay there before or will lie there afterwards, and one layer of one parameter."""

import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import pytest
from goldens.our_model import hf_tensors
from goldens.random_weights import RandomWeights
from held_engines import Engine, assert_equal
from layouts import TINY, write_model

from dsjax.checkpoint import recover
from dsjax.checkpoint.held_weights import HeldShard, HeldWeights
from dsjax.config import ModelConfig

pytestmark = pytest.mark.slow  # all together

LAYERS, EXPERTS, WIDTH = 4, 8, 768
EXPERT = 2 * WIDTH * WIDTH * 2  # bytes of one expert's `gate_up` in one layer, the largest parameter
SLACK = 10 << 20
"""Bytes that the interpreter, JAX, and pages of 2 MiB at the edges of layers may take beside weights: little more than half a layer."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    widths = {"hidden_size": WIDTH, "moe_intermediate_size": WIDTH}
    fields = TINY | widths | {"num_hidden_layers": LAYERS, "n_routed_experts": EXPERTS}
    config = ModelConfig.from_dict(fields)
    tensors = hf_tensors(config, RandomWeights(7))
    stored = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    return write_model(tmp_path_factory.mktemp("wide"), fields, stored), config


def private_bytes() -> int:
    """Memory of this process that is resident and no file's."""
    text = Path("/proc/self/status").read_text()
    return sum(int(kib) * 1024 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", text, re.MULTILINE))


@contextmanager
def looking(monkeypatch):
    """Read `private_bytes` all the time in a thread, and before memory is given back, when it is largest; yield the values."""
    seen, over, real = [private_bytes()], threading.Event(), HeldWeights.give_back

    def watch():
        while not over.wait(0.001):
            seen.append(private_bytes())

    def give_back(self, *arguments):
        seen.append(private_bytes())
        real(self, *arguments)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setattr(HeldWeights, "give_back", give_back)
        thread.submit(watch)
        try:
            yield seen
        finally:
            over.set()


def host_bytes(params) -> int:
    """Bytes of the distinct shards of parameters, which devices of the CPU platform share."""
    shards = [shard.data for array in params.values() for shard in array.addressable_shards]
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


GROWS, TURNS, LOSES = ("dp=2", "dp=4", ()), ("dp=4", "tp=2", ()), ("dp=4", "dp=2", (2, 3))
"""The mesh before and after, and the devices that are lost."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how much memory is resident")
@pytest.mark.parametrize(("old", "new", "lost"), [TURNS, LOSES])
def test_a_process_has_one_layer_of_experts_twice_at_most(checkpoint, monkeypatch, old, new, lost):
    """Every expert lies on this process before and afterwards, in another place; after a loss half of them is read."""
    directory, config = checkpoint
    held = HeldWeights()
    Engine(directory, config, old, mtp=False, held=held).release(held, lost)
    there = held.nbytes
    gc.collect()
    empty = private_bytes() - there
    with looking(monkeypatch) as seen:
        after = Engine(directory, config, new, mtp=False, held=held)
    needed = max(seen) - empty
    assert there < needed <= max(there, host_bytes(after.params)) + EXPERTS * EXPERT + SLACK
    assert (held.counts.read > 0) == bool(lost)


def device_bytes(devices) -> dict[int, int]:
    """Bytes of all arrays on each device."""
    arrays = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            arrays[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {device.id: sum(nbytes for (id, _), nbytes in arrays.items() if id == device.id) for device in devices}


@pytest.mark.parametrize(("old", "new", "lost", "room"), [(*GROWS, 0), (*LOSES, 0), (*LOSES, 1 << 40)])
def test_a_device_has_a_layer_twice_at_most_where_it_has_no_room_for_more(
    checkpoint, monkeypatch, old, new, lost, room
):
    """On accelerators a parameter of all layers is one array: without room for the new one the old one waits in host memory."""
    directory, config = checkpoint
    devices, held, moved = jax.devices()[:4], HeldWeights(on_host=False), []
    Engine(directory, config, old, mtp=False, held=held).release(held, lost)
    gc.collect()
    there = device_bytes(devices)
    most = dict(there)

    def watch(act, *arguments):
        result = act(*arguments)
        if result.nbytes >= EXPERT:
            for id, nbytes in device_bytes(devices).items():
                most[id] = max(most[id], nbytes)
        return result

    move = HeldShard.move_to_host
    with monkeypatch.context() as patch:
        patch.setattr(HeldWeights, "free_bytes", lambda self, device: room)
        patch.setattr(HeldShard, "move_to_host", lambda shard: moved.append(shard) or move(shard))
        for name in ("_write", "_zeros"):
            patch.setattr(recover, name, partial(watch, getattr(recover, name)))
        after = Engine(directory, config, new, mtp=False, held=held)
    held.clear()
    gc.collect()
    assert bool(moved) == (room == 0)
    if not room:
        for id, nbytes in device_bytes(devices).items():
            assert most[id] <= max(there[id], nbytes) + EXPERTS * EXPERT
    assert_equal(after.params, Engine(directory, config, new, mtp=False).params)
