"""`Router`: on which DP rank a request runs, for the whole of its life. `InstanceRouter`: the same over the ranks of several engines."""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from dsjax.engine.schedule.rank import Rank
from dsjax.engine.schedule.request import Request, Status

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


class Coming:
    """Requests that were sent to a rank and that its engine has not taken yet. They count as if they were in its queue.

    Attributes:
        count: of them. tokens: that they are to compute. names: of the pages that they are to compute; for each, by how many.
    """

    def __init__(self):
        self._requests: deque[tuple[Request, int, list[bytes]]] = deque()
        self.count = self.tokens = 0
        self.names: Counter[bytes] = Counter()

    def add(self, request: Request, tokens: int, names: Sequence[bytes]) -> None:
        """Count one more."""
        self._requests.append((request, tokens, list(names)))
        self.count += 1
        self.tokens += tokens
        self.names.update(names)

    def settle(self) -> None:
        """Count those no longer that the engine has taken: it takes them in their order."""
        while self._requests and (self._requests[0][0].rank >= 0 or self._requests[0][0].status is Status.FINISHED):
            _, tokens, names = self._requests.popleft()
            self.count -= 1
            self.tokens -= tokens
            for name in names:
                if self.names[name] == 1:
                    del self.names[name]
                else:
                    self.names[name] -= 1


_NOTHING = Coming()


class Router:
    """Sends each request where it costs least: the prompt's tokens that are not cached there, and `standing_cost`.

    Ranks without a free slot, or without free pages, for it come after those that have room. Ties go to the lowest rank. A
    session stays on its rank, unless that has no room and a queue longer than all its slots, while another has room. What a router
    outside has chosen (`Request.dp_rank`) holds, except for a rank that the mesh has not.

    first_rank: as of `Scheduler`.
    """

    def __init__(self, ranks: Sequence[Rank], first_rank: int = 0):
        self._ranks, self._first = ranks, first_rank
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def choose(self, request: Request) -> int:
        """The place of the rank for a new request. Remembers it for the session's next one."""
        if request.dp_rank is not None and 0 <= request.dp_rank - self._first < len(self._ranks):
            return request.dp_rank - self._first
        if request.session is None:
            return self._cheapest(request)
        pinned = self._sessions.pop(request.session, None)
        if pinned is None or self._hopeless(pinned):
            pinned = self._cheapest(request)
        self._sessions[request.session] = pinned
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return pinned

    def _cheapest(self, request: Request) -> int:
        if len(self._ranks) == 1:
            return 0
        return min(range(len(self._ranks)), key=lambda index: self._cost(index, request))

    def _cost(self, index: int, request: Request) -> tuple[bool, float]:
        return _cost(self._ranks[index], request)

    def _hopeless(self, index: int) -> bool:
        rank = self._ranks[index]
        return len(rank.waiting) > rank.max_num_seqs and any(_has_slot(other) for other in self._ranks)


class InstanceRouter(Router):
    """Sends each request to one of all DP ranks of several engines, as `Router` would if they were one engine's.

    Each engine has a thread, which takes what is sent to it between two steps. Until then it counts here (`Coming`), lest all that comes
    during a step goes to one rank. Of a rank only numbers and names are looked up, which its thread may change meanwhile: a
    choice then rests on what was true a moment ago. Belongs to the thread that requests come from.

    engines: the ranks of each, which stay the same.
    """

    def __init__(self, engines: Sequence[Sequence[Rank]]):
        super().__init__([rank for ranks in engines for rank in ranks])
        self._engine_of = [engine for engine, ranks in enumerate(engines) for _ in ranks]
        self._coming = [Coming() for _ in self._ranks]

    def place(self, request: Request) -> int:
        """The engine for a new request; its rank is noted in the request (`Request.dp_rank`)."""
        for coming in self._coming:
            coming.settle()
        index = self.choose(request)
        rank, coming = self._ranks[index], self._coming[index]
        coming.add(request, rank.uncached(request, coming.names), rank.readable(request))
        request.dp_rank = index
        return self._engine_of[index]

    def _cost(self, index: int, request: Request) -> tuple[bool, float]:
        return _cost(self._ranks[index], request, self._coming[index])

    def _hopeless(self, index: int) -> bool:
        rank = self._ranks[index]
        if len(rank.waiting) + self._coming[index].count <= rank.max_num_seqs:
            return False
        return any(_has_slot(other, coming) for other, coming in zip(self._ranks, self._coming, strict=True))


def _cost(rank: Rank, request: Request, coming: Coming = _NOTHING) -> tuple[bool, float]:
    """Whether a rank is full for a request, and what the request costs there. coming: what is on its way there."""
    uncached = rank.uncached(request, coming.names)
    free_tokens = rank.pool.num_free * rank.pool.page_size
    full = not _has_slot(rank, coming) or free_tokens < rank.backlog + coming.tokens + uncached
    return full, uncached + standing_cost(rank) + coming.tokens + coming.count * REQUEST_WEIGHT


def _has_slot(rank: Rank, coming: Coming = _NOTHING) -> bool:
    return len(rank.running) + len(rank.waiting) + coming.count < rank.max_num_seqs
