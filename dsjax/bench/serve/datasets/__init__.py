"""Workloads. Each gives `requests(draw)`: the same lengths for every `draw`, but other prompts where it makes them up.

Draw 0 is the warm-up's, 1 the first point's of a sweep, and so on: no point finds the one before in the server's prefix
cache.
"""

from typing import Protocol

from dsjax.bench.serve.records import BenchRequest
from dsjax.errors import UserError


class DatasetError(UserError):
    """A workload that cannot be made: a length, or a file."""


class Dataset(Protocol):
    """A workload."""

    def requests(self, count: int, draw: int) -> list[BenchRequest]:
        """The first `count` requests; fewer where a file has fewer."""
        ...
