"""The most memory that a change of mesh takes: what lay there before or will lie there afterwards, and one layer of one parameter."""

import gc
import re
import threading
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
    sizes = {
        "num_hidden_layers": LAYERS,
        "n_routed_experts": EXPERTS,
        "hidden_size": WIDTH,
        "moe_intermediate_size": WIDTH,
    }
    config = ModelConfig.from_dict(TINY | sizes)
    tensors = hf_tensors(config, RandomWeights(7))
    stored = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    return write_model(tmp_path_factory.mktemp("wide"), TINY | sizes, stored), config


def private_bytes() -> int:
    """Memory of this process that is resident and no file's."""
    text = Path("/proc/self/status").read_text()
    return sum(int(kib) * 1024 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", text, re.MULTILINE))


class Most:
    """The most that a function has given, asked all the time in a thread."""

    def __init__(self, ask):
        self._ask, self.value, self._over = ask, ask(), threading.Event()

    def look(self):
        self.value = max(self.value, self._ask())

    def __enter__(self):
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(0.001):
            self.look()

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


@contextmanager
def looking_before_memory_is_given_back(monkeypatch, most):
    """The moments at which most is there, which a thread that only looks now and then may miss."""
    real = HeldWeights.give_back

    def give_back(self, *arguments):
        most.look()
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(HeldWeights, "give_back", give_back)
        with most:
            yield


def host_bytes(params) -> int:
    """Bytes of the distinct shards of parameters, which devices of the CPU platform share."""
    shards = [shard.data for array in params.values() for shard in array.addressable_shards]
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how much memory is resident")
CHANGES = [
    ("/scale", "dp=2", "dp=4", ()),
    ("/scale", "dp=4", "tp=2", ()),
    ("loss", "dp=4", "dp=2", (2, 3)),
]


@linux
@pytest.mark.parametrize(("change", "old", "new", "lost"), CHANGES[1:])
def test_a_process_has_one_layer_of_experts_twice_at_most(checkpoint, monkeypatch, change, old, new, lost):
    """Every expert lies on this process before and afterwards, in another place; after a loss half of them is read."""
    directory, config = checkpoint
    held = HeldWeights()
    before = Engine(directory, config, old, mtp=False, held=held)
    before.release(held, lost)
    there = held.nbytes
    gc.collect()
    empty = private_bytes() - there
    with looking_before_memory_is_given_back(monkeypatch, most := Most(private_bytes)):
        after = Engine(directory, config, new, mtp=False, held=held)
    needed = most.value - empty
    assert there < needed <= max(there, host_bytes(after.params)) + EXPERTS * EXPERT + SLACK
    assert (held.counts.read > 0) == (change == "loss")


def device_bytes(devices) -> dict[int, int]:
    """Bytes of all arrays on each device."""
    arrays = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            arrays[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {device.id: sum(nbytes for (id, _), nbytes in arrays.items() if id == device.id) for device in devices}


@pytest.mark.parametrize(
    ("change", "old", "new", "lost", "room"), [(*CHANGES[0], 0), (*CHANGES[-1], 0), (*CHANGES[-1], 1 << 40)]
)
def test_a_device_has_a_layer_twice_at_most_where_it_has_no_room_for_more(
    checkpoint, monkeypatch, change, old, new, lost, room
):
    """On accelerators a parameter of all layers is one array: without room for the new one the old one waits in host memory."""
    directory, config = checkpoint
    devices, held, moved = jax.devices()[:4], HeldWeights(on_host=False), []
    before = Engine(directory, config, old, mtp=False, held=held)
    before.release(held, lost)
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
