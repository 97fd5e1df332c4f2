"""Weights that stay on their devices while the mesh changes: equal to a fresh load, and read only where nobody has them."""

import jax
import numpy as np
import pytest
from held_engines import Engine, assert_equal
from odd_checkpoints import CONFIG

from dsjax.checkpoint.assemble import Assembler
from dsjax.checkpoint.extent import NO_EXPERT, Extent
from dsjax.checkpoint.held_weights import HeldShard, HeldWeights
from dsjax.checkpoint.place import aligned_empty
from sharding import MeshSpec

pytestmark = pytest.mark.slow  # all together


@pytest.fixture
def engine(checkpoints):
    """Load the tiny model's bfloat16 checkpoint on a mesh."""
    return lambda mesh, **options: Engine(checkpoints("bf16")[0], CONFIG, mesh, **options)


@pytest.mark.parametrize(
    ("old", "new", "redundant", "first", "lost", "weights", "on_host"),
    [
        # old mesh, new mesh, redundant experts before and after, first of the new devices, devices lost, weights
        ("dp=4", "dp=4", (4, 4), 0, (), "bf16", True),
        ("dp=4", "dp=3", (4, 1), 0, (3,), "fp8", True),
        ("dp=4", "dp=3", (4, 1), 0, (3,), "fp8", False),
        ("dp=8,ep=2", "dp=4,ep=2", (0, 0), 0, (4, 5, 6, 7), "bf16", True),
        ("tp=4,ep=1", "tp=2,ep=1", (0, 0), 0, (3,), "f32", True),
        ("tp=2", "dp=2,tp=2", (0, 0), 1, (), "bf16", True),
    ],
)
def test_parameters_are_those_of_a_fresh_load(checkpoints, old, new, redundant, first, lost, weights, on_host):
    """With copies of experts that lie otherwise in each layer. on_host: or put together on the devices, as on accelerators."""
    directory = checkpoints("fp8" if weights == "fp8" else "bf16")[0]
    held, options = HeldWeights(on_host), {"weights": weights, "mtp": weights != "f32"}
    seeds = (3, 4) if redundant != (0, 0) else (None, None)
    before = Engine(directory, CONFIG, old, redundant=redundant[0], seed=seeds[0], held=held, **options)
    before.release(held, lost)
    devices = jax.devices()[first : first + MeshSpec.parse(new).num_devices]
    layout = {"redundant": redundant[1], "seed": seeds[1], "devices": devices, **options}
    fresh = Engine(directory, CONFIG, new, **layout)
    after = Engine(directory, CONFIG, new, held=held, **layout)
    assert_equal(after.params, fresh.params)
    if not lost:
        assert (held.counts.read, held.counts.file) == (0, 0)
    held.clear()
    assert held.nbytes == 0


def test_only_experts_that_no_device_has_any_more_are_read(engine):
    held = HeldWeights()
    before = engine("dp=4", redundant=4, seed=3, held=held)
    lost = [set(range(8)) - set(row[:9].tolist()) for row in before.placements.physical_to_logical]
    before.release(held, lost=(3,))
    after = engine("dp=2", held=held)
    expert = 3 * CONFIG.hidden_size * CONFIG.moe_intermediate_size * 2
    assert 0 < sum(map(len, lost)) < 3 * 3  # some of what was lost has copies
    assert held.counts.read == held.counts.file == expert * sum(map(len, lost))
    assert_equal(after.params, engine("dp=2").params)


def test_shards_that_are_the_same_keep_their_memory(engine):
    held = HeldWeights()
    before = engine("dp=4", held=held)
    where = {path: before.pointers(path) for path in before.params}
    before.release(held)
    after = engine("dp=2", held=held)
    for path in after.params:
        if ".experts." not in path:
            assert after.pointers(path) == where[path][:2]
    assert held.counts.moved == sum(array.nbytes for path, array in after.params.items() if ".experts." in path)
    after.release(held)
    engine("dp=2", held=held)
    assert (held.counts.kept, held.counts.moved) == (held.nbytes, 0)


