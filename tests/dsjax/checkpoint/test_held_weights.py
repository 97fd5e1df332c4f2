"""Weights that stay on their devices while the mesh changes: equal to a fresh load, and read only where nobody has them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dsjax.checkpoint import load as loading
from dsjax.checkpoint.held_weights import HeldWeights, Part, cover, difference
from dsjax.checkpoint.load import load
from dsjax.model.transformer import abstract_parameters
from sharding import MeshSpec, Rules
from sharding.layer_placement import LayerPlacements


def placements(config, spec: MeshSpec, redundant: int, seed: int | None, mtp: bool) -> LayerPlacements:
    """Experts in order with copies of the first ones behind them, or where a balancer might have put them, each layer otherwise."""
    layers, experts = config.num_moe_layers + mtp, config.n_routed_experts
    row = [*range(experts), *range(redundant)]
    rows = np.tile(np.array(row, np.int32), (layers, 1))
    if seed is not None:
        rng = np.random.default_rng(seed)
        rows = np.stack([rng.permutation(row) for _ in range(layers)])
    return LayerPlacements(rows, experts)


class Engine:
    """A loaded model: what an executor has of parameters."""

    def __init__(
        self, directory, config, mesh, *, redundant=0, seed=None, weights="bf16", mtp=True, devices=None, **held
    ):
        spec = MeshSpec.parse(mesh)
        self.mesh = spec.arrange(devices if devices is not None else jax.devices()[: spec.num_devices])
        self.placements = placements(config, spec, redundant, seed, mtp)
        options = {"weights": weights, "placement": self.placements, "mtp": mtp}
        self.params = load(config, directory, self.mesh, Rules.for_mesh(spec), **options, **held)
        infos = abstract_parameters(
            config, weights=weights, platform="cpu", num_physical=self.placements.n_physical, mtp=mtp
        )
        self.step = SimpleNamespace(
            config=config, table=SimpleNamespace(infos=infos), stored=lambda placements: placements
        )

    def release(self, held: HeldWeights, lost=()) -> None:
        """Give the parameters up, and lose those on some devices."""
        params, self.params = self.params, {}
        if lost:
            params = {path: without(array, lost) for path, array in params.items()}
        held.keep(self.step, params, self.placements)


def without(array, lost):
    """An array as a process sees it whose devices are not those."""
    return SimpleNamespace(
        is_deleted=lambda: False,
        block_until_ready=lambda: None,
        addressable_shards=[shard for shard in array.addressable_shards if shard.device.id not in lost],
    )


def assert_equal(params, fresh):
    assert params.keys() == fresh.keys()
    for path, array in params.items():
        assert (array.sharding, array.dtype) == (fresh[path].sharding, fresh[path].dtype)
        for shard, expected in zip(array.addressable_shards, fresh[path].addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(expected.data), err_msg=path)


CHANGES = [
    # old mesh, new mesh, redundant experts before and after, first of the new devices, devices lost
    ("dp=4", "dp=2", (0, 0), 0, ()),
    ("dp=2", "dp=8", (0, 0), 0, ()),
    ("dp=4", "dp=4", (4, 4), 0, ()),
    ("dp=4", "dp=3", (4, 1), 0, (3,)),
    ("dp=4", "dp=2", (0, 0), 2, (0, 1)),
    ("dp=8,ep=2", "dp=4,ep=2", (0, 0), 0, (4, 5, 6, 7)),
    ("dp=2,tp=4", "tp=4", (0, 0), 0, (4, 5, 6, 7)),
    ("tp=8,ep=1", "tp=4,ep=1", (0, 0), 0, (6, 7)),
    ("dp=1,tp=2", "dp=2,tp=4", (0, 0), 1, ()),
]


@pytest.mark.parametrize("weights", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "devices"])
@pytest.mark.parametrize(("old", "new", "redundant", "first", "lost"), CHANGES)
def test_parameters_are_those_of_a_fresh_load(
    tiny_config, checkpoints, old, new, redundant, first, lost, on_host, weights
):
    directory = checkpoints("fp8" if weights == "fp8" else "bf16")[0]
    if weights == "fp8" and "tp" in old + new:
        pytest.skip("no dimension of this model has a block of 128 for each device")
    held, options = HeldWeights(on_host), {"weights": weights, "mtp": weights != "f32"}
    seeds = (3, 4) if redundant != (0, 0) else (None, None)
    before = Engine(directory, tiny_config, old, redundant=redundant[0], seed=seeds[0], held=held, **options)
    before.release(held, lost)
    devices = jax.devices()[first : first + MeshSpec.parse(new).num_devices]
    layout = {"redundant": redundant[1], "seed": seeds[1], "devices": devices, **options}
    fresh = Engine(directory, tiny_config, new, **layout)
    after = Engine(directory, tiny_config, new, held=held, **layout)
    assert_equal(after.params, fresh.params)
    if not lost:
        assert (held.counts.read, held.counts.file) == (0, 0)
    held.clear()
    assert held.nbytes == 0
