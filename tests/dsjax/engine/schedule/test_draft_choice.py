"""The engine finds the fastest number of drafts, on machines whose step times a test gives. `schedule/draft_choice.py`."""

import itertools
import random
from types import SimpleNamespace

import pytest

from dsjax.engine.contract.executor import RowResult
from dsjax.engine.schedule.draft_choice import BETWEEN, DraftChoice
from dsjax.engine.schedule.request import RankPlan, ScheduledRow, StepPlan
from dsjax.engine.schedule.scheduler import Update

MOST = 3


class Machine:
    """Steps of decodes, one planned ahead. seconds: of a step, by drafts and rows. accepts: the chance of each further draft."""

    def __init__(self, seconds, accepts: float, noise: float = 0.05):
        self.seconds, self.accepts, self.noise = seconds, accepts, noise
        self.choice, self.rng = DraftChoice(MOST), random.Random(1)
        self.scheduler = SimpleNamespace(ranks=[SimpleNamespace(running=[])])
        self.choice.scheduled(self.scheduler)
        self.chosen: list[int] = []
        self.time = self.tokens = 0.0

    def run(self, steps: int, rows: int = 1, *, prompts: int = 0, batches: int = 1) -> "Machine":
        """prompts: every how many steps has one; 0: none. batches: that take turns, as with stages."""
        ahead, proposed, running = [], 0, rows
        self.scheduler.ranks[0].running = [None] * running
        for step in range(steps):
            while len(ahead) < 2:
                ahead.append(self.scheduler.choose_drafts())
            rows = (running + step % batches) // batches
            drafts = ahead.pop(0)
            self.chosen.append(drafts)
            seconds = self.seconds(drafts, rows) * self.rng.uniform(1, 1 + self.noise)
            updates = []
            for _ in range(rows):
                verified, accepted = min(drafts, proposed), 0
                while accepted < verified and self.rng.random() < self.accepts:
                    accepted += 1
                updates.append(Update(None, RowResult([7] * (1 + accepted), num_drafts=verified), None))
                self.tokens += 1 + accepted
            row, has_prompt = ScheduledRow(None, 0, 1), prompts and step % prompts == 0
            plan = StepPlan([RankPlan([row] * rows, [row] * has_prompt, [])], drafts)
            self.choice.after_step(seconds, plan, updates)
            self.time, proposed = self.time + seconds, drafts
        return self

    def mostly(self, drafts: int) -> bool:
        """Whether more than half of the last steps had so many drafts."""
        return self.chosen[-BETWEEN:].count(drafts) > BETWEEN / 2

    @property
    def seconds_a_token(self) -> float:
        return self.time / self.tokens

    def fixed(self, drafts: int, rows: int = 1) -> float:
        """Seconds a token with always so many drafts, by arithmetic."""
        made = sum(self.accepts**place for place in range(drafts + 1))
        return self.seconds(drafts, rows) * (1 + self.noise / 2) / (rows * made)


MACHINES = {
    "drafts cost little": (lambda drafts, rows: 1 + 0.05 * drafts, 0.8, MOST),
    "drafts cost a step": (lambda drafts, rows: 1 + 0.9 * drafts, 0.6, 0),
    "drafts cost two steps": (lambda drafts, rows: 1 + 2 * drafts, 0.0, 0),
    "three in ten are accepted": (lambda drafts, rows: 1 + drafts, 0.3, 0),
    "half are accepted": (lambda drafts, rows: 1 + 0.6 * drafts, 0.5, 0),
    "one is enough": (lambda drafts, rows: (1, 1.1, 1.6, 2.1)[drafts], 0.7, 1),
    "none is accepted": (lambda drafts, rows: 1 + 0.02 * drafts, 0.0, 0),
}


@pytest.mark.parametrize(("seconds", "accepts", "best"), MACHINES.values(), ids=MACHINES)
def test_the_fastest_number_is_found_and_what_that_costs_stays_within_3_percent(seconds, accepts, best):
    machine = Machine(seconds, accepts).run(3000)
    assert machine.mostly(best)
    assert machine.seconds_a_token < 1.03 * machine.fixed(best)


def test_it_follows_what_changes():
    machine = Machine(lambda drafts, rows: 1 + 0.3 * drafts, 0.1).run(1500)
    assert machine.mostly(0)
    machine.accepts = 0.95
    assert machine.run(4000).mostly(MOST)


def test_loads_are_kept_apart_and_a_new_one_begins_with_what_is_best_nearby():
    machine = Machine(lambda drafts, rows: 1 + 0.05 * drafts * rows, 0.8)
    machine.run(300, rows=1)
    assert machine.choice.choose() == MOST
    begun = len(machine.chosen)
    machine.run(3000, rows=64)
    assert machine.chosen[begun] == MOST
    assert machine.mostly(0)
    machine.scheduler.ranks[0].running = [None]
    assert machine.choice.choose() == MOST


def test_a_load_that_comes_and_goes_is_measured_too():
    machine = Machine(lambda drafts, rows: 1 + 0.9 * drafts, 0.6)
    for rows in [1, 2, 4, 8] + [15, 16] * 20:
        machine.run(20, rows)
    assert machine.mostly(0)


@pytest.mark.parametrize(("rows", "prompts", "batches"), [(7, 0, 2), (31, 0, 2), (4, 2, 1)])
def test_batches_of_unequal_size_and_prompts_in_every_second_step_do_not_hide_what_drafts_cost(rows, prompts, batches):
    machine = Machine(lambda drafts, rows: 1 + 0.9 * drafts, 0.6)
    machine.choice.start(None, SimpleNamespace(num_batches=batches))
    assert machine.run(1000, rows, prompts=prompts, batches=batches).mostly(0)


def test_steps_with_prompts_measure_nothing_and_another_mesh_begins_anew():
    machine = Machine(lambda drafts, rows: 1 + 0.9 * drafts, 0.6).run(500)
    assert machine.choice.choose() == 0
    machine.seconds = lambda drafts, rows: 1 + (0 if drafts else 100)
    machine.run(500, prompts=1)
    assert machine.choice.choose() == 0
    machine.choice.start(None, SimpleNamespace(num_batches=2))
    assert machine.choice.choose() == MOST


def test_what_steps_took_long_ago_does_not_count():
    machine = Machine(lambda drafts, rows: 1 + 0.05 * drafts, 0.8).run(1000)
    machine.seconds = lambda drafts, rows: 1 + 9 * drafts
    assert machine.run(20).chosen[-4:] == [0] * 4


def test_trials_have_a_pause_between_them_and_take_turns():
    machine = Machine(lambda drafts, rows: (1, 1.1, 1.6, 2.1)[drafts], 0.7, noise=0).run(5000)
    begins = [step for step in range(100, 5000) if machine.chosen[step] != 1 == machine.chosen[step - 1]]
    assert min(after - before for before, after in itertools.pairwise(begins)) >= BETWEEN
    assert {machine.chosen[step] for step in begins} == {0, MOST}


def test_a_step_behind_one_with_another_number_measures_nothing():
    machine = Machine(lambda drafts, rows: 1 + (0.05 if rows < 16 else 3) * drafts, 0.8)
    machine.run(300, rows=1).run(300, rows=16)
    machine.seconds = lambda drafts, rows: 1 + 9 * drafts
    for _ in range(20):  # with most drafts and with none by turns
        machine.run(1, rows=1).run(1, rows=16)
    machine.scheduler.ranks[0].running = [None]
    assert machine.choice.choose() == MOST
