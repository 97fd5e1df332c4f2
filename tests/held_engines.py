"""Loaded models without an executor, whose weights are held when they are given up."""

from types import SimpleNamespace

import jax
import numpy as np

from dsjax.checkpoint.held_weights import HeldWeights, WeightBytes
from dsjax.checkpoint.load import load
from dsjax.model.parameter_table import abstract_parameters
from sharding import MeshSpec, Rules
from sharding.layer_placement import LayerPlacements


def placements(config, redundant: int, seed: int | None, mtp: bool) -> LayerPlacements:
    """Experts in order with copies of the first ones behind them, or where a balancer might have put them, each layer otherwise."""
    layers, experts = config.num_moe_layers + mtp, config.n_routed_experts
    row = np.array([*range(experts), *range(redundant)], np.int32)
    order = np.asarray if seed is None else np.random.default_rng(seed).permutation
    return LayerPlacements(np.stack([order(row) for _ in range(layers)]), experts)


class Engine:
    """A loaded model: what an executor has of parameters."""

    def __init__(
        self, directory, config, mesh, *, redundant=0, seed=None, weights="bf16", mtp=True, devices=None, **held
    ):
        spec = MeshSpec.parse(mesh)
        self.mesh = spec.arrange(devices if devices is not None else jax.devices()[: spec.num_devices])
        self.placements = placements(config, redundant, seed, mtp)
        options = {"weights": weights, "placement": self.placements, "mtp": mtp}
        self.params = load(config, directory, self.mesh, Rules.for_mesh(spec), **options, **held)
        infos = abstract_parameters(config, weights=weights, num_physical=self.placements.n_physical, mtp=mtp)
        table = SimpleNamespace(infos=infos)
        self.step = SimpleNamespace(config=config, table=table, with_shared_slots=lambda placements: placements)

    def pointers(self, path: str) -> list[int]:
        """Where each device has its shard."""
        return [shard.data.unsafe_buffer_pointer() for shard in self.params[path].addressable_shards]

    def release(self, held: HeldWeights, lost=()) -> None:
        """Give the parameters up, and lose those on some devices."""
        params, self.params = self.params, {}
        if lost:
            params = {path: without(array, lost) for path, array in params.items()}
        held.keep(self.step, params, self.placements)
        held.counts = WeightBytes()


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
