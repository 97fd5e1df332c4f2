"""Under any interleaving of add, chunk, decode, preempt, abort and finish: no page is lost or used twice."""

from collections import Counter

from fake_runner import FakeRunner, expected_tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsjax.engine.request import FinishReason, Request, Status
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import AdmissionError, Scheduler, SchedulerConfig


class SchedulerMachine(RuleBasedStateMachine):
    """Small sizes, so that pages, slots, rows and budget all run out."""

    @initialize(
        num_ranks=st.integers(1, 3),
        page_size=st.integers(1, 5),
        pages=st.integers(3, 12),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 6),
        chunk=st.integers(1, 6),
        rows=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def make(self, num_ranks, page_size, pages, max_num_seqs, extra_budget, chunk, rows, policy):
        self.runner = FakeRunner(
            num_ranks=num_ranks,
            max_rows_decode=max_num_seqs,
            max_rows_prefill=rows,
            max_chunk=chunk,
            page_size=page_size,
            pages_per_rank=pages,
            max_model_len=40,
        )
        self.config = SchedulerConfig.from_limits(
            self.runner.limits, max_num_batched_tokens=max_num_seqs + extra_budget, policy=policy
        )
        self.scheduler = Scheduler(self.config, num_ranks)
        self.alive: dict[str, Request] = {}
        self.gone: list[Request] = []
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 299), min_size=1, max_size=20),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
    )
    def add(self, prompt, max_tokens, priority):
        self.count += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = Request(str(self.count), list(prompt), len(prompt), params, max_tokens, 0, priority=priority)
        total = len(prompt) + max_tokens
        fits = total <= 40 and total - 1 <= (self.config.pages_per_rank - 1) * self.config.page_size
        try:
            self.scheduler.add(request)
        except AdmissionError:
            assert not fits
        else:
            assert fits
            self.alive[request.request_id] = request

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self._step()

    def _step(self):
        plan = self.scheduler.schedule()
        assert plan.is_empty == (not self.alive), "a step is empty only when there is nothing to do"
        assert len(plan.ranks) == self.runner.limits.num_ranks
        for rank in plan.ranks:
            assert rank.num_tokens <= self.config.max_num_batched_tokens
        results = self.runner.execute(plan)
        sampled = {row.request.request_id for rank in plan.ranks for rows in rank for row in rows if row.sampled}
        assert sampled == results.keys()
        for update in self.scheduler.update(plan, results):
            if update.finish_reason is not None:
                request = self.alive.pop(update.request.request_id)
                self.gone.append(request)
                expected = expected_tokens(request.prompt_token_ids, request.max_tokens)
                assert request.output_token_ids == expected, "preempted or not, the tokens are the same"

    @rule(data=st.data())
    def abort(self, data):
        if self.alive:
            request = self.alive.pop(data.draw(st.sampled_from(sorted(self.alive))))
            assert self.scheduler.abort(request.request_id).finish_reason is FinishReason.ABORT
            self.gone.append(request)
        assert self.scheduler.abort("unknown") is None

    @invariant()
    def pages_and_slots_have_one_owner(self):
        for index, rank in enumerate(self.scheduler.ranks):
            mine = [request for request in self.alive.values() if request.rank == index]
            held = Counter(page for request in mine for page in request.pages)
            assert 0 not in held
            assert all(count == 1 for count in held.values())
            assert len(held) == rank.pool.num_used
            slots = [request.slot for request in mine if request.status is Status.RUNNING]
            assert len(slots) == len(set(slots)) <= self.config.max_num_seqs
            assert rank.load == sum(len(request.token_ids) for request in mine)
            orders = [request.order for request in rank.running]
            assert orders == sorted(orders)
            for request in mine:
                if request.status is Status.WAITING:
                    assert (request.pages, request.slot, request.num_computed_tokens) == ([], -1, 0)
                else:
                    assert len(request.pages) * self.config.page_size >= request.num_computed_tokens

    @invariant()
    def what_is_gone_holds_nothing(self):
        assert all(not request.pages and request.slot == -1 for request in self.gone)
        assert self.scheduler.num_unfinished == len(self.alive)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.alive:
                break
            self._step()
        assert not self.alive, "every admitted request ends"
        assert all(rank.pool.num_used == 0 and rank.load == 0 for rank in self.scheduler.ranks)


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
