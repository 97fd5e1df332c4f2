"""What a launch sends to the devices (integers of rows and of pages that they gained, admissions), and which rules run there."""

import numpy as np
import pytest
from written_steps import MOST, PAGE, Told, decode, running

from dsjax.engine.contract import commands
from dsjax.engine.contract.commands import ALWAYS, Admission, PrefillRow, RankStep, Sampling, Step, int32s
from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.device.buckets import Launch, Rectangle, RowPiece
from dsjax.engine.device.launch_rows import SlotRules, SlotTable, pack_admissions, pack_launch, split_page_changes
from dsjax.engine.device.sampler import bias_width
from dsjax.engine.device.slots import ADMISSION_WIDTH, ADMISSIONS, COUNTED, PAGE_CHANGES, LaunchShape
from dsjax.engine.schedule.request import ScheduledRow
from dsjax.engine.schedule.step_writer import StepWriter
from dsjax.engine.text.logit_rules import LogitRules
from dsjax.model.rows import GroupShape

V = 70  # no multiple of 32


def columns(packed, widths):
    return [part.tolist() for part in np.split(packed, np.cumsum(widths)[:-1])]


def admitted(slots, admissions, decodes, *prefills):
    """A step with these admissions and rows, and a table of so many slots that it was entered in."""
    table, step = SlotTable(1, slots, V), Step([RankStep(admissions, [], int32s(decodes), list(prefills), [])])
    table.admit(step)
    return table, step


def test_a_launch_s_integers_are_its_rows_and_the_pages_that_they_gained():
    told, a, b = Told(2), running(2, [7, 3]), running(0, [4])
    told.step([a], [b])
    a.pages.append(9)
    plan = decode([a], [b])
    prompt = running(1, [5, 6, 8])
    plan.ranks[1].prefills.append(ScheduledRow(prompt, 0, 7, False))
    step = told.writer.write(plan)
    shape = LaunchShape(GroupShape(2, 1, MOST, "A_CC"), GroupShape(1, 4, MOST, "CC"), PAGE)
    within, before = split_page_changes(step, shape.page_changes, 100)
    assert within == [[(2, 2, 9)], []]
    assert before == [[], [(1, 0, 5), (1, 1, 6), (1, 2, 8)]]  # a slot's new owner has its table before the launch
    launch = Launch(Rectangle(2, 1), Rectangle(1, 4), [[], [RowPiece(0, 4, 3)]])
    first, second = pack_launch(step, launch, shape, within, [{}, {}])
    assert first.size == second.size == shape.packed_width
    widths = (2, 2, 2, 1, 1, 1, 1, 1, 4, 3 * shape.page_changes)
    nothing = [-1] * (3 * shape.page_changes - 3)
    assert columns(first, widths) == [[2, -1], [12, 0], [0, 0], [-1], [0], [0], [0], [0], [0] * 4, [2, 2, 9, *nothing]]
    piece = [[1], [4], [3], [12], [7], [4, 5, 6, 0]]
    assert columns(second, widths) == [[0, -1], [4, 0], [0, 0], *piece, [-1, -1, -1, *nothing]]


