"""Any order of requests, aborts, stalls, lost messages and flushes between two engines costs no page and changes no token.
Also tests `transfer/remote_prefill.py` and `transfer/send_buffers.py`."""

import time
from collections import Counter

from engine_pair import Pair
from greedy_requests import check_tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsjax.engine.transfer.messages import CancelTransfer, PrefillRequest, ReleaseChunk

_prompts = st.builds(
    lambda shared, length, rest: shared[:length] + rest,
    st.sampled_from([[7] * 30, list(range(100, 130)), [7] * 9 + [8] * 21]),
    st.integers(8, 30),
    st.lists(st.integers(0, 299), min_size=1, max_size=6),
)


class TransferMachine(RuleBasedStateMachine):
    @initialize(
        ranks=st.tuples(st.integers(1, 2), st.integers(1, 2)),
        pages=st.tuples(st.integers(8, 40), st.integers(12, 40)),
        prefills=st.integers(1, 2),
        below=st.sampled_from([{}, {"host_pages_per_rank": 6}, {"disk_pages": 30}]),
        windows=st.sampled_from([None, (9, 9), (9, 30), (40, 12)]),
    )
    def make(self, ranks, pages, prefills, below, windows):
        if windows is not None:
            below = {"host_pages_per_rank": 6, "host_windows_per_rank": 4} if "host_pages_per_rank" in below else {}
        self.pair = Pair(prefills=prefills, ranks=ranks, pages=pages, decode=below, windows=windows)
        self.alive, self.count = {}, 0

    @rule(several=st.lists(_prompts, min_size=1, max_size=5), turns=st.integers(0, 4))
    def add(self, several, turns):
        for tokens in several:
            self.count += 1
            self.alive[f"{self.count}"] = self.pair.add(f"{self.count}", tokens)
        for _ in range(turns):
            self.enter(self.pair.turn())

    @rule(who=st.sampled_from(["both", "both", "decode", "prefill"]), turns=st.integers(1, 5))
    def step(self, who, turns):
        for _ in range(turns):
            if who == "prefill":
                for engine in self.pair.engines:
                    engine.core.executor.move_chunks()
                    engine.turn(wait=False)
                continue
            self.pair.prefill_runs = who == "both"
            self.enter(self.pair.turn())

    def enter(self, updates):
        for update in updates:
            if update.finish_reason:
                request = self.alive.pop(update.request.request_id)
                check_tokens(request)

    @rule(data=st.data())
    def abort(self, data):
        if self.alive:
            self.pair.core.abort(self.alive.pop(data.draw(st.sampled_from(sorted(self.alive)))).request_id)

    @rule(prefill=st.sampled_from([0, 2, None]), decode=st.sampled_from([0, 2, None]))
    def change_the_link(self, prefill, decode):
        for engine in self.pair.engines:
            engine.core.executor.chunks_take = prefill
        self.pair.core.executor.chunks_take = decode

    @rule(lost=st.sets(st.sampled_from([PrefillRequest, CancelTransfer, ReleaseChunk])))
    def lose(self, lost):
        self.pair.lost = tuple(lost)

    @rule()
    def leases_end(self):
        self.pair.expire()

    @rule()
    def decode_has_waited_too_long(self):
        self.pair.incoming.begin_step(time.monotonic() + 2000)

    @rule()
    def prefill_is_trusted_again(self):
        for pause in self.pair.incoming._backoffs.values():
            pause._until = 0.0

    @rule(poisoned=st.booleans())
    def poison(self, poisoned):
        for engine in self.pair.engines:
            engine.core.executor.non_finite = {0} if poisoned else set()

    @rule()
    def flush(self):
        self.pair.core.flush_prefix_cache()

    @invariant()
    def every_page_is_free_or_cached_or_held_and_the_holders_are_counted(self):
        sides = [(self.pair.core, None), *((engine.core, engine.service.source) for engine in self.pair.engines)]
        for core, sends in sides:
            for index, rank in enumerate(core.scheduler.ranks):
                pool = rank.pool
                held = Counter()
                for one in [*rank.running, *rank.waiting]:
                    held.update(one.pages + one.window_pages + one.held_pages)
                held.update(page for load in rank.loads.under_way if load.request for page in load.pages)
                if sends is not None:
                    held.update(page for _, _, pages in sends.waiting[index] for page in pages)
                holders = {page: count for page, count in enumerate(pool._holders) if count}
                # A step may have a row of a request that has ended.
                assert core._in_flight or holders == held
                everywhere = [*pool._free, *pool._idle, *pool._free_windows, *pool._idle_windows, *holders]
                numbers = range(pool.num_pages + pool.num_windows)
                assert sorted(everywhere) == [number for number in numbers if number not in (0, pool.num_pages)]

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        self.pair.lost, self.pair.prefill_runs = (), True
        self.change_the_link(0, 0)
        for turn in range(3000):
            if not self.pair.core.has_unfinished:
                break
            if turn == 200:  # a `PrefillRequest` was lost
                self.decode_has_waited_too_long()
            self.enter(self.pair.turn())
        assert not self.alive, "every request ends"
        self.pair.settle()


TransferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTransferMachine = TransferMachine.TestCase
