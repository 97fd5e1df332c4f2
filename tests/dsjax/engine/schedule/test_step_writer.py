"""After any history, a step's commands give the executor the requests' page tables, once. Also tests `schedule/request.py`."""

from hypothesis import given
from hypothesis import strategies as st
from written_steps import MOST, PAGE, SLOTS, Told, running

from dsjax.engine.contract.commands import TOKEN_MADE, from_int32s
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import RankPlan, Request, ScheduledRow, StepPlan
from dsjax.engine.schedule.step_writer import StepWriter
from dsjax.engine.text.logit_rules import LogitRules


def test_after_the_executor_has_forgotten_all_is_told_again():
    told, request = Told(), running(1, [1, 2])
    told.step([request])
    told.writer.reset()
    told.tables[:] = 0
    (rank,) = told.step([request]).ranks
    assert len(rank.admissions) == 1
    assert told.of(request) == [1, 2]


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.sampled_from(["come", "grow", "return", "look"])), max_size=40))
def test_after_any_history_a_table_is_the_request_s_pages_each_told_once(history):
    told, at, next_page, gained = Told(), {}, 1, 0
    for slot, event in history:
        request = at.get(slot)
        if event == "come" or request is None:
            at[slot] = request = running(slot, [next_page])
        elif event == "grow" and len(request.pages) < MOST:
            request.pages.append(next_page)
        elif event == "return":
            request.pages, request.admissions = [next_page, next_page + 100], request.admissions + 1
        next_page += 1
        if event != "grow":  # pages may be gained twice between two looks
            before = told.changes
            told.step([request])
            assert told.of(request) == request.pages
            gained = told.changes - before
            assert gained <= len(request.pages)
            told.step([request])
            assert told.changes == before + gained


def test_an_admission_says_how_tokens_are_drawn_and_what_changes_them():
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, presence_penalty=1.5, logprobs=2)
    plain = Request("", [5, 6, 5, 8], 3, params, 9, 77)
    plain.slot, plain.admissions, plain.pages = 2, 1, [4]
    plain.rules = LogitRules(params, 40)
    (rank,) = StepWriter(1, PAGE).write(StepPlan([RankPlan([ScheduledRow(plain, 3, 1)], [], [])])).ranks
    (found,) = rank.admissions
    sampling = found.sampling
    assert (found.slot, found.start, found.token, found.guided, found.allowed) == (2, 3, 8, False, b"")
    assert (sampling.num_prompt_tokens, sampling.seed, sampling.logprobs) == (3, 77, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert sampling.penalises
    assert list(from_int32s(found.counts)) == [5, 1, 6, 1, 8, 2]
    assert rank.guides == []


def test_a_prefill_row_names_the_token_behind_it_or_that_it_is_made():
    request = running(0, [1, 2, 3, 4, 5, 6, 7, 8], prompt_logprobs=2)
    first, last = ScheduledRow(request, 8, 16, False), ScheduledRow(request, 24, 6)
    (rank,) = StepWriter(1, PAGE).write(StepPlan([RankPlan([], [first, last], [])])).ranks
    assert [list(from_int32s(row.tokens)) for row in rank.prefills] == [list(range(8, 24)), list(range(24, 30))]
    assert [row.next_token for row in rank.prefills] == [24, TOKEN_MADE]
    assert [row.scored for row in rank.prefills] == [16, 5]  # the last position predicts no token of the prompt
    assert {(row.limit, row.top_scores) for row in rank.prefills} == {(30, 2)}
