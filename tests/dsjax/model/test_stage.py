"""How a model's layers are divided among stages, and what each stage then is."""

import numpy as np
import pytest

from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.model.parameter_table import abstract_parameters, parameter_table
from dsjax.model.stage import layer_work, stages_of
from sharding.layer_placement import LayerPlacements

V3, FLASH = load_config("deepseek-v3"), load_config("deepseek-v4-flash")


def numbers(*arguments, **options):
    return [stage.layers for stage in stages_of(*arguments, **options)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16, 61])
def test_no_division_gives_the_fullest_stage_less_work(count):
    work, behind = layer_work(V3)

    def fullest(layers):
        *sums, last = (sum(part) for part in np.split(work, np.cumsum(layers)[:-1]))
        return max([*sums, last + behind])

    found = numbers(V3, count)
    assert sum(found) == 61
    assert min(found) > 0
    for place in range(count - 1):  # one layer more to either neighbour
        for step in (1, -1):
            other = list(found)
            other[place], other[place + 1] = other[place] - step, other[place + 1] + step
            assert min(other) < 1 or fullest(other) >= fullest(found)


def test_head_and_drafts_take_layers_from_the_last_stage_and_a_division_that_is_given_is_kept():
    assert numbers(V3, 2) == [31, 30]
    assert numbers(V3, 2, mtp=True)[-1] < 30
    stages = stages_of(V3, 3, given="4, 40,17")
    assert [(stage.first, stage.layers) for stage in stages] == [(0, 4), (4, 40), (44, 17)]
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize("given", ["31", "31,29", "61,0", "31,x", "31,30,0", "-1,62", ""])
def test_a_division_that_cannot_be_is_named(given):
    with pytest.raises(UserError, match=r"expected 2 positive layer counts, .* with the sum 61"):
        stages_of(V3, 2, given=given)
    with pytest.raises(UserError, match="pp=62 has more stages than the model has layers \\(61\\)"):
        stages_of(V3, 62)


def test_the_stages_parameters_together_are_the_models():
    whole = abstract_parameters(V3, weights="fp8")
    found: dict[str, list[tuple]] = {}
    for stage in stages_of(V3, 4, given="2,3,50,6", mtp=True):
        config = stage.config(V3)
        table = parameter_table(config, weights="fp8", begins=stage.is_first, ends=stage.is_last, mtp=stage.is_last)
        for path, info in table.infos.items():
            found.setdefault(path, []).append(info.shape)
    assert found.keys() == whole.keys()
    for path, shapes in found.items():
        if path == "embed.weight":
            assert shapes == [whole[path].shape] * 2  # the last stage's is the MTP module's
        elif path.split(".")[0] in ("dense_layers", "moe_layers"):
            assert (sum(shape[0] for shape in shapes), shapes[0][1:]) == (whole[path].shape[0], whole[path].shape[1:])
        else:
            assert shapes == [whole[path].shape]


def test_a_stage_has_whole_stacks_of_a_model_whose_runs_end_at_its_borders():
    for stage in stages_of(FLASH, 3, given="4,20,19", mtp=True):  # between layers that take turns
        own = parameter_table(stage.config(FLASH), weights="fp8", mtp=stage.is_last)
        whole = abstract_parameters(stage.in_whole(FLASH), weights="fp8")
        assert {path: info.shape for path, info in own.infos.items()} == {path: whole[path].shape for path in own.infos}


def test_each_stage_has_the_rows_of_its_own_layers_of_a_placement():
    layers = V3.num_moe_layers + 1  # the MTP module's is the last
    coded = np.stack([np.roll(np.arange(256), layer) for layer in range(layers)])
    whole = LayerPlacements(coded, 256)
    found = [stage.placement(whole, V3).physical_to_logical for stage in stages_of(V3, 4, given="2,3,50,6")]
    assert [len(rows) for rows in found] == [0, 2, 50, 7]
    np.testing.assert_array_equal(np.concatenate(found), coded)


def test_the_windows_of_stages_are_side_by_side_and_a_stage_of_dense_layers_alone_has_no_experts():
    windows = [stage.window(V3).layers for stage in stages_of(V3, 4, given="2,3,50,6")]
    for stack, layers in (("dense_layers", 3), ("moe_layers", 58)):
        np.testing.assert_array_equal(np.concatenate([one[stack] for one in windows]), np.arange(layers))
    first, second, *_ = stages_of(V3, 4, given="2,3,50,6")
    assert not first.config(V3).is_moe
    assert (second.config(V3).num_dense_layers, second.config(V3).num_moe_layers) == (1, 2)
    assert second.window(V3).layers == {"dense_layers": range(2, 3), "moe_layers": range(2)}
