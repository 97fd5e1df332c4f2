"""`Router`: on which DP rank a request runs, for the whole of its life."""

from collections import OrderedDict
from collections.abc import Sequence

from dsjax.engine.schedule.rank import Rank
from dsjax.engine.schedule.request import Request

CONTEXT_WEIGHT = 1 / 16
"""Tokens to be computed that one token of running context is worth. In V3 a decode spends 1/4,300 of a token's computation on
reading one token of context; over some 270 decodes that is 1/16."""
REQUEST_WEIGHT = 32
"""Tokens to be computed that one more row in every step is worth."""
MOST_SESSIONS = 65_536
"""Sessions remembered; the one heard of least recently is forgotten first."""


def standing_cost(rank: Rank) -> float:
    """What a rank has to do already, in tokens to be computed: its backlog, its context, and its rows."""
    requests = len(rank.running) + len(rank.waiting)
    context = rank.load - rank.waiting_tokens
    return rank.backlog + context * CONTEXT_WEIGHT + requests * REQUEST_WEIGHT


class Router:
    """Sends each request where it costs least: the prompt's tokens that are not cached there, and `standing_cost`.

    Ranks without a free slot, or without free pages, for it come after those that have room. Ties go to the lowest rank. A
    session stays on its rank, unless that has no room and a queue longer than all its slots, while another has room. What a router
    outside has chosen (`RequestOptions.dp_rank`) holds, except for a rank that the mesh has not.
    """

    def __init__(self, ranks: Sequence[Rank]):
        self._ranks = ranks
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def choose(self, request: Request) -> int:
        """Choose the rank for a new request, and remember it for the session's next one."""
        options = request.options
        if options.dp_rank is not None and 0 <= options.dp_rank < len(self._ranks):
            return options.dp_rank
        if options.session is None:
            return self._cheapest(request)
        pinned = self._sessions.pop(options.session, None)
        if pinned is None or self._hopeless(pinned):
            pinned = self._cheapest(request)
        self._sessions[options.session] = pinned
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return pinned

    def _cheapest(self, request: Request) -> int:
        if len(self._ranks) == 1:
            return 0
        return min(range(len(self._ranks)), key=lambda index: _cost(self._ranks[index], request))

    def _hopeless(self, index: int) -> bool:
        rank = self._ranks[index]
        return len(rank.waiting) > rank.max_num_seqs and any(_has_slot(other) for other in self._ranks)


def _cost(rank: Rank, request: Request) -> tuple[bool, float]:
    """Whether a rank is full for a request, and what the request costs there."""
    uncached = rank.uncached(request)
    free_tokens = rank.pool.num_free * rank.pool.page_size
    full = not _has_slot(rank) or free_tokens < rank.backlog + uncached
    return full, uncached + standing_cost(rank)


def _has_slot(rank: Rank) -> bool:
    return len(rank.running) + len(rank.waiting) < rank.max_num_seqs
