"""Run by ``test_dispatch.py`` in a process with 72 devices: redundant experts under every dispatch, exact."""

import jax.numpy as jnp
import numpy as np
from dispatch_cases import K, coded_rows, compiled, expected, weights_of

from sharding.dispatch import DispatchConfig
from sharding.placement import Placement, assign_copies, least_redundancy

LOGICAL, RANKS, TOKENS = 256, 72, 2


def main() -> None:
    rng = np.random.default_rng(0)
    physical = LOGICAL + least_redundancy(LOGICAL, RANKS)
    placement = Placement.with_redundancy(LOGICAL, physical, ranks=RANKS, load=rng.pareto(1.5, LOGICAL))
    tokens = TOKENS * RANKS
    logical = np.stack([rng.permutation(LOGICAL)[:K] for _ in range(tokens)]).astype(np.int32)
    active = rng.random(tokens) < 0.9
    slots = np.asarray(assign_copies(placement.tables, jnp.asarray(logical), jnp.asarray(active), ranks=RANKS))
    x, weights = coded_rows(tokens), weights_of(tokens)
    np.testing.assert_array_equal(slots >= 0, np.broadcast_to(active[:, None], slots.shape))
    exact = []
    for method in ("gather", "padded", "ragged"):
        gains = np.asarray(placement.physical_to_logical) + 1  # a copy is as good as any other of its expert
        spec, call = compiled(f"dp={RANKS}", DispatchConfig(method), physical, gains=gains)
        want = expected(x, np.where(active[:, None], logical, -1), weights)
        np.testing.assert_array_equal(call(x, slots, weights)[0], want)
        exact.append(method)
    print(f"{spec.num_devices} ranks, {physical} physical experts: {' '.join(exact)} exact")


if __name__ == "__main__":
    main()
