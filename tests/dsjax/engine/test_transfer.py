"""Prompts computed by one engine and decoded by another make the tokens of one, and whatever goes wrong between them costs no page."""

import random

import pytest
from fake_executor import FakeExecutor, expected_tokens

from dsjax.engine.core import EngineCore
from dsjax.engine.prefill_engine import LocalLink, PrefillEngine
from dsjax.engine.request import Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler_config import SchedulerConfig


class Pair:
    """A prefill and a decode engine in one thread: each turn gives both a step.

    Attributes:
        lost: kinds of messages to prefill that get lost.
    """

    def __init__(
        self, *, prefills=1, ranks=(1, 1), pages=(33, 33), timeout=1000.0, local_tokens=1, decode=None, prefill=None
    ):
        self.engines, links = [], []
        for _ in range(prefills):
            executor = FakeExecutor(num_ranks=ranks[0], pages_per_rank=pages[0], transfers=True, **(prefill or {}))
            config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
            self.engines.append(PrefillEngine(executor, config, timeout=timeout))
            links.append(LocalLink(self.engines[-1]))
        self.lost = ()
        for link in links:
            link.send = self._lossy(link.send)
        executor = FakeExecutor(
            num_ranks=ranks[1], pages_per_rank=pages[1], max_rows_decode=4, transfers=True, **(decode or {})
        )
        config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
        self.core = EngineCore(executor, config, prefills=links, local_tokens=local_tokens, transfer_timeout=timeout)
        self.links = links
        self.prefill_runs = True
        self.steps = 0

    def _lossy(self, send):
        return lambda message: None if isinstance(message, tuple(self.lost)) else send(message)

    @property
    def incoming(self):
        return self.core.scheduler.incoming

    def add(self, name, tokens, max_tokens=6, **fields):
        request = Request(name, list(tokens), len(tokens), SamplingParams(temperature=0), max_tokens, 0)
        for field, value in fields.items():
            setattr(request, field, value)
        self.core.add(request)
        return request

    def turn(self):
        if self.prefill_runs:
            for engine in self.engines:
                engine.core.executor.move_parcels()
                engine.turn(wait=False)
        self.core._wake.set()  # nobody else runs: there is nothing to wait for
        updates = self.core.step()
        self.steps += 1
        return updates

    def run(self):
        while self.core.has_unfinished:
            self.turn()
            assert self.steps < 5000, "nothing moves any more"

    def settle(self):
        """Let everything that was given up come to its end, and see that nothing is left."""
        for engine in self.engines:
            engine.core.executor.parcels_take = 0
        self.core.executor.parcels_take = 0
        for _ in range(20):
            self.turn()
        for rank in self.core.scheduler.ranks:
            assert rank.pool.num_used == 0
            assert rank.backlog == rank.load == 0
        assert self.incoming.num_under_way == 0
        assert not self.incoming._expected
        assert not self.incoming._pulling
        assert not self.incoming._of
        for engine in self.engines:
            assert engine.num_jobs == 0
            assert engine.leases.num_kept == 0
            assert not engine.core.scheduler.num_unfinished
            for index, rank in enumerate(engine.core.scheduler.ranks):
                assert rank.pool.num_used == 0
                assert engine.leases.room(index) == 256


def prompts(count, seed=0, longest=80):
    """Prompts that begin alike in threes."""
    choose = random.Random(seed)
    shared = [[choose.randrange(300) for _ in range(longest)] for _ in range(max(1, count // 3))]
    found = []
    for _ in range(count):
        beginning = choose.choice(shared)[: choose.randrange(longest)]
        found.append(beginning + [choose.randrange(300) for _ in range(1 + choose.randrange(9))])
    return found


@pytest.mark.parametrize("ranks", [(1, 1), (2, 3)])
@pytest.mark.parametrize("takes", [0, 3])
def test_tokens_are_those_of_one_engine_and_decode_computes_no_whole_page(ranks, takes):
    pair = Pair(ranks=ranks, pages=(129, 129))
    pair.core.executor.parcels_take = takes
    for engine in pair.engines:
        engine.core.executor.parcels_take = takes
    pair.core.executor.keep_commands = True
    given = prompts(24)
    requests = [pair.add(f"{i}", tokens) for i, tokens in enumerate(given)]
    pair.run()
    for tokens, request in zip(given, requests, strict=True):
        assert request.output_token_ids == expected_tokens(tokens, 6)
    pair.settle()
    rows = [
        row
        for step in pair.core.executor.commands
        for rank in getattr(step, "ranks", ())
        for row in getattr(rank, "prefills", ())
    ]
    assert all(row.length <= pair.core.executor.limits.page_size for row in rows)
    assert pair.incoming.counts.given_up == 0
    assert pair.incoming.counts.completed > 8
