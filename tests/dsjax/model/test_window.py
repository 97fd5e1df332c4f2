"""A window of a model's parameters: shapes of what is here, and where that lies in the whole."""

import numpy as np

from dsjax.config import load_config
from dsjax.model.stage import stages_of
from dsjax.model.transformer import abstract_parameters
from dsjax.model.window import ParameterWindow

V3 = load_config("deepseek-v3")
DOWN, ROUTER, EMBED = "moe_layers.moe.experts.down.weight", "moe_layers.moe.router.bias", "embed.weight"
WHOLE = abstract_parameters(V3, weights="fp8")


def shapes(window: ParameterWindow) -> list[tuple[int, ...]]:
    return [info.shape for info in window.of({path: WHOLE[path] for path in (DOWN, ROUTER, EMBED)}).values()]


def test_experts_are_cut_where_there_is_an_axis_of_them_and_layers_in_the_stacks_that_are_named():
    everything = shapes(ParameterWindow())
    assert everything == [(58, 256, 2048, 7168), (58, 256), (129280, 7168)]
    assert shapes(ParameterWindow(experts=range(8, 16))) == [(58, 8, 2048, 7168), *everything[1:]]
    assert shapes(ParameterWindow({"moe_layers": range(50, 57)})) == [(7, 256, 2048, 7168), (7, 256), everything[2]]
    assert shapes(ParameterWindow({"dense_layers": range(1)})) == everything


def test_a_region_of_a_window_is_found_in_the_whole():
    window = ParameterWindow({"moe_layers": range(50, 57)}, experts=range(8, 16))
    found = window.in_whole(DOWN, WHOLE[DOWN], (slice(0, 1), slice(2, 5), slice(0, 2048), slice(7, 9)))
    assert found == (slice(50, 51), slice(10, 13), slice(0, 2048), slice(7, 9))
    assert window.in_whole(EMBED, WHOLE[EMBED], (slice(3, 4), slice(0, 7168))) == (slice(3, 4), slice(0, 7168))


def test_the_windows_of_stages_are_side_by_side():
    windows = [stage.window(V3).layers for stage in stages_of(V3, 4, given="2,3,50,6")]
    for stack, layers in (("dense_layers", 3), ("moe_layers", 58)):
        np.testing.assert_array_equal(np.concatenate([one[stack] for one in windows]), np.arange(layers))
