"""A runner without JAX, whose latent cache is real: it reads the context back from the pages that it was told to use."""

import time

from dsjax.engine.plan import RowResult, RunnerLimits, StepPlan
from dsjax.engine.request import Request


def next_token(context: list[int], seed: int, vocab_size: int) -> int:
    """The fake model: a token that depends on every token before it, and on the seed."""
    value = seed + 0x9E3779B9
    for token in context:
        value = (value * 6364136223846793005 + token + 1442695040888963407) % 2**64
    return (value >> 33) % vocab_size


class FakeRunner:
    """Writes each token to its slot of its page and makes the next one from what the pages then hold.

    A page that two requests use, a page that is lost, or a chunk that is skipped therefore changes the output. It also checks
    what any runner relies on: slots, row groups, chunk lengths.
    """

    def __init__(
        self,
        *,
        num_ranks: int = 1,
        max_rows_decode: int = 8,
        max_rows_prefill: int = 4,
        max_chunk: int = 8,
        page_size: int = 4,
        pages_per_rank: int = 65,
        max_model_len: int = 128,
        vocab_size: int = 300,
        model=next_token,
        step_seconds: float = 0.0,
    ):
        self.limits = RunnerLimits(
            max_rows_decode,
            max_rows_prefill,
            max_chunk,
            page_size,
            pages_per_rank,
            num_ranks,
            max_model_len,
            vocab_size,
        )
        self.model = model
        self.step_seconds = step_seconds
        self.plans: list[StepPlan] = []
        self.keep_plans = False
        self.steps = 0
        self.fail_at_step: int | None = None
        self.non_finite: set[str] = set()
        self.warm = False
        self.closed = False
        self._cache = [[[None] * page_size for _ in range(pages_per_rank)] for _ in range(num_ranks)]

    def execute(self, plan: StepPlan) -> dict[str, RowResult]:
        assert len(plan.ranks) == self.limits.num_ranks, "every rank takes part in every step"
        if self.fail_at_step is not None and self.steps >= self.fail_at_step:
            raise RuntimeError("the fake device is lost")
        self.steps += 1
        if self.keep_plans:
            self.plans.append(plan)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        results = {}
        for rank, rank_plan in enumerate(plan.ranks):
            assert len(rank_plan.decodes) <= self.limits.max_rows_decode
            assert len(rank_plan.prefills) <= self.limits.max_rows_prefill
            slots = [row.request.slot for rows in rank_plan for row in rows]
            assert len(slots) == len(set(slots))
            assert all(0 <= slot < self.limits.max_rows_decode for slot in slots)
            for row in rank_plan.decodes:
                assert row.length == 1
                assert row.sampled
            for rows in rank_plan:
                for request, start, length in rows:
                    assert 0 < length <= self.limits.max_chunk
                    assert request.rank == rank
                    self._write(request, start, length)
                    if start + length == len(request.token_ids):
                        results[request.request_id] = self._result(request)
        return results

    def warm_up(self, progress=None) -> None:
        for done in range(1, 4):
            if progress:
                progress(done, 3, f"bucket {done}")
        self.warm = True

    def shutdown(self) -> None:
        self.closed = True

    def _write(self, request: Request, start: int, length: int) -> None:
        size = self.limits.page_size
        for position in range(start, start + length):
            page = request.pages[position // size]
            assert page != 0, "page 0 is reserved"
            self._cache[request.rank][page][position % size] = request.token_ids[position]

    def _result(self, request: Request) -> RowResult:
        size = self.limits.page_size
        cache = self._cache[request.rank]
        count = len(request.token_ids)
        context = [cache[request.pages[at // size]][at % size] for at in range(count)]
        token = self.model(context, 0 if request.params.greedy else request.seed, self.limits.vocab_size)
        while request.suppresses_stop_ids and token in request.stop_ids:
            token = (token + 1) % self.limits.vocab_size
        wanted = request.params.logprobs
        finite = request.request_id not in self.non_finite
        if wanted is None:
            return RowResult(token, finite=finite)
        top = [((token + place) % self.limits.vocab_size, -0.5 - place) for place in range(wanted)]
        return RowResult(token, -0.5, top, finite, 1)


def expected_tokens(prompt: list[int], count: int, seed: int = 0, vocab_size: int = 300, model=next_token) -> list[int]:
    """What the fake model gives to a prompt that is alone."""
    context = list(prompt)
    for _ in range(count):
        context.append(model(context, seed, vocab_size))
    return context[len(prompt) :]
