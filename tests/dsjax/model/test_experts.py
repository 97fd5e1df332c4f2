"""Every implementation of the grouped expert product gives what a plain loop over experts gives."""

import jax
import numpy as np
import pytest
from kernel_cases import STORED, ExpertsCase

from dsjax.model.experts import ROUND_ROWS, ExpertProduct, default_capacity

IMPLEMENTATIONS = ("tiles", "einsum")
SMALL = {"X": 5, "D": 16, "F": 8, "N": 24, "K": 3}


@pytest.mark.parametrize(
    ("implementation", "size", "stored"),
    [("tiles", 1, 4), ("tiles", 80, 2), ("tiles", None, 1), ("einsum", 1, 4), ("einsum", 4, 1), ("einsum", None, 2)],
)
def test_equals_the_loop_for_every_routing_tile_size_and_format_of_weights(implementation, size, stored):
    product = jax.jit(ExpertProduct(implementation, weight_dtype=STORED[stored], tile=size, capacity=size))
    for routing in ("all", "some", "one expert", "none"):
        case = ExpertsCase.drawn(0, X=5, D=150, F=140, N=24, K=3, stored=stored, routing=routing)
        case.assert_near(product(case.params(), case.rows, case.ids, case.weights), factor=3e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_unused_rows_with_nan_do_not_spread(implementation):
    case, others = ExpertsCase.drawn(1, **SMALL, routing="all"), np.arange(24) != 7
    case.ids[others] = -1
    clean = case.by(ExpertProduct(implementation))
    case.rows[others] = np.nan
    np.testing.assert_array_equal(case.by(ExpertProduct(implementation)), clean)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_layer_of_a_stack_gives_what_that_layer_alone_gives(implementation):
    case, product = ExpertsCase.drawn(4, **SMALL, layers=3), ExpertProduct(implementation)
    stack = case.params()
    for index in range(3):
        alone = {name: array[index] for name, array in stack.items() if name != "layer"}
        found = case.by(product, stack | {"layer": np.int32(index)})
        np.testing.assert_array_equal(found, case.by(product, alone))


def test_a_round_holds_the_load_and_no_more_rows_than_fit_and_an_unknown_choice_is_refused():
    assert default_capacity(8, experts=8) == 24  # 8 + 4 × 2.8, in eights
    assert default_capacity(2048, experts=8) == 2232
    assert default_capacity(2048, experts=256) * 256 == ROUND_ROWS
    with pytest.raises(ValueError, match="'fastest'; expected one of"):
        ExpertProduct("fastest")
