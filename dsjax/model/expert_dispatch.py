"""Expert dispatch of a step: the devices that have the routed experts, the physical copy each token goes to, the exchange, and the
expert product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.kernels.native_calls import ExchangeInMemory
from dsjax.model.experts import ExpertProduct
from dsjax.model.in_place import MatricesInPlace
from dsjax.model.layer_values import Layer
from dsjax.model.parameters import ParameterInfo
from dsjax.model.router import Routing
from dsjax.model.token_sharding import TokenSharding
from dsjax.model.transformer import RoutedExperts
from sharding import MeshSpec
from sharding.dispatch import DispatchConfig, Exchange, ExpertsOfMesh
from sharding.layer_placement import LayerPlacements
from sharding.on_ranks import OneRank
from sharding.placement import assign_copies, slot_distances

EXPERTS = ".moe.experts."
"""Substring of the paths of exactly the parameters that these devices have."""


@dataclass(frozen=True)
class ExpertsApart:
    """Description of the devices that have only the routed experts (AFD)."""

    spec: MeshSpec  # mesh of the expert devices; no expert is split over several
    parts: int  # number of equal runs into which they are divided for sending
    padded: bool  # whether all cells of an exchange are sent, not only the filled ones
    infos: Mapping[str, ParameterInfo] = field(hash=False)  # their parameters by path

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        stack = next(iter(self.infos)).split(EXPERTS)[0]
        infos = [info for path, info in self.infos.items() if path.startswith(stack + EXPERTS)]
        return sum(info.nbytes // (info.shape[0] * info.shape[1]) for info in infos)

    @property
    def bytes_of_device(self) -> int:
        """Bytes of one device's parameters."""
        return sum(info.nbytes for info in self.infos.values()) // self.spec.ep_size


