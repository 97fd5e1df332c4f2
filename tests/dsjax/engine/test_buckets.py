"""Every plan is laid into shapes that were compiled, each row exactly once."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.engine.buckets import (
    ACCELERATOR_LAUNCH_TOKENS,
    CPU_LAUNCH_TOKENS,
    SCORED_CHUNK,
    SMALLEST_CHUNK,
    Buckets,
    Rectangle,
)
from dsjax.engine.plan import RankPlan, ScheduledRow, StepPlan
from dsjax.engine.request import Request
from dsjax.engine.sampling_params import SamplingParams


def row(length: int) -> ScheduledRow:
    request = Request("", [0] * length, length, SamplingParams(), 1, 0)
    return ScheduledRow(request, 0, length)


@st.composite
def cases(draw):
    """Buckets, and a plan within the limits that they cover; idle ranks and idle phases are frequent."""
    max_num_seqs, chunk = draw(st.integers(1, 40)), draw(st.integers(1, 300))
    buckets = Buckets.covering(max_num_seqs, chunk, mixed=draw(st.booleans()))
    ranks = []
    for _ in range(draw(st.integers(1, 4))):
        decodes = draw(st.integers(0, max_num_seqs)) if draw(st.booleans()) else 0
        lengths = draw(st.lists(st.integers(1, chunk), max_size=max_num_seqs)) if draw(st.booleans()) else []
        ranks.append(RankPlan([row(1) for _ in range(decodes)], [row(length) for length in lengths]))
    return buckets, StepPlan(ranks)


@given(cases())
def test_every_row_is_laid_once_on_its_rank_into_a_compiled_shape_that_holds_it(case):
    buckets, plan = case
    launches = buckets.launches(plan)
    shapes = buckets.shapes()
    laid = [([], []) for _ in plan.ranks]
    for launch in launches:
        assert (launch.decode, launch.prefill) in shapes
        assert len(launch.decode_rows) == len(launch.prefill_rows) == len(plan.ranks)
        for rank, own in enumerate(zip(launch.decode_rows, launch.prefill_rows, strict=True)):
            for rows, rectangle, seen in zip(own, (launch.decode, launch.prefill), laid[rank], strict=True):
                assert len(rows) <= (rectangle.rows if rectangle else 0)
                assert all(scheduled.length <= rectangle.chunk for scheduled in rows)
                seen += rows
        assert any(launch.decode_rows) or any(launch.prefill_rows)
    for rank, (decodes, prefills) in zip(plan.ranks, laid, strict=True):
        assert [id(r.request) for r in decodes] == [id(r.request) for r in rank.decodes]
        assert sorted(id(r.request) for r in prefills) == sorted(id(r.request) for r in rank.prefills)


@given(cases())
def test_decodes_come_in_the_first_launch_and_share_it_only_where_that_is_wanted(case):
    buckets, plan = case
    launches = buckets.launches(plan)
    with_decodes = [i for i, launch in enumerate(launches) if any(launch.decode_rows)]
    assert with_decodes in ([], [0])
    if with_decodes:
        prompts = any(rank.prefills for rank in plan.ranks)
        assert (launches[0].prefill is not None) == (buckets.mixed and prompts)


@given(cases())
def test_a_decode_launch_has_the_fewest_rows_that_hold_the_fullest_rank(case):
    buckets, plan = case
    most = max(len(rank.decodes) for rank in plan.ranks)
    for launch in buckets.launches(plan):
        if launch.decode and not launch.prefill:
            assert launch.decode.rows == min(rows for rows in buckets.decode if rows >= most)


@given(cases())
def test_single_rows_never_make_a_step_cost_more(case):
    buckets, plan = case
    each = ACCELERATOR_LAUNCH_TOKENS if buckets.mixed else CPU_LAUNCH_TOKENS

    def cost(these: Buckets) -> int:
        return sum(
            each + launch.prefill.rows * launch.prefill.chunk for launch in these.launches(plan) if launch.prefill
        )

    assert cost(buckets) <= cost(dataclasses.replace(buckets, single=()))


def test_an_empty_plan_launches_nothing():
    buckets = Buckets.covering(8, 64, mixed=True)
    assert buckets.launches(StepPlan([RankPlan([], []), RankPlan([], [])])) == []


def test_prompts_of_like_length_share_a_rectangle():
    buckets = Buckets.covering(4, 128, mixed=False)
    assert buckets.prefill == (Rectangle(1, 128), Rectangle(2, 64), Rectangle(4, 32))
    assert buckets.single == (Rectangle(1, 64), Rectangle(1, 32))
    plan = StepPlan([RankPlan([], [row(n) for n in (5, 100, 30, 60, 20, 10)]), RankPlan([], [row(40)])])
    found = [
        (launch.prefill, [[r.length for r in rows] for rows in launch.prefill_rows])
        for launch in buckets.launches(plan)
    ]
    assert found == [
        (Rectangle(1, 128), [[100], [40]]),
        (Rectangle(1, 64), [[60], []]),
        (Rectangle(4, 32), [[30, 20, 10, 5], []]),
    ]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("sequences", "chunk"), [(1, 1), (1, 256), (8, 16), (3, 100), (256, 256), (256, 257)])
def test_few_shapes_cover_everything(sequences, chunk, mixed):
    buckets = Buckets.covering(sequences, chunk, mixed=mixed)
    assert buckets.decode[-1] == sequences
    assert list(buckets.decode) == sorted(set(buckets.decode))
    assert buckets.prefill[0] == (1, chunk)
    # Each rectangle has at least as many token slots as the widest, and not twice as many.
    assert all(chunk <= r.rows * r.chunk < 2 * chunk or r.rows == 1 for r in buckets.prefill)
    assert buckets.prefill[-1].chunk > SMALLEST_CHUNK // 2 or chunk <= SMALLEST_CHUNK
    assert len(set(buckets.shapes())) == len(buckets.shapes())
    assert len(buckets.shapes()) == len(buckets.decode) + (2 if mixed else 1) * len(buckets.prefill + buckets.single)
    assert buckets.single == tuple(Rectangle(1, r.chunk) for r in buckets.prefill[1:])


@pytest.mark.parametrize(
    ("prompts", "on_cpu", "on_accelerators"),
    [
        ([20], [(1, 32)], [(1, 32)]),
        ([50], [(1, 64)], [(1, 64)]),
        ([100], [(1, 128)], [(1, 128)]),
        ([100, 20], [(2, 128)], [(2, 128)]),
        ([20] * 2, [(1, 32)] * 2, [(8, 32)]),
        ([20] * 5, [(1, 32)] * 5, [(8, 32)]),
        ([20] * 6, [(8, 32)], [(8, 32)]),
    ],
)
def test_few_short_prompts_take_a_launch_each_as_long_as_that_costs_less(prompts, on_cpu, on_accelerators):
    plan = StepPlan([RankPlan([], [row(length) for length in prompts]), RankPlan([], [])])
    for mixed, expected in ((False, on_cpu), (True, on_accelerators)):
        buckets = Buckets.covering(8, 256, mixed=mixed)
        assert [launch.prefill for launch in buckets.launches(plan)] == expected


def test_prompts_to_be_scored_come_last_one_a_rank_in_pieces_that_follow_each_other():
    buckets = Buckets.covering(4, 200, mixed=True)
    assert buckets.scored == Rectangle(1, SCORED_CHUNK)
    scored = SamplingParams(prompt_logprobs=1)
    long, short = Request("a", [0] * 300, 300, scored, 1, 0), Request("b", [0] * 70, 70, scored, 1, 0)
    again = Request("c", [0] * 90, 80, scored, 20, 0)  # preempted after its prompt was scored
    again.num_prompt_logprobs = 79
    plan = StepPlan(
        [
            RankPlan([row(1)], [ScheduledRow(long, 100, 150), row(9), ScheduledRow(short, 0, 70)]),
            RankPlan([], [ScheduledRow(again, 0, 90)]),
        ]
    )
    launches = buckets.launches(plan)
    assert [launch.scored for launch in launches] == [False, True, True, True, True, True]
    assert [own.request.request_id for rows in launches[0].prefill_rows for own in rows] == ["", "c"]
    pieces = [launch.prefill_rows[0][0] for launch in launches[1:]]
    assert [(piece.request.request_id, piece.start, piece.length) for piece in pieces] == [
        ("a", 100, 64),
        ("a", 164, 64),
        ("a", 228, 22),
        ("b", 0, 64),
        ("b", 64, 6),
    ]
    assert [piece.sampled for piece in pieces] == [False, False, False, False, True]
    assert all(launch.prefill == buckets.scored and not launch.prefill_rows[1] for launch in launches[1:])
