"""Every plan is laid into shapes that were compiled, each row exactly once."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.engine.contract.commands import TOKEN_MADE, PrefillRow, RankStep, Step, int32s
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.device import buckets as launch_buckets
from dsjax.engine.device.buckets import SMALLEST_CHUNK, Buckets, Rectangle, num_decodes
from dsjax.engine.device.launch_rows import makes_token


def row(length: int, **more) -> PrefillRow:
    return PrefillRow(0, 0, int32s([0] * length), TOKEN_MADE, 9999, **more)


def rank_of(decodes: int, prefills: list[PrefillRow]) -> RankStep:
    return RankStep([], [], int32s(value for slot in range(decodes) for value in (slot, 9999)), prefills, [])


def drafting(ranges) -> SpeculativeConfig:
    """Two drafts, or fewer by the number of running requests."""
    drafts = {"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": ranges}
    return SpeculativeConfig(method="mtp", **drafts)


@st.composite
def cases(draw):
    """Buckets, and a step within the limits that they cover; idle ranks and idle phases are frequent."""
    max_num_seqs, chunk = draw(st.integers(1, 40)), draw(st.integers(1, 300))
    ranges = st.sampled_from([None, [[1, 1, 0], [2, 5, 2], [6, 4096, 1]]])
    speculation = draw(st.none() | ranges.map(drafting))
    buckets = Buckets.covering(max_num_seqs, chunk, mixed=draw(st.booleans()), speculation=speculation)
    ranks, most = [], 1
    for _ in range(draw(st.integers(1, 4))):
        decodes = draw(st.integers(0, max_num_seqs)) if draw(st.booleans()) else 0
        lengths = draw(st.lists(st.integers(1, chunk), max_size=max_num_seqs)) if draw(st.booleans()) else []
        ranks.append(rank_of(decodes, [row(length) for length in lengths]))
        most = max(most, decodes)
    drafts = 0 if speculation is None else speculation.drafts(draw(st.integers(most, max_num_seqs)))
    return buckets, Step(ranks, drafts, drafts)


@given(cases())
def test_every_row_is_laid_once_on_its_rank_into_a_compiled_shape_that_holds_it(case):
    buckets, step = case
    launches = buckets.launches(step)
    shapes = {(decode, prefill): proposals for decode, prefill, proposals in buckets.shapes()}
    pieces, with_decodes = [[] for _ in step.ranks], 0
    for launch in launches:
        assert (launch.decode, launch.prefill) in shapes
        assert step.proposes == 0 or step.proposes in shapes[launch.decode, launch.prefill]
        assert len(launch.pieces) == len(step.ranks)
        if launch.decode:
            with_decodes += 1
            assert launch.decode.chunk == 1 + step.num_drafts
            assert all(num_decodes(rank) <= launch.decode.rows for rank in step.ranks)
        for rank, own in enumerate(launch.pieces):
            assert len(own) <= (launch.prefill.rows if launch.prefill else 0)
            assert all(piece.length <= launch.prefill.chunk for piece in own)
            pieces[rank] += own
        assert launch.decode or any(launch.pieces)
    assert with_decodes == any(rank.decodes for rank in step.ranks)
    most = max(num_decodes(rank) for rank in step.ranks)
    if most:  # decodes come first, in the fewest rows, and share their launch only where that is wanted
        assert launches[0].decode
        assert (launches[0].prefill is not None) == (buckets.mixed and any(rank.prefills for rank in step.ranks))
        if not launches[0].prefill:
            assert launches[0].decode.rows == min(rows for rows in buckets.decode if rows >= most)
    for rank, own in zip(step.ranks, pieces, strict=True):
        assert sorted(own) == [(index, 0, prefill.length) for index, prefill in enumerate(rank.prefills)]

    each = launch_buckets.ACCELERATOR_LAUNCH_TOKENS if buckets.mixed else launch_buckets.CPU_LAUNCH_TOKENS

    def cost(launches) -> int:
        return sum(each + launch.prefill.rows * launch.prefill.chunk for launch in launches if launch.prefill)

    # Single rows never make a step cost more.
    assert cost(launches) <= cost(dataclasses.replace(buckets, single=()).launches(step))


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
    assert buckets.proposals == ()
    assert not any(proposals for _, _, proposals in buckets.shapes())
    assert len(buckets.shapes()) == len(buckets.decode) + (2 if mixed else 1) * len(buckets.prefill + buckets.single)
    assert buckets.single == tuple(Rectangle(1, r.chunk) for r in buckets.prefill[1:])


def test_one_request_alone_needs_one_row_of_decodes_and_one_of_each_width_of_prompts():
    buckets = Buckets.covering(32, 256, mixed=False)
    needed = [(decode, prefill) for decode, prefill, _ in buckets.shapes() if buckets.serves_one(decode, prefill)]
    assert needed == [(Rectangle(1, 1), None), *((None, Rectangle(1, width)) for width in (256, 128, 64, 32))]
    both = Buckets.covering(1, 16, mixed=True)
    assert all(both.serves_one(decode, prefill) for decode, prefill, _ in both.shapes())


@pytest.mark.parametrize(
    ("prompts", "on_cpu", "on_accelerators"),
    [
        ([20], [(1, 32)], [(1, 32)]),
        ([100], [(1, 128)], [(1, 128)]),
        ([100, 20], [(2, 128)], [(2, 128)]),
        ([20] * 5, [(1, 32)] * 5, [(8, 32)]),
        ([20] * 6, [(8, 32)], [(8, 32)]),
    ],
)
def test_few_short_prompts_take_a_launch_each_as_long_as_that_costs_less(prompts, on_cpu, on_accelerators):
    step = Step([rank_of(0, [row(length) for length in prompts]), rank_of(0, [])])
    for mixed, expected in ((False, on_cpu), (True, on_accelerators)):
        buckets = Buckets.covering(8, 256, mixed=mixed)
        assert [launch.prefill for launch in buckets.launches(step)] == expected


def test_prompts_to_be_scored_come_last_one_a_rank_in_pieces_that_follow_each_other():
    buckets = Buckets.covering(4, 200, mixed=True)
    assert buckets.scored == Rectangle(1, launch_buckets.SCORED_CHUNK)
    long, short = row(150, scored=150, top_scores=1), row(70, scored=69, top_scores=1)
    again = row(90)  # preempted after its prompt was scored
    step = Step([rank_of(1, [long, row(9), short]), rank_of(0, [again])])
    launches = buckets.launches(step)
    assert [launch.scored for launch in launches] == [False, True, True, True, True, True]
    assert launches[0].pieces == [[(1, 0, 9)], [(0, 0, 90)]]
    pieces = [launch.pieces[0][0] for launch in launches[1:]]
    assert pieces == [(0, 0, 64), (0, 64, 64), (0, 128, 22), (2, 0, 64), (2, 64, 6)]
    prefills = step.ranks[0].prefills
    made = [makes_token(prefills[piece.row], piece.first, piece.length) for piece in pieces]
    assert made == [False, False, True, False, True]
    assert all(launch.prefill == buckets.scored and not launch.pieces[1] for launch in launches[1:])


def test_only_the_numbers_of_drafts_that_a_load_can_ask_for_are_compiled():
    speculation = drafting([[1, 4, 2], [5, 8, 1], [9, 99, 0]])
    buckets = Buckets((1, 8, 16), (Rectangle(1, 64),), mixed=True, speculation=speculation)
    assert buckets.proposals == (1, 2)
    assert set(buckets.shapes()) == {
        # One row may be of 1 to 16 that are running; nine rows draft nothing.
        *((Rectangle(rows, 1 + n), None, (n,) if n else ()) for rows in (1, 8) for n in (0, 1, 2)),
        (Rectangle(16, 1), None, ()),
        (None, Rectangle(1, 64), (1, 2)),
        *((Rectangle(16, 1 + n), Rectangle(1, 64), (n,) if n else ()) for n in (0, 1, 2)),
    }


def test_a_measured_number_of_drafts_compiles_all_and_drafts_after_every_prompt():
    shapes = Buckets((16,), (Rectangle(1, 64),), mixed=True, speculation=drafting("auto")).shapes()
    assert [drafts for decode, prefill, drafts in shapes if prefill is None] == [(), (1,), (2,)]
    assert [drafts for decode, prefill, drafts in shapes if prefill is not None] == [(1, 2), (1,), (1,), (2,)]
