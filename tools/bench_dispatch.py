"""Time the grouped expert product and each dispatch on emulated CPU devices; the tables of ``docs/dispatch.md``.

python tools/bench_dispatch.py product                     # one device: implementations over rows and experts
python tools/bench_dispatch.py dispatch --mesh dp=32       # a mesh: methods over tokens per rank
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sharding.emulation import emulate_devices
from sharding.mesh import MeshSpec

LAYERS = 4


def median_ms(step: Callable, arguments: tuple, repeats: int) -> float:
    """Median milliseconds of a step, each waited for, after two that do not count."""
    import jax

    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        if i >= 2:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def routing(rng, tokens: int, experts: int, top_k: int, skew: float):
    """Distinct expert ids ``[tokens, top_k]`` drawn with popularity ``rank ** -skew`` (0: even), and their weights."""
    import numpy as np

    popularity = np.log(rng.permutation(1.0 / np.arange(1, experts + 1) ** skew))
    keys = popularity + rng.gumbel(size=(tokens, experts))
    return np.argsort(-keys, axis=1)[:, :top_k].astype(np.int32), rng.random((tokens, top_k), np.float32)


def weights(rng, experts: int, width: int, hidden: int):
    """Random expert weights with a leading axis of layers, so that caches are as cold as in a model."""
    import numpy as np

    return {
        "gate_up.weight": rng.normal(size=(LAYERS, experts, width, 2, hidden)).astype(np.float32) / width**0.5,
        "down.weight": rng.normal(size=(LAYERS, experts, hidden, width)).astype(np.float32) / hidden**0.5,
    }


def bench_product(options: argparse.Namespace) -> None:
    """Milliseconds of one layer's product on one device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    from dsjax.model.experts import ExpertProduct

    rng = np.random.default_rng(0)
    print(
        f"D={options.width} F={options.hidden} K={options.top_k} skew={options.skew}; ms a layer, float32, {jax.devices()[0]}"
    )
    for local in options.local_experts:
        params = jax.device_put(weights(rng, local, options.width, options.hidden))
        for rows in options.rows:
            x = jax.device_put(rng.normal(size=(rows, options.width)).astype(np.float32))
            ids, w = routing(rng, rows, options.experts, options.top_k, options.skew)
            ids = np.where(ids < local, ids, -1)
            if local < options.top_k:  # what dispatch hands on
                chosen = ids[:, :, None] == np.arange(local)
                ids, w = np.where(chosen.any(1), np.arange(local), -1), (chosen * w[:, :, None]).sum(1)
            figures = []
            for text in options.products:
                name, _, size = text.partition(":")
                product = ExpertProduct(name, tile=int(size or 0) or None, capacity=int(size or 0) or None)
                step = jax.jit(
                    lambda x, p, ids, w, product=product: lax.scan(
                        lambda x, layer: (x + product(p | {"layer": layer}, x, ids, w), None), x, jnp.arange(LAYERS)
                    )[0]
                )
                figures.append(f"{text} {median_ms(step, (x, params, ids, w), options.repeats) / LAYERS:.3f}")
            print(
                f"X={local:3d} N={rows:5d} pairs={np.sum(ids >= 0):6d} max={np.bincount(ids[ids >= 0]).max():5d}  "
                + "  ".join(figures),
                flush=True,
            )


def bench_dispatch(options: argparse.Namespace) -> None:
    """Milliseconds of one layer's dispatch, product and combine on a mesh."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from dsjax.model.experts import ExpertProduct
    from sharding.dispatch import DispatchConfig, dispatch

    spec = MeshSpec.parse(options.mesh)
    mesh = spec.build()
    rng = np.random.default_rng(0)
    width_axes = spec.expert_width_axes or None
    specs = {
        "gate_up.weight": P(None, spec.expert_axes, None, None, width_axes),
        "down.weight": P(None, spec.expert_axes, width_axes, None),
        "layer": P(),
    }
    params = weights(rng, options.experts, options.width, options.hidden)
    params = {n: jax.device_put(v, NamedSharding(mesh, specs[n])) for n, v in params.items()}
    print(
        f"{spec} D={options.width} F={options.hidden} X={options.experts} K={options.top_k} skew={options.skew}; ms a layer"
    )
    for tokens in options.tokens:
        total = tokens * spec.num_devices
        place = NamedSharding(mesh, P(spec.token_axes))
        x = jax.device_put(rng.normal(size=(total, options.width)).astype(np.float32), place)
        ids, w = jax.device_put(routing(rng, total, options.experts, options.top_k, options.skew), place)
        figures = []
        for method in options.methods:
            name, _, capacity = method.partition(":")
            config = DispatchConfig(name, capacity=int(capacity or 0) or None)

            @jax.jit
            def step(x, params, config=config, ids=ids, w=w):
                def layer(x, index):
                    stack, product = params | {"layer": index}, ExpertProduct(options.product)
                    y, _ = dispatch(spec, mesh, config, x, ids, w, stack, product, specs, experts=options.experts)
                    return x + y, None

                return lax.scan(layer, x, jnp.arange(LAYERS))[0]

            figures.append(f"{method} {median_ms(step, (x, params), options.repeats) / LAYERS:.2f}")
        print(f"tokens a rank {tokens:5d}  " + "  ".join(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("product", "dispatch"))
    parser.add_argument("--mesh", default="dp=32")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--skew", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 64, 256, 1024, 4096])
    parser.add_argument("--local-experts", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--products", nargs="+", default=["tiles:8", "tiles:16", "tiles:32", "einsum:8", "auto"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--methods", nargs="+", default=["gather", "padded", "ragged", "auto"])
    parser.add_argument("--product", default="auto")
    options = parser.parse_args()
    emulate_devices(MeshSpec.parse(options.mesh).num_devices if options.what == "dispatch" else 1)
    (bench_product if options.what == "product" else bench_dispatch)(options)


if __name__ == "__main__":
    main()
