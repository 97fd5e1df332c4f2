"""Page tables of running requests, kept on the host from step to step and changed only where pages were added."""

import numpy as np

from dsjax.engine.request import Request


class PageTables:
    """One row of page numbers per DP rank and slot; 0, the page that nobody owns, fills the rest."""

    def __init__(self, num_ranks: int, num_slots: int, max_pages: int):
        self.max_pages = max_pages
        self._table = np.zeros((num_ranks, num_slots, max_pages), np.int32)
        # Whose pages a slot holds, and how many of them are entered.
        self._owner: list[list[tuple[Request | None, int]]] = [[(None, 0)] * num_slots for _ in range(num_ranks)]
        self._entered = [[0] * num_slots for _ in range(num_ranks)]

    def rows(self, rank: int, requests: list[Request]) -> np.ndarray:
        """Tables ``[len(requests), max_pages]`` of requests that run on ``rank``, brought up to date."""
        owners, entered = self._owner[rank], self._entered[rank]
        slots = []
        for request in requests:
            slot, pages = request.slot, request.pages
            slots.append(slot)
            owner, admission = owners[slot]
            if owner is not request or admission != request.admissions:
                owners[slot] = (request, request.admissions)
                self._table[rank, slot] = 0
                entered[slot] = 0
            known = entered[slot]
            if known < len(pages):
                self._table[rank, slot, known : len(pages)] = pages[known:]
                entered[slot] = len(pages)
        return self._table[rank, slots]
