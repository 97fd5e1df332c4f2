"""Uneven experts in the planner: static placements, the balancer's own policy, drift inside a window, recorded loads."""

import json

import numpy as np
import pytest

from dsjax.errors import UserError
from dsjax.plan import skew as skews
from dsjax.plan.figure import Kind, spread
from dsjax.plan.skew import DEFAULT_SKEW, DRIFT, UNIFORM, Skew, Slots, busiest, drawn, read_skew
from sharding.balancing import balancedness, rebalance

WIDE = Slots(ranks=32, physical=288, groups=8, hosts=1)
MANY = 1e9  # rows, so many that chance is nothing


def mean_busiest(loads, slots, balanced):
    return busiest((loads,), slots, balanced)[0][0]


@pytest.fixture
def recorded(tmp_path):
    def write(name, load, **more):
        path = tmp_path / name
        path.write_text(json.dumps({"version": 1, "model": "demo", "logical_load": np.asarray(load).tolist(), **more}))
        return str(path)

    return write


def slowest(skew, balanced):
    return spread(lambda: [skew.slowest(WIDE, 256, MANY, balanced=balanced)])[0]


def as_started(load):
    """The busiest rank's share where every expert is taken as equally loaded, as an engine starts."""
    return balancedness(load, rebalance(np.ones((1, 256)), n_physical=288, ranks=32), 32).busiest


def test_without_a_balancer_redundant_experts_give_what_a_static_placement_gives(model):
    skewed = Skew(0.5, 0.5, 0.5, "test")
    even = model(redundant=32, skew=UNIFORM).decode(256, 2000)
    static = model(redundant=32, skew=skewed, balancing=False)
    balanced = model(redundant=32, skew=skewed)
    assert even < balanced.decode(256, 2000) < static.decode(256, 2000)
    found = as_started(drawn(0.5, 256, 0.0).served)
    assert skewed.slowest(WIDE, 256, MANY, balanced=False) == pytest.approx(found)
    assert static.options.skew.slowest(static.expert_slots, 256, 256 * 8, balanced=False) > found  # and chance


@pytest.mark.parametrize("sizes", [(8, 288, 8, 1), (32, 288, 8, 4), (48, 288, 1, 1), (160, 320, 1, 1)])
def test_what_was_placed_beforehand_is_what_the_balancer_does_now(sizes):
    """`python tools/make_placements.py` writes the file anew after a change to the balancer or to the default skew."""
    slots = Slots(*sizes)
    found = skews.precomputed_placements()[slots, True]
    ends = zip((DEFAULT_SKEW.variation, DEFAULT_SKEW.low, DEFAULT_SKEW.high), DRIFT, strict=True)
    loads = tuple(drawn(variation, 256, drift) for variation, drift in ends)
    assert found == pytest.approx([mean for mean, _, _ in busiest(loads, slots, True)], rel=1e-7)
    bare = Slots(slots.ranks, 256 + -256 % slots.ranks, 1, 1)
    static = busiest(tuple(drawn(variation, 256, 0.0) for variation in (1.28, DEFAULT_SKEW.low, 2.19)), bare, False)
    assert skews.precomputed_placements()[bare, False] == pytest.approx([mean for mean, _, _ in static], rel=1e-7)


def test_what_a_balancer_leaves_is_its_own_policys_on_a_load_that_drifts():
    seen_it = mean_busiest(drawn(1.28, 256, 0.0), WIDE, True)
    drifted = [mean_busiest(drawn(1.28, 256, d), WIDE, True) for d in DRIFT]
    static = mean_busiest(drawn(1.28, 256, 0.0), WIDE, False)
    assert 1 < seen_it < 1.02
    assert seen_it < drifted[1] < drifted[0] < drifted[2] < static
    figure = slowest(DEFAULT_SKEW, balanced=True)
    assert figure == pytest.approx(drifted[0])
    assert figure.low < figure < figure.high
    assert figure.kinds == Kind.EXACT | Kind.ASSUMPTION


