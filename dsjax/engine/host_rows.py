"""A row group being filled on the host, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsjax.engine.plan import ScheduledRow
from dsjax.engine.tables import PageTables
from dsjax.model.rows import GroupShape, RowGroup


class HostRows:
    """``tokens [B, R, C]``, ``start`` and ``length [B, R]``, ``tables [B, R, Pr]``: what ``RowGroup`` reads on the device."""

    def __init__(self, ranks: int, shape: GroupShape):
        """All padding: length 0, page 0."""
        rows = (ranks, shape.rows)
        self.tokens = np.zeros((*rows, shape.chunk), np.int32)
        self.start, self.length = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self.tables = np.zeros((*rows, shape.pages), np.int32)

    def fill(self, rows: Sequence[Sequence[ScheduledRow]], tables: PageTables) -> None:
        """Enter each rank's rows."""
        for rank, own in enumerate(rows):
            if not own:
                continue
            count = len(own)
            self.start[rank, :count] = [row.start for row in own]
            self.length[rank, :count] = [row.length for row in own]
            self.tables[rank, :count] = tables.rows(rank, [row.request for row in own])
            if self.tokens.shape[-1] == 1:
                self.tokens[rank, :count, 0] = [row.request.token_ids[row.start] for row in own]
                continue
            for i, (request, start, length) in enumerate(own):
                self.tokens[rank, i, :length] = request.token_ids[start : start + length]

    def pack(self) -> np.ndarray:
        """The integers of all fields, ``[B, W]``."""
        return RowGroup.pack(self.tokens, self.start, self.length, self.tables)