@pytest.mark.parametrize(("at", "on_host"), [(1, False), (2, True), (5, True)])
def test_what_was_held_is_there_after_a_change_that_fails_in_the_middle(engine, monkeypatch, at, on_host):
    """The one before can be made again, and so can another one, of the old shards and of the new ones as far as they had come."""
    held, calls, fill = HeldWeights(on_host), [], Assembler.fill
    engine("dp=4", held=held).release(held, lost=(3,))

    def fail(self, out, path, region):
        calls.append(path)
        if len(calls) == at:
            raise RuntimeError("a second process has gone")
        fill(self, out, path, region)

    monkeypatch.setattr(Assembler, "fill", fail)
    with pytest.raises(RuntimeError, match="a second process"):
        engine("dp=2", held=held)
    monkeypatch.undo()
    read = held.counts.read
    assert_equal(engine("dp=1", held=held).params, engine("dp=1").params)
    # Of the lost device, in one layer.
    experts = 2 * 3 * CONFIG.hidden_size * CONFIG.moe_intermediate_size * 2
    assert held.counts.read - read <= 3 * experts
    if on_host:
        assert held.counts.read <= 3 * experts + experts  # a layer that had begun is read again, and no more


def test_weights_of_another_checkpoint_are_not_used(engine, checkpoints):
    held = HeldWeights()
    Engine(checkpoints("fp8")[0], CONFIG, "dp=2", held=held).release(held)
    assert_equal(engine("dp=2", held=held).params, engine("dp=2").params)
    assert (held.counts.kept, held.counts.moved) == (0, 0)


def test_what_is_given_back_reads_as_zeros_and_an_expert_in_two_shards_is_put_together():
    values = aligned_empty((3, 1 << 20), np.dtype(np.uint8))
    values[...] = 7
    box = ((0, 1 << 20),)
    shard = HeldShard(Extent(3, None, box), values, {}, np.ones(3, bool))
    shard.give_back(1)
    assert [np.unique(row).tolist() for row in values] == [[7], [0], [7]]
    held = HeldWeights()
    held.add("a", shard)
    assert held.look_up("a", 1, NO_EXPERT, box) == ([], [box])
    assert [piece.shard for piece in held.look_up("a", 2, NO_EXPERT, box)[0]] == [shard]
    held = HeldWeights()
    for width in ((0, 2), (3, 6)):
        extent = Extent(1, np.array([[4, 7]]), ((0, 8), width))
        values = np.zeros((1, 2, 8, width[1] - width[0]), np.float32)
        held.add("a", HeldShard(extent, values, {}, np.ones(1, bool)))
    pieces, missing = held.look_up("a", 0, 7, ((0, 8), (1, 5)))
    assert [(piece.slot, piece.box) for piece in pieces] == [(1, ((0, 8), (1, 2))), (1, ((0, 8), (3, 5)))]
    assert missing == [((0, 8), (2, 3))]
    assert held.look_up("a", 0, 5, ((0, 8), (1, 5))) == ([], [((0, 8), (1, 5))])


def test_a_load_ends_after_the_layer_in_which_a_process_is_lost_and_what_is_held_stays(engine):
    held, layers = HeldWeights(), []
    engine("dp=4", held=held).release(held)
    there = held.nbytes

    def check():
        layers.append(1)
        if len(layers) == 5:
            raise RuntimeError("process 1 has gone away")

    with pytest.raises(RuntimeError, match="process 1 has gone away"):
        engine("dp=2", held=held, check=check)
    assert len(layers) == 5
    assert held.nbytes >= there
    assert_equal(engine("dp=2", held=held).params, engine("dp=2").params)
    assert held.counts.read == 0
    layers.clear()
    with pytest.raises(RuntimeError, match="process 1 has gone away"):
        engine("dp=2", check=check)  # nothing is held