def test_skew_is_read_from_a_trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"tokens_per_expert": [[1, 1, 1, 1], [0, 0, 0, 4]]}')
    skew = read_skew(str(path))
    assert (skew.variation, skew.low, skew.high) == skews.counts_variation([[1, 1, 1, 1], [0, 0, 0, 4]])
    assert (skew.low, skew.high) == (0, pytest.approx(3**0.5))
    assert read_skew("zipf:0.5").variation == skews.zipf_variation(0.5)
    path.write_text("[1, 2, 3, 4]")
    assert read_skew(str(path)).variation == skews.counts_variation([[1, 2, 3, 4]])[0]


def test_a_recorded_load_is_placed_layer_by_layer_and_layers_without_tokens_are_left_out(recorded):
    rng = np.random.default_rng(0)
    load = np.round(np.exp(rng.normal(5, 1, (4, 256))))
    skew = read_skew(recorded("one.json", [*load, np.zeros(256)], physical_to_logical=[[0]]))
    figure, found = slowest(skew, balanced=False), as_started(load)
    assert figure == pytest.approx(found)
    assert figure.low < found < figure.high
    assert figure.kinds == Kind.EXACT | Kind.MEASURED
    # Balanced, one recording does not tell how the load drifts; for a model with other experts, only how uneven it is.
    assert slowest(skew, balanced=True).kinds == Kind.EXACT | Kind.ASSUMPTION
    (other,) = spread(lambda: [skew.slowest(Slots(32, 128, 1, 1), 128, MANY, balanced=False)])
    assert other == pytest.approx(mean_busiest(drawn(skew.variation, 128, 0.0), Slots(32, 128, 1, 1), False))
    assert other.kinds == Kind.EXACT | Kind.ASSUMPTION


def test_two_recordings_tell_the_drift(recorded):
    rng = np.random.default_rng(1)
    earlier = np.round(np.exp(rng.normal(5, 1, (4, 256))))
    later = np.round(earlier * np.exp(rng.normal(0, 0.3, (4, 256))))
    skew = read_skew(f"{recorded('earlier.json', earlier)},{recorded('later.json', later)}")
    figure = slowest(skew, balanced=True)
    placed = rebalance(earlier, n_physical=288, ranks=32, groups=8)
    assert figure == pytest.approx(balancedness(later, placed, 32).busiest)
    assert figure.kinds == Kind.EXACT | Kind.MEASURED
    assert 1.05 < figure < slowest(skew, balanced=False)


def test_files_that_hold_no_loads_are_refused(tmp_path, recorded):
    two = ",".join(recorded(f"{layers}.json", np.ones((layers, 8))) for layers in (2, 3))
    with pytest.raises(UserError, match=r"2 layers of 8 experts, the second has 3 of 8; expected two .* of one model"):
        read_skew(two)
    with pytest.raises(UserError, match="no layer has a token"):
        read_skew(recorded("empty.json", np.zeros((2, 8))))
    for text in ('{"other": 1}', "[[1, -1]]", "[[1, 2], [3]]", "nothing"):
        path = tmp_path / "wrong.json"
        path.write_text(text)
        with pytest.raises(UserError, match=r"wrong\.json.*expected default, uniform, zipf:S.*logical_load"):
            read_skew(str(path))
    with pytest.raises(UserError, match="No such file"):
        read_skew(str(tmp_path / "missing.json"))


def test_the_rank_with_most_experts_has_more_than_the_mean_while_tokens_are_few_and_no_more_than_all():
    """Against draws: 8 of 256 experts a token, evenly, over 8 ranks."""
    random = np.random.default_rng(0)
    for tokens in (1, 4, 16, 256):
        drawn = []
        for _ in range(300):
            used = np.zeros(256, bool)
            for _ in range(tokens):
                used[random.permutation(256)[:8]] = True
            drawn.append(used.reshape(8, 32).sum(axis=1).max())
        assert UNIFORM.most_touched(tokens, 8, 256, 32, 8) == pytest.approx(np.mean(drawn), rel=0.1)
    assert UNIFORM.most_touched(16, 8, 256, 256, 1) == pytest.approx(UNIFORM.touched(16, 8, 256))