def test_admissions_take_as_many_runs_as_they_need_and_page_changes_come_with_the_last_of_them_or_later():
    slots = ADMISSIONS + 1
    requests = [running(slot, list(range(1, 41)), temperature=0.5) for slot in range(slots)]
    step = StepWriter(2, PAGE).write(decode(requests, []))
    _, before = split_page_changes(step, 3, 100)
    runs = list(pack_admissions(step, before))
    # An admission voids its slot's pages, so none may be entered before it.
    assert len(runs) == 1 + -(-slots * 40 // PAGE_CHANGES)
    given, changed = [], []
    for run in runs:
        admissions, pages, counts = np.split(run[0], np.cumsum([ADMISSIONS * ADMISSION_WIDTH, 3 * PAGE_CHANGES]))
        given += [row[0] for row in admissions.reshape(-1, ADMISSION_WIDTH) if row[0] >= 0]
        changed += [tuple(row) for row in pages.reshape(-1, 3).tolist() if row[0] >= 0]
        assert {slot for slot, _, _ in changed} <= set(given), "no slot has pages before its admission"
        assert len(counts) == 3 * COUNTED
        assert (counts == -1).all()
        assert (run[1] == -1).all()
    assert given == list(range(slots))
    assert changed == [(slot, index, index + 1) for slot in range(slots) for index in range(40)]
    step = StepWriter(1, PAGE).write(decode([]))
    assert list(pack_admissions(step, split_page_changes(step, 3, 100)[0])) == []


def test_rules_are_active_only_while_they_change_something():
    """A greedy row of which only its end is held back leaves the sampler when it has made its least number of tokens."""
    rules = LogitRules(SamplingParams(min_tokens=2, max_tokens=9), V, frozenset({3}))
    biases = rules.biases().astype("<i4").tobytes()
    waiting = Admission(0, 0, 1, Sampling(1, 0), biases=biases)
    assert SlotRules.of(waiting).greedy_after == 2
    table, step = admitted(2, [waiting], (0, 9))
    wants = lambda: bool(table._needs_rules[0, 0])  # noqa: E731
    for tokens, still in (((5,), True), ((6,), False)):
        assert wants()
        table.commit(step, [RankResults([RowResult(tokens)], [])])
        assert wants() == still


@pytest.mark.parametrize(
    ("sampling", "more", "draws", "scored"),
    [
        ({}, {}, False, False),
        ({"temperature": 0.5, "logprobs": 2}, {}, True, True),
        ({"logprobs": 0}, {}, False, True),
        ({"presence_penalty": 0.5}, {}, True, False),
        ({}, {"allowed": int32s([7, 0, 0])}, True, False),
        ({}, {"guided": True}, False, False),  # a step without its guide
        ({}, {"biases": int32s([3, 0, ALWAYS])}, True, False),
    ],
)
def test_nothing_runs_for_a_row_that_the_step_s_greedy_token_serves_and_no_draw_for_one_to_be_scored(
    sampling, more, draws, scored
):
    admission = Admission(1, 0, 1, Sampling(1, 0, **sampling), **more)
    assert SlotRules.of(admission).greedy_after == (ALWAYS if sampling or more else 0)
    table, step = admitted(2, [admission], (1, 9))
    shape = LaunchShape(GroupShape(1, 1, MOST, "A_CC"), None, PAGE)
    rules = table.rules_of(step, Launch(Rectangle(1, 1), None, [[]]), shape)
    assert (rules.ops is not None, rules.scored) == (draws, scored)
    assert list(rules.slots) == ([(0, False, 0)] if sampling or more else [])


def test_biases_and_masks_are_of_every_position_of_their_row():
    rules = {"biases": int32s([3, 0, ALWAYS]), "allowed": int32s([7, 0, 0])}
    prompt = PrefillRow(2, 0, int32s([1, 2]), commands.TOKEN_MADE, 9)
    admissions = [Admission(slot, 0, 1, Sampling(1, 0), **rules) for slot in (1, 2)]
    table, step = admitted(4, admissions, (0, 9, 1, 9), prompt)
    shape = LaunchShape(GroupShape(2, 3, MOST, "A_CC"), GroupShape(1, 4, MOST, "CC"), PAGE, 9)
    launch = Launch(Rectangle(2, 3), Rectangle(1, 4), [[RowPiece(0, 0, 2)]])
    found = table.rules_of(step, launch, shape)
    (piece,) = found.biases
    assert piece.shape == (1, bias_width(9), 4)
    assert [entry for entry in piece[0].tolist() if entry[0] >= 0] == [[at, 3, 0, ALWAYS] for at in (3, 4, 5, 6)]
    masked = [[7, 0, 0] if 3 <= at <= 6 else [-1] * 3 for at in range(9)]
    assert found.masks[0].tolist() == masked


def test_tables_count_window_pages_from_0():
    changes = [commands.PageChange(3, 0, [7, 8]), commands.PageChange(3, 50, [102])]
    step = Step([RankStep([], changes, b"", [], [])])
    within, before = split_page_changes(step, 8, 100)
    assert (within, before) == ([[(3, 0, 7), (3, 1, 8), (3, 50, 2)]], [[]])