@dataclass(frozen=True, eq=False)
class ExpertDispatch:
    """A model's physical experts on a mesh, and the dispatch of tokens to them."""

    placement: LayerPlacements  # of the routed experts, without the shared expert
    dispatch: DispatchConfig
    nearest_copies: bool  # send a token to the nearest copies of its experts
    shared_experts_fusion: bool  # each rank has the shared expert as an additional physical expert
    products: MatricesInPlace  # the step's products; the experts use the same kernels and activation scheme
    sharding: TokenSharding

    def assign(
        self, layer: Layer, routing: Routing, *, tokens_split: bool = False
    ) -> tuple[Int[Array, "N K"], Float[Array, "N K"]]:
        """Return the physical experts of all token slots, and their weights. tokens_split: tokens are split over ``tp``."""
        B, flat = len(routing.ids), partial(rearrange, pattern="b t ... -> (b t) ...")
        sharding, spec = self.sharding, self.sharding.spec
        spread, axes = (sharding.split, spec.token_axes) if tokens_split else (sharding.whole, spec.batch_axes)
        logical, active, weights = (flat(spread(a)) for a in (routing.ids, layer.tokens.active, routing.weights))
        # Copies take turns per DP rank, or per device if the tokens are already split.
        runs = spec.tp_size if tokens_split else 1
        distances, first = self._slot_distances(runs), 0
        if isinstance(sharding.mesh, OneRank):
            first = jax.lax.axis_index(spec.batch_axes)
            distances = None if distances is None else jnp.asarray(distances)[first][None]
        slots = assign_copies(layer.copies, logical, active, B * runs, distances, first)
        return sharding.constrain(slots, axes), sharding.constrain(weights, axes)

    def exchange(self, layer: Layer, x: Float[Array, "B T *n D"]) -> tuple[Exchange, ExpertsOfMesh]:
        """Return the exchange of this layer's tokens, and the layer's experts."""
        products, spec, mesh = self.products, self.sharding.spec, self.sharding.mesh
        T, D, K = x.shape[1], x.shape[-1], products.config.num_experts_per_tok
        tokens = spec.dp_size * T
        experts = layer.block.moe.experts
        stack = stored(experts)
        specs = {name: self._expert_spec(experts, name) for name in stack}
        product = self._product(self.mean_load(tokens))
        exchange = Exchange.of(
            spec,
            mesh,
            self.config,
            jax.ShapeDtypeStruct((tokens, D), x.dtype),
            jax.ShapeDtypeStruct((tokens, K), jnp.int32),
            experts=self.placement.n_physical,
            fused_shared=self.shared_experts_fusion,
        )
        return exchange, ExpertsOfMesh(product, stack | {"layer": layer.index}, specs | {"layer": P()})

    @property
    def config(self) -> DispatchConfig:
        """``dispatch``, adapted to this step's kernels."""
        by_choice = self.dispatch.by_choice or self.products.native
        return replace(self.dispatch, by_choice=by_choice, in_memory=self._in_memory)

    def mean_load(self, tokens: int) -> float:
        """Return the pairs of one physical expert in one product if all ``tokens`` of the mesh are routed evenly."""
        spec, top_k = self.sharding.spec, self.products.config.num_experts_per_tok
        local_rows = tokens / spec.num_devices
        if self.dispatch.chunk_tokens is not None:
            local_rows = min(local_rows, self.dispatch.chunk_tokens)
        # Devices that share an expert's width each compute the pairs of all of them.
        return local_rows * spec.ep_size * spec.expert_width_shards * top_k / self.placement.n_physical

    def _product(self, mean_load: float | None = None) -> ExpertProduct:
        """Return the routed experts' product on one rank."""
        products = self.products
        return ExpertProduct(
            weight_dtype=self._stored[0].dtype,
            depth_last=self._stored[0].depth_last,
            platform=self.sharding.mesh.devices.flat[0].platform,
            mean_load=mean_load,
            kernels=products.kernels,
            scheme=products.scheme,
            width_shares=self.sharding.spec.expert_width_shards,
            limit=products.config.swiglu_limit,
        )

    @property
    def _stored(self) -> list[ParameterInfo]:
        """Metadata of the experts' weights in each stack; empty with AFD, where other devices have the experts."""
        return [info for path, info in self.products.infos.items() if path.endswith("experts.down.weight")]

    def _slot_distances(self, runs: int) -> Int[np.ndarray, "R P"] | None:
        """Return the distances for ``assign_copies``; None without ``nearest_copies``. runs: number of runs of a DP rank's tokens."""
        if not self.nearest_copies:
            return None
        hosts = np.array([device.process_index for device in self.sharding.mesh.devices.flat])
        if self.dispatch.devices_per_host is not None:
            hosts = np.arange(hosts.size) // self.dispatch.devices_per_host
        return np.repeat(slot_distances(self.sharding.spec, hosts, self.placement.n_physical), runs, axis=0)

    def _expert_spec(self, experts: RoutedExperts, name: str) -> P:
        matrix, part = name.split(".")
        axes = getattr(getattr(experts, matrix), part).info.logical_axes
        return self.products.rules.spec(axes)

    @property
    def _in_memory(self) -> ExchangeInMemory | None:
        """Native exchange of rows in memory, if all (emulated) devices are in this process; None for other exchanges."""
        mesh = self.sharding.mesh
        alone = all(device.process_index == jax.process_index() for device in mesh.devices.flat)
        if not self.products.native or not alone or self.dispatch.overlapped:
            return None
        read_tokens = bool(self._stored) and self._product().is_native(np.dtype(np.float32))
        return ExchangeInMemory(self.products.kernels.native, mesh.axis_names, read_tokens)


def stored(experts: RoutedExperts) -> dict[str, Array]:
    """Return the stored arrays by name: ``gate_up.weight`` and ``down.weight``, likewise for ``scale`` and ``global_scale``."""
    return {
        f"{name}.{part}": getattr(matrix, part)[...]
        for part in ("weight", "scale", "global_scale")
        for name, matrix in {"gate_up": experts.gate_up, "down": experts.down}.items()
        if hasattr(matrix, part)
    }
