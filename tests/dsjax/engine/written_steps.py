"""Steps as the step writer writes them, and an executor's page tables as those steps make them."""

import numpy as np

from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import RankPlan, Request, ScheduledRow, StepPlan
from dsjax.engine.schedule.step_writer import StepWriter

SLOTS, MOST, PAGE = 3, 9, 4


def running(slot: int, pages: list[int], admissions: int = 1, length: int = 30, **params) -> Request:
    request = Request(f"in {slot}", list(range(length)), length, SamplingParams(**params), 1, 0)
    request.slot, request.pages, request.admissions = slot, pages, admissions
    return request


def decode(*ranks) -> StepPlan:
    return StepPlan([RankPlan([ScheduledRow(one, 29, 1) for one in own], [], []) for own in ranks])


class Told:
    def __init__(self, ranks: int = 1):
        self.writer = StepWriter(ranks, PAGE)
        self.tables = np.zeros((ranks, SLOTS, MOST), int)
        self.changes = 0

    def step(self, *ranks):
        step = self.writer.write(decode(*ranks))
        for table, rank in zip(self.tables, step.ranks, strict=True):
            for change in rank.pages:
                table[change.slot, change.first : change.first + len(change.pages)] = change.pages
                self.changes += len(change.pages)
        return step

    def of(self, request: Request, rank: int = 0) -> list[int]:
        """The table of a request's slot, as far as its pages go."""
        return self.tables[rank, request.slot][: len(request.pages)].tolist()
