"""Cases of the way to the experts and back on a mesh: every dispatch method, with a product that costs next to nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.bench.modules.case import ModuleCase, ModuleWork
from dsjax.bench.modules.routed import SKEWS, route_randomly
from dsjax.bench.modules.setting import Setting, with_mesh
from dsjax.bench.modules.timing import PreparedCase, device_loop
from sharding import MeshSpec
from sharding.arrays import put
from sharding.dispatch import DispatchConfig, dispatch, dispatch_collectives

METHODS = ("gather", "padded", "ragged")


def exchange_cases(setting: Setting, spec: MeshSpec, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Tokens are one DP rank's; bytes are those that leave one device. In a group all processes must make and time the same cases."""
    config = setting.config
    if not config.is_moe or spec.ep_size == 1:
        return
    experts = config.n_routed_experts + (-config.n_routed_experts % spec.ep_size)
    platform = setting.platform
    for count in tokens:
        for method in METHODS:
            collectives = dispatch_collectives(
                spec,
                DispatchConfig(method),
                tokens=-(-count // spec.tp_size),
                width=config.hidden_size,
                top_k=config.num_experts_per_tok,
                experts=experts,
                dtype=setting.dtype,
                platform=platform,
            )
            sent = sum(one.bytes_sent * one.times for one in collectives)
            rows = count * spec.dp_size * setting.dtype.itemsize * config.hidden_size
            for variant, skew in SKEWS.items():
                yield ModuleCase(
                    "dispatch",
                    f"{method} {variant}",
                    {"tokens": count, "mesh": str(spec), "method": method},
                    ModuleWork(0, 0, sent),
                    6 * rows * spec.num_devices if platform == "cpu" else 6 * rows,
                    lambda m=method, n=count, s=skew: _exchange(setting, spec, m, n, experts, s),
                    shared=True,
                )


def _exchange(setting: Setting, spec: MeshSpec, method: str, tokens: int, experts: int, skew: float) -> PreparedCase:
    own = with_mesh(setting, spec)
    mesh, config = own.step.mesh, setting.config
    place = NamedSharding(mesh, P(spec.batch_axes))
    total = tokens * spec.dp_size
    rng = np.random.default_rng(setting.seed)
    ids = route_randomly(rng, total, experts, config.num_experts_per_tok, skew)
    inputs = put(
        {
            "x": np.asarray(rng.standard_normal((total, config.hidden_size), np.float32), setting.dtype),
            "ids": ids,
            "weights": rng.random(ids.shape, np.float32),
        },
        place,
    )

    def one_round(inputs, _, carry):
        x = carry
        stand_in = {"scale": jnp.ones((experts,), jnp.float32)}
        specs = {"scale": P(spec.expert_axes)}
        y, _ = dispatch(
            spec, mesh, DispatchConfig(method), x, inputs["ids"], inputs["weights"], stand_in, _hand_back, specs
        )
        # Values stay of the size they were, and each round needs the one before it.
        return jax.lax.with_sharding_constraint((inputs["x"] + y * 0.1).astype(x.dtype), place)

    return device_loop(one_round, inputs, jnp.copy(inputs["x"]))


def _hand_back(params, rows_ND, ids_NK, weights_NK):
    """In place of experts: each row that has an expert here, times its weights; every row is read once, none is multiplied."""
    weight_N = jnp.sum(jnp.where(ids_NK >= 0, weights_NK, 0), axis=1)
    rows = rows_ND.take(jnp.arange(rows_ND.shape[0]), axis=0)
    return (rows * weight_N[:, None] * params["scale"][0]).astype(rows_ND.dtype)
