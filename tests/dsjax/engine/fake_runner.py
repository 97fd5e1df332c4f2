"""A runner without JAX, whose latent cache is real: it reads the context back from the pages that it was told to use."""

import time

from dsjax.engine.plan import NO_TOKEN, RowResult, RunnerLimits, StepPlan
from dsjax.engine.request import Request
from dsjax.engine.stats import RunnerCounts

NAN = "not finite"
"""What a request in `FakeRunner.non_finite` writes. Whoever then has it in a page, read or not, fails too: 0 × NaN is NaN."""


def next_token(context: list[int], seed: int, vocab_size: int) -> int:
    """The fake model: a token that depends on every token before it, and on the seed."""
    value = seed + 0x9E3779B9
    for token in context:
        value = (value * 6364136223846793005 + token + 1442695040888963407) % 2**64
    return (value >> 33) % vocab_size


class FakeRunner:
    """Writes each token to its slot of its page and makes the next one from what the pages then hold.

    A page that two requests write, a page that is lost, or a chunk that is skipped therefore changes the output. It also checks
    what any runner relies on: slots, row groups, chunk lengths; and that a page that may be shared is not written.
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
        self.pending: StepPlan | None = None
        self.fail_at_step: int | None = None
        self.non_finite: set[str] = set()
        self.warm = False
        self.closed = False
        self._cache = [[[None] * page_size for _ in range(pages_per_rank)] for _ in range(num_ranks)]

    def execute(self, plan: StepPlan) -> dict[str, RowResult]:
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> StepPlan:
        assert self.pending is None, "no second step is launched before the first is collected"
        self.pending = plan
        time.sleep(self.step_seconds / 2)
        return plan

    def collect(self, plan: StepPlan) -> dict[str, RowResult]:
        assert self.pending is plan
        try:
            return self._compute(plan)
        finally:
            self.pending = None

    def _compute(self, plan: StepPlan) -> dict[str, RowResult]:
        assert len(plan.ranks) == self.limits.num_ranks, "every rank takes part in every step"
        if self.fail_at_step is not None and self.steps >= self.fail_at_step:
            raise RuntimeError("the fake device is lost")
        self.steps += 1
        if self.keep_plans:
            self.plans.append(plan)
        time.sleep(self.step_seconds / 2)
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
                    assert start >= request.num_sealed_pages * self.limits.page_size, "a sealed page is not written"
                    self._write(request, start, length)
            for rows in rank_plan:
                for request, start, length in rows:
                    result = self._result(request, start + length)
                    if result is not None:
                        results[request.request_id] = result
        failed = [row.request for rank in plan.ranks for rows in rank for row in rows]
        failed = [r for r in failed if r.request_id in results and not results[r.request_id].finite]
        self.clear_pages([(request.rank, request.pages[request.num_sealed_pages :]) for request in failed])
        return results

    def clear_pages(self, dirty) -> None:
        for rank, pages in dirty:
            for page in pages:
                self._cache[rank][page] = [None] * self.limits.page_size

    def counts(self) -> RunnerCounts:
        return RunnerCounts(num_padding_tokens=self.steps)

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
            value = NAN if request.request_id in self.non_finite else request.token_ids[position]
            self._cache[request.rank][page][position % size] = value

    def _result(self, request: Request, count: int) -> RowResult | None:
        """Of a row that ends before token `count`."""
        size = self.limits.page_size
        cache = self._cache[request.rank]
        sampled = count == len(request.token_ids)
        if any(NAN in cache[page] for page in request.pages):
            return RowResult(0 if sampled else NO_TOKEN, finite=False)
        context = [cache[request.pages[at // size]][at % size] for at in range(count)]
        assert context == request.token_ids[:count], "the pages hold this request's tokens"
        if not sampled:
            return None
        token = self.model(context, 0 if request.params.greedy else request.seed, self.limits.vocab_size)
        while request.suppresses_stop_ids and token in request.stop_ids:
            token = (token + 1) % self.limits.vocab_size
        wanted = request.params.logprobs
        if wanted is None:
            return RowResult(token)
        top = [((token + place) % self.limits.vocab_size, -0.5 - place) for place in range(wanted)]
        return RowResult(token, -0.5, top, rank=1)


def expected_tokens(prompt: list[int], count: int, seed: int = 0, vocab_size: int = 300, model=next_token) -> list[int]:
    """What the fake model gives to a prompt that is alone."""
    context = list(prompt)
    for _ in range(count):
        context.append(model(context, seed, vocab_size))
    return context[len(prompt) :]
