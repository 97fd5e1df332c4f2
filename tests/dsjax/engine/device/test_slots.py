"""What a launch's positions enter in the slots' state: accepted drafts, where each slot stands, its last token."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dsjax.engine.device import slots
from dsjax.engine.device.buckets import Buckets, Rectangle, sampling_room
from dsjax.engine.device.device_state import DRAFTS, NUM_DRAFTS, START, DeviceState
from dsjax.engine.device.slots import NOT_COMPUTED, REJECTED, LaunchShape, Positions, StepRows
from dsjax.model.rows import GroupShape
from sharding import MeshSpec

SLOTS = 6


def state_of(num_drafts: int) -> DeviceState:
    """Slots that stand at 10, 11, …; their last tokens are 50, 51, …; each has all its drafts."""
    columns = np.zeros((1, SLOTS, DRAFTS + num_drafts), np.int32)
    columns[0, :, START : NUM_DRAFTS + 1] = [(10 + slot, 50 + slot, num_drafts) for slot in range(SLOTS)]
    return DeviceState({}, tables=None, slots=columns, filled=None, counts=None, copies=None, loads=None)


def progress(state: DeviceState) -> list[list[int]]:
    """Each slot's tokens in the cache, last token and number of drafts."""
    return state.slots[0, :, START : NUM_DRAFTS + 1].T.tolist()


def committed(state: DeviceState, rows: StepRows, shape: LaunchShape, tokens: list[int]):
    """The state and the outcome of rank 1, which alone has these rows."""
    spec = MeshSpec.parse("dp=2")
    step = SimpleNamespace(spec=spec, mesh=spec.build())
    padded = np.pad(np.array([tokens], np.int32), ((0, 0), (0, shape.positions - len(tokens))))

    @jax.jit
    def run(state, rows, tokens):
        return slots.commit(step, state, Positions.unpack(Positions.of(rows, shape).pack()), tokens)

    on_both = lambda array: np.concatenate([np.zeros_like(array), array])  # noqa: E731
    found = run(*jax.tree.map(on_both, (state, rows, padded)))
    return jax.tree.map(lambda array: np.asarray(array)[1:], found)


def rows_of(decodes: list[tuple[int, int, int, list[int]]], prefills: list[tuple[int, int, int, int]]) -> StepRows:
    """Decode rows (slot, start, length, tokens) and prefill rows (slot, start, length, following) of one rank."""
    columns = [np.array(column, np.int32)[None] for column in zip(*decodes, strict=True)] if decodes else []
    slot, start, length, tokens = columns or (*np.zeros((3, 1, 0), np.int32), np.zeros((1, 0, 1), np.int32))
    p_slot, p_start, p_length, following = np.array(prefills, np.int32).reshape(-1, 4).T[:, None]
    return StepRows(slot, start, length, start, tokens, p_slot, p_start, p_length, p_start, following)


def test_a_row_makes_tokens_as_far_as_its_drafts_are_what_was_drawn():
    rows = rows_of(
        [
            (4, 14, 3, [54, 7, 8]),  # both drafts accepted
            (0, 10, 3, [50, 7, 8]),  # the second rejected
            (2, 12, 3, [52, 7, 8]),  # the first rejected; that the second agrees says nothing
            (3, 13, 2, [53, 7, 8]),  # of one draft, which is accepted; what lies behind it is not computed
            (1, 11, 0, [51, 7, 8]),  # ended before
            (-1, 0, 0, [50, 0, 0]),
        ],
        [(5, 3, 4, -1)],
    )
    shape = LaunchShape(GroupShape(6, 3, 1, "CC"), GroupShape(1, 4, 1, "CC"), 4, 20)
    drawn = [7, 8, 9, 7, 1, 2, 1, 8, 2, 7, 6, 6, 7, 8, 9, 0, 0, 0, 33]
    state, outcome = committed(state_of(2), rows, shape, drawn)
    R, N = REJECTED, NOT_COMPUTED
    assert outcome[0].tolist() == [7, 8, 9, 7, 1, R, 1, R, R, 7, 6, N, N, N, N, N, N, N, 33, N]
    assert progress(state) == [[12, 11, 13, 15, 17, 7], [1, 51, 1, 6, 9, 33], [0, 2, 0, 0, 0, 0]]


def test_a_row_that_is_not_finite_ends_there_and_accepts_no_draft():
    shape = LaunchShape(GroupShape(2, 3, 1, "CC"), None, 4)
    rows = rows_of([(0, 10, 3, [50, 7, 8]), (1, 11, 3, [51, 7, 8])], [])
    _, outcome = committed(state_of(2), rows, shape, [7, -1, 8, -1, 8, 8])
    assert outcome[0].tolist() == [7, -1, REJECTED, -1, REJECTED, REJECTED]


def test_a_piece_of_a_prompt_leaves_the_token_behind_it_and_its_last_piece_the_one_made():
    shape = LaunchShape(None, GroupShape(3, 8, 1, "CC"), 4, 4)
    rows = rows_of([], [(2, 16, 8, 71), (0, 24, 3, -1), (-1, 0, 0, 0)])
    state, outcome = committed(state_of(0), rows, shape, [5, 6, 9])
    assert outcome[0].tolist() == [5, 6, 9, 0]
    assert progress(state)[:2] == [[27, 11, 24, 13, 14, 15], [6, 51, 71, 53, 54, 55]]


def test_the_rows_of_a_launch_can_be_had_from_its_input_and_its_positions():
    shape = LaunchShape(GroupShape(2, 3, 1, "CC"), GroupShape(2, 4, 1, "CC"), 4, 12)
    rows = rows_of([(4, 14, 3, [54, 7, 8]), (0, 10, 1, [50, 7, 8])], [(2, 8, 4, 71), (1, 0, 2, -1)])
    rows = dataclasses.replace(rows, limit=np.array([[20, 30]]), prefill_limit=np.array([[40, 50]]))
    prefill = [rows.prefill_slot, rows.prefill_start, rows.prefill_length, rows.prefill_limit, rows.next_token]
    packed = np.concatenate([rows.slot, rows.limit, [[2, 2]], *prefill, np.arange(8)[None], [[-1] * 12]], axis=1)
    again = StepRows.of(packed, Positions.of(rows, shape), shape)
    jax.tree.map(np.testing.assert_array_equal, again, rows)
    assert shape.first_positions.tolist() == [0, 3, 6, 7]


@pytest.mark.parametrize(("rows", "drafts"), [(1, 0), (4, 0), (8, 2), (32, 1), (256, 0)])
def test_prompts_have_room_for_as_many_positions_as_some_decodes_have(rows, drafts):
    buckets = Buckets.covering(rows, 256, mixed=False)
    decodes = {count * (1 + drafts) for count in buckets.decode}
    rooms = {sampling_room(None, one, rows, drafts) for one in (*buckets.prefill, *buckets.single, buckets.scored)}
    assert rooms <= decodes
    mixed = {sampling_room(Rectangle(rows, 1 + drafts), one, rows, drafts) for one in buckets.prefill}
    assert len(mixed) == 1
