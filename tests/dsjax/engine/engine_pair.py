"""A prefill and a decode engine over fake executors in one thread, which take turns."""

import random

from fake_executor import SIZES, FakeExecutor

from dsjax.engine.contract.commands import int32s
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.engine import attachments_of
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.schedule.pages import extend_hashes, window_columns
from dsjax.engine.schedule.request import Request, RequestOptions
from dsjax.engine.transfer.messages import CHUNK_PAGES, MOST_KEPT, PrefillRequest
from dsjax.engine.transfer.prefill_links import LocalLink, PrefillLinks


def prefill_request(transfer, tokens, salt=None):
    """What a decode engine asks for all whole pages of a prompt with."""
    tokens = list(tokens)
    pages = (len(tokens) - 1) // 4
    tokens = tokens[: pages * 4 + 1]
    named = Request("named", tokens, len(tokens), SamplingParams(), 1, 0, options=RequestOptions(cache_salt=salt))
    return PrefillRequest(transfer, int32s(tokens), 0, pages, salt, page=extend_hashes(named, 4)[pages - 1])


class PolledLinks(PrefillLinks):
    """Links of an executor that pulls when it is looked at, since nothing runs beside it."""

    def start(self, executor, config):
        self.executor = executor
        super().start(executor, config)

    def begin_step(self, now):
        self.executor.move_chunks(pulls=True)
        super().begin_step(now)


class Pair:
    """A prefill and a decode engine in one thread: each turn gives both a step.

    engines: those of another pair, which this one's decode engine reaches too. generations: of the prefill engine.

    Attributes:
        lost: kinds of messages to prefill that get lost.
    """

    def __init__(
        self, *, prefills=1, ranks=(1, 1), pages=(33, 33), timeout=1000.0, local_tokens=1, decode=None, engines=None,
        generations=None, windows=None,
    ):  # fmt: skip
        """windows: window pages of a rank of each side; None: the model has none."""
        of_sides = [{}, {}]
        if windows is not None:
            columns = window_columns(SIZES["max_chunk"], SIZES["page_size"])
            of_sides = [{"windows_per_rank": count, "window_columns": columns} for count in windows]
        self.engines = [] if engines is None else engines
        for _ in range(0 if engines else prefills):
            executor = FakeExecutor(num_ranks=ranks[0], pages_per_rank=pages[0], transfers=True, **of_sides[0])
            self.engines.append(PrefillEngine(executor, executor.config, timeout=timeout, mesh_changer=generations))
        links = [LocalLink(engine) for engine in self.engines]
        self.lost, self.sent = (), []
        for link in links:
            link.send = self._lossy(link.send)
        sizes = {"max_rows_decode": 4, "transfers": True, **(decode or {}), **of_sides[1]}
        executor = FakeExecutor(num_ranks=ranks[1], pages_per_rank=pages[1], **sizes)
        self.decode = PolledLinks(links, local_tokens=local_tokens, timeout=timeout)
        self.core = EngineCore(executor, executor.config, attachments=[*attachments_of(executor.config), self.decode])
        self.prefill_runs, self.steps = True, 0

    def _lossy(self, send):
        def sent(message):
            self.sent.append(message)
            if not isinstance(message, self.lost):
                send(message)

        return sent

    def asked(self):
        return [message for message in self.sent if isinstance(message, PrefillRequest)]

    def expire(self):
        for engine in self.engines:
            for lease in engine.buffers._buffers.values():
                lease.deadline = 0.0

    @property
    def incoming(self):
        return self.decode.source

    def add(self, name, tokens, max_tokens=6, **fields):
        request = Request(name, list(tokens), len(tokens), SamplingParams(temperature=0), max_tokens, 0, **fields)
        self.core.add(request)
        return request

    def turn(self):
        if self.prefill_runs:
            for engine in self.engines:
                engine.core.executor.move_chunks()
                engine.turn(wait=False)
        self.decode.wake.set()  # nobody else runs: there is nothing to wait for
        updates = self.core.step()
        self.steps += 1
        return updates

    def run(self):
        while self.core.has_unfinished:
            self.turn()
            assert self.steps < 5000, "nothing moves any more"

    def settle(self):
        """Let everything that was given up come to its end, and see that nothing is left."""
        self.lost, self.prefill_runs = (), True
        for engine in self.engines:
            engine.core.executor.chunks_take = 0
        self.core.executor.chunks_take = 0
        for _ in range(20):
            self.turn()
        self.expire()  # what is left because a message was lost
        for _ in range(5):
            self.turn()
        for rank in self.core.scheduler.ranks:
            assert rank.pool.num_used == 0
            assert rank.backlog == rank.load == 0
        assert self.incoming.num_under_way == 0
        assert not self.incoming._transfer_by_page
        assert not self.incoming._transfer_by_landing
        assert not self.incoming._transfer_by_request
        for engine in self.engines:
            assert engine.num_jobs == 0
            assert engine.buffers.num_kept == 0
            assert not engine.core.scheduler.num_unfinished
            for index, rank in enumerate(engine.core.scheduler.ranks):
                assert rank.pool.num_used == 0
                assert engine.buffers.room(index) == MOST_KEPT // CHUNK_PAGES


def prompts(count, seed=0, longest=80):
    choose = random.Random(seed)
    shared = [[choose.randrange(300) for _ in range(longest)] for _ in range(max(1, count // 3))]
    given = []
    for _ in range(count):
        beginning = choose.choice(shared)[: choose.randrange(longest)]
        given.append(beginning + [choose.randrange(300) for _ in range(1 + choose.randrange(9))])
    return given
