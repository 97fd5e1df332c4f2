"""Prompts computed by one engine and decoded by another make the tokens of one, and whatever goes wrong between them costs no page."""

import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from fake_executor import FakeExecutor, expected_tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsjax.engine.contract.commands import from_int32s, int32s
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.engine import attachments_of
from dsjax.engine.engine_thread import EngineThread
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.schedule.landing_area import LandingArea
from dsjax.engine.schedule.page_source import Lookup, RankPages
from dsjax.engine.schedule.pages import PagePool
from dsjax.engine.schedule.request import Request, RequestOptions
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.transfer.messages import (
    CancelTransfer,
    ChunkReady,
    PrefillRequest,
    PulledChunk,
    ReleaseChunk,
    TransferFailed,
)
from dsjax.engine.transfer.prefill_links import LocalLink, PrefillLinks
from dsjax.engine.transfer.remote_prefill import RemotePrefills
from dsjax.serve.metrics import Metrics


class PolledLinks(PrefillLinks):
    """Links of an executor that pulls when it is looked at, since nothing runs beside it."""

    def __init__(self, executor, links, **options):
        super().__init__(links, **options)
        self.executor = executor

    def start(self, executor, config):
        self.executor = executor
        super().start(executor, config)

    def begin_step(self, now):
        self.executor.move_chunks(pulls=True)
        super().begin_step(now)


class Pair:
    """A prefill and a decode engine in one thread: each turn gives both a step.

    engines: those of another pair, which this one's decode engine reaches too.

    Attributes:
        lost: kinds of messages to prefill that get lost.
    """

    def __init__(
        self,
        *,
        prefills=1,
        ranks=(1, 1),
        pages=(33, 33),
        timeout=1000.0,
        local_tokens=1,
        decode=None,
        prefill=None,
        engines=None,
    ):
        self.engines = [] if engines is None else engines
        for _ in range(0 if engines else prefills):
            executor = FakeExecutor(num_ranks=ranks[0], pages_per_rank=pages[0], transfers=True, **(prefill or {}))
            config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
            self.engines.append(PrefillEngine(executor, config, timeout=timeout))
        links = [LocalLink(engine) for engine in self.engines]
        self.lost = ()
        self.sent = []
        for link in links:
            link.send = self._lossy(link.send)
        executor = FakeExecutor(
            num_ranks=ranks[1], pages_per_rank=pages[1], max_rows_decode=4, transfers=True, **(decode or {})
        )
        config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
        self.decode = PolledLinks(executor, links, local_tokens=local_tokens, timeout=timeout)
        self.core = EngineCore(executor, config, attachments=[*attachments_of(config), self.decode])
        self.links = links
        self.prefill_runs = True
        self.steps = 0

    def _lossy(self, send):
        def sent(message):
            self.sent.append(message)
            if not isinstance(message, self.lost):
                send(message)

        return sent

    def asked(self):
        return [message for message in self.sent if isinstance(message, PrefillRequest)]

    def expire(self):
        """Let all time pass that leases have."""
        for engine in self.engines:
            for lease in engine.buffers._buffers.values():
                lease.until = 0.0

    @property
    def incoming(self):
        return self.decode.source

    def add(self, name, tokens, max_tokens=6, **fields):
        request = Request(name, list(tokens), len(tokens), SamplingParams(temperature=0), max_tokens, 0)
        for field, value in fields.items():
            setattr(request, field, value)
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
        assert not self.incoming._expected
        assert not self.incoming._pulling
        assert not self.incoming._of
        for engine in self.engines:
            assert engine.num_jobs == 0
            assert engine.buffers.num_kept == 0
            assert not engine.core.scheduler.num_unfinished
            for index, rank in enumerate(engine.core.scheduler.ranks):
                assert rank.pool.num_used == 0
                assert engine.buffers.room(index) == 256


def prompts(count, seed=0, longest=80):
    """Prompts that begin alike in threes."""
    choose = random.Random(seed)
    shared = [[choose.randrange(300) for _ in range(longest)] for _ in range(max(1, count // 3))]
    given = []
    for _ in range(count):
        beginning = choose.choice(shared)[: choose.randrange(longest)]
        given.append(beginning + [choose.randrange(300) for _ in range(1 + choose.randrange(9))])
    return given


@pytest.mark.parametrize("ranks", [(1, 1), (2, 3)])
@pytest.mark.parametrize("takes", [0, 3])
def test_tokens_are_those_of_one_engine_and_decode_computes_no_whole_page(ranks, takes):
    pair = Pair(ranks=ranks, pages=(129, 129))
    pair.core.executor.chunks_take = takes
    for engine in pair.engines:
        engine.core.executor.chunks_take = takes
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
    assert pair.incoming.transfer_counts.given_up == 0
    assert pair.incoming.transfer_counts.completed > 8


def test_a_prompt_that_fits_a_page_or_is_nearly_cached_is_computed_by_decode():
    pair = Pair(local_tokens=9)
    long = list(range(40))
    requests = [(long, pair.add("a", long))]
    pair.run()
    for name, tokens in (("b", [5, 6]), ("c", [*long[:36], 1, 2, 3, 4, 5, 6, 7, 8]), ("d", long)):
        requests.append((tokens, pair.add(name, tokens)))
        pair.run()
    assert len(pair.asked()) == 1
    for tokens, request in requests:
        assert request.output_token_ids == expected_tokens(tokens, 6)
    pair.settle()


def test_prompts_that_begin_alike_are_asked_for_once_and_each_is_told_what_was_cached():
    pair = Pair()
    tokens = list(range(60))
    first = [pair.add(f"{i}", tokens) for i in range(3)]
    pair.run()
    assert [(ask.first, ask.end) for ask in pair.asked()] == [(0, 14)]
    assert first[0].num_cached_tokens == 0, "it was computed for it"
    assert first[1].num_cached_tokens == 56
    longer = pair.add("longer", [*tokens, *range(100, 120)])
    pair.run()
    assert pair.asked()[-1].first == len(tokens) // 4 == 15
    assert longer.num_cached_tokens == 60
    pair.core.scheduler.flush_prefix_cache()
    again = pair.add("again", tokens)
    pair.run()
    assert again.num_cached_tokens == 56, "prefill had them"
    pair.settle()


def test_prefill_instances_share_the_prompts():
    pair = Pair(prefills=3)
    given = [[i] * 30 for i in range(9)]
    requests = [pair.add(f"{i}", tokens) for i, tokens in enumerate(given)]
    pair.run()
    assert [request.output_token_ids for request in requests] == [expected_tokens(tokens, 6) for tokens in given]
    assert all(engine.buffers.pages_sent >= 7 for engine in pair.engines)
    pair.settle()


def test_what_a_prefill_engine_has_and_did_is_shown():
    prefills = 2
    pair = Pair(prefills=prefills, pages=(33, 65))
    metrics = Metrics("tiny", 1, 128, prefills=pair.engines)

    def value(name, engine=0, **labels):
        labels |= {"model_name": "tiny", "prefill_engine": str(engine)}
        return metrics.registry.get_sample_value(f"dsjax_prefill_engine_{name}", labels)

    pair.core.executor.chunks_take = None
    for i in range(2 * prefills):
        pair.add(f"{i}", [i] * 50)
    pair.turn()
    pair.turn()
    assert all(value("prompts", engine, state="running") for engine in range(prefills))
    for _ in range(25):
        pair.turn()
    for engine in range(prefills):
        assert (value("up", engine), value("kept_pages", engine)) == (1, 24), "of two prompts"
        assert 96 <= value("tokens_total", engine) <= 98
        assert value("step_seconds_total", engine) > 0
        assert value("prompts", engine, state="waiting") == 0
    pair.core.executor.chunks_take = 0
    pair.run()
    assert value("kept_pages") == 0
    pair.engines[0].error = RuntimeError()
    assert value("up") == 0
    pair.engines[0].error = None
    pair.settle()


@pytest.mark.parametrize("prefills", [1, 2])
def test_decode_engines_share_the_prefill_engines_and_nothing_of_one_comes_to_another(prefills):
    first = Pair(prefills=prefills, pages=(65, 33))
    pairs = [first, Pair(engines=first.engines, pages=(65, 33))]
    for pair in pairs:
        pair.core.executor.chunks_take = 2
    given = prompts(18, seed=5)
    requests = [pair.add(f"{i}", tokens) for i, tokens in enumerate(given) for pair in pairs]
    for turn in range(2000):
        for pair in pairs:
            pair.turn()
        if turn == 5:
            pairs[0].core.abort("3")
            assert sum(pairs[0].incoming.awaited) > 0
        if turn == 9:
            pairs[1].core.flush_prefix_cache()
        if not any(pair.core.has_unfinished for pair in pairs):
            break
    for index, request in enumerate(requests):
        assert index == 6 or request.output_token_ids == expected_tokens(given[index // 2], 6)
    assert all(pair.incoming.transfer_counts.completed > 3 for pair in pairs)
    for pair in pairs:
        pair.settle()
        assert sum(pair.incoming.awaited) == 0
    names = [{ask.transfer for ask in pair.asked()} for pair in pairs]
    assert not names[0] & names[1]


def test_a_prompt_goes_to_the_prefill_engine_of_which_fewest_pages_are_awaited():
    pair = Pair(prefills=2, pages=(33, 65))
    pair.prefill_runs = False
    for first, tokens, awaited in ((0, 60, [14, 0]), (100, 40, [14, 9]), (200, 30, [14, 16])):
        pair.add(f"{first}", range(first, first + tokens))
        pair.turn()
        assert pair.incoming.awaited == awaited
    pair.prefill_runs = True
    pair.run()
    pair.settle()


def test_a_decode_engine_that_dies_ends_the_prefill_engine_of_its_process():
    pair, deaths = Pair(decode={"max_rows_prefill": 1}), []
    [engine] = pair.engines
    pair.core.executor.chunks_take, pair.core.executor.fail_at_step = None, 2
    listener = SimpleNamespace(
        wants_stats=lambda: False,
        on_done=lambda updates, stats: None,
        on_change=lambda: None,
        on_death=deaths.append,
    )
    thread = EngineThread(pair.core, listener)
    pair.add("has its prompt computed", range(50))
    thread.start()
    while not pair.incoming.num_under_way:
        time.sleep(0.0005)
    for _ in range(8):  # until chunks are kept
        engine.core.executor.move_chunks()
        engine.turn(wait=False)
    assert engine.num_jobs
    assert engine.buffers.num_kept
    engine.start()
    thread.add([Request("short", [1, 2], 2, SamplingParams(temperature=0), 6, 0)])
    thread.join(60)
    assert engine.num_jobs == engine.buffers.num_kept == 0
    assert len(deaths) == 1
    assert not engine._thread.alive
    assert engine.error is None


@pytest.mark.parametrize("turns", range(14))
def test_an_abort_at_each_moment_gives_everything_back(turns):
    pair = Pair(ranks=(1, 2))
    pair.core.executor.chunks_take = pair.engines[0].core.executor.chunks_take = 1
    tokens = list(range(70))
    pair.add("gone", tokens)
    other = pair.add("other", tokens[:30]) if turns % 2 else None
    for _ in range(turns):
        pair.turn()
    pair.core.abort("gone")
    pair.run()
    assert other is None or other.output_token_ids == expected_tokens(tokens[:30], 6)
    pair.settle()
    again = pair.add("again", tokens)
    pair.run()
    assert again.output_token_ids == expected_tokens(tokens, 6)
    pair.settle()


@pytest.mark.parametrize("turns", range(1, 10))
def test_a_prefill_side_that_stops_costs_time_and_no_request(turns):
    pair = Pair(timeout=0.05)
    pair.engines[0].buffers.timeout = 1000.0
    given = prompts(6, seed=turns)
    requests = [pair.add(f"{i}", tokens) for i, tokens in enumerate(given)]
    for _ in range(turns):
        pair.turn()
    pair.prefill_runs = False
    while pair.core.has_unfinished:
        pair.turn()
        time.sleep(0.001)
    for tokens, request in zip(given, requests, strict=True):
        assert request.output_token_ids == expected_tokens(tokens, 6)
    asked = len(pair.asked())
    pair.add("next", [7] * 30)
    pair.run()
    if pair.incoming.transfer_counts.given_up:
        assert len(pair.asked()) == asked, "it is left alone for a while"
    pair.settle()


@pytest.mark.parametrize(
    "lost", [(ReleaseChunk,), (CancelTransfer,), (ReleaseChunk, CancelTransfer), (PrefillRequest,)]
)
def test_lost_messages_cost_a_lease_and_no_page(lost):
    pair = Pair(timeout=0.03)
    pair.lost = lost
    given = prompts(6, seed=3)
    requests = [pair.add(f"{i}", tokens) for i, tokens in enumerate(given)]
    for _ in range(3):
        pair.turn()
    pair.core.abort("0")
    while pair.core.has_unfinished:
        pair.turn()
        time.sleep(0.001)
    for tokens, request in zip(given[1:], requests[1:], strict=True):
        assert request.output_token_ids == expected_tokens(tokens, 6)
    time.sleep(0.04)
    pair.turn()
    assert pair.engines[0].buffers.num_kept == 0, "what nobody pulls or releases is dropped after its lease"
    pair.settle()


def test_two_requests_that_were_handed_the_same_transfer_both_get_their_own_pages():
    pair = Pair()
    pair.incoming.connect = lambda address: 0
    given = [list(range(50)), list(range(100, 150))]
    options = RequestOptions(prefill={"address": "127.0.0.1:1", "transfer": "room-7"})
    requests = [pair.add(f"{i}", tokens, options=options) for i, tokens in enumerate(given)]
    pair.run()
    assert [request.output_token_ids for request in requests] == [expected_tokens(tokens, 6) for tokens in given]
    assert pair.incoming.transfer_counts.completed == 2
    pair.settle()


def test_an_engine_that_reaches_its_own_prefill_engines_alone_ignores_which_one_a_request_names():
    pair = Pair()
    prefill = {"address": "127.0.0.1:1", "transfer": "room-7"}
    request = pair.add("a", list(range(50)), options=RequestOptions(prefill=prefill))
    pair.run()
    assert request.output_token_ids == expected_tokens(list(range(50)), 6)
    assert pair.incoming.transfer_counts.completed == 1
    pair.settle()


def test_a_link_that_stalls_is_given_up():
    pair = Pair(timeout=0.03)
    pair.core.executor.chunks_take = None
    request = pair.add("a", list(range(50)))
    while pair.core.has_unfinished:
        pair.turn()
        time.sleep(0.001)
    assert request.output_token_ids == expected_tokens(list(range(50)), 6)
    assert pair.incoming.transfer_counts.given_up == 1
    pair.settle()


def test_a_prompt_in_a_queue_longer_than_the_time_limit_is_waited_for():
    pair = Pair(timeout=0.1, pages=(257, 257))
    given = [[70 * i + place % 70 for place in range(120)] for i in range(4)]
    requests = [pair.add(f"{i}", tokens) for i, tokens in enumerate(given)]
    waits = {}
    while pair.core.has_unfinished:
        pair.turn()
        time.sleep(0.02)
        for one in pair.incoming._transfers.values():
            if not one.seen:
                waits[one.name] = time.monotonic() - one.began
    assert max(waits.values()) > 0.2, "the queue is not as long as the test wants it"
    assert [request.output_token_ids for request in requests] == [expected_tokens(tokens, 6) for tokens in given]
    assert (pair.incoming.transfer_counts.completed, pair.incoming.transfer_counts.given_up) == (4, 0)
    pair.settle()


@pytest.mark.parametrize("has_room", [False, True])
def test_a_link_is_left_alone_for_what_it_does_not_send_and_not_for_what_finds_no_room_here(has_room):
    pair = Pair()
    if has_room:
        pair.core.executor.chunks_take = None
    else:
        pair.core.scheduler.ranks[0].loads.landing.make_room = lambda *_: False
    request = pair.add("a", list(range(50)))
    pair.turn()
    [transfer] = pair.incoming._transfers.values()
    while not (transfer.pulling if has_room else transfer.offers):
        pair.turn()
    pair.prefill_runs = False
    pair.turn()  # takes what has been said already
    transfer.since -= 1000
    pair.turn()
    assert pair.incoming.transfer_counts.given_up == 1
    assert pair.incoming._backoffs[0].holds(time.monotonic()) is has_room
    pair.run()
    assert request.output_token_ids == expected_tokens(list(range(50)), 6)
    pair.settle()


@pytest.mark.parametrize("wrong", ["no room", "not finite", "chunks lost"])
def test_what_prefill_cannot_compute_decode_does(wrong):
    pair = Pair(pages=(5, 33) if wrong == "no room" else (33, 33))
    if wrong == "not finite":
        pair.engines[0].core.executor.non_finite.add(0)
    request = pair.add("a", list(range(50)))
    if wrong == "chunks lost":
        for _ in range(3):
            pair.turn()
        assert pair.engines[0].buffers.num_kept
        for number in list(pair.engines[0].buffers._buffers):
            pair.engines[0].buffers.release(number)
    pair.run()
    assert request.output_token_ids == expected_tokens(list(range(50)), 6)
    assert pair.incoming.transfer_counts.given_up == 1
    pair.settle()


def test_a_prefill_engine_that_dies_says_so_and_is_asked_no_more():
    pair = Pair()
    engine = pair.engines[0]
    engine.core.executor.fail_at_step = 2
    engine.start()
    pair.prefill_runs = False
    requests = [pair.add(f"{i}", [i] * 60) for i in range(3)]
    while pair.core.has_unfinished:
        pair.turn()
        time.sleep(0.0005)
    assert [request.output_token_ids for request in requests] == [expected_tokens([i] * 60, 6) for i in range(3)]
    assert isinstance(engine.error, RuntimeError)
    asked = len(pair.asked())
    pair.add("later", [9] * 60)
    pair.run()
    assert len(pair.asked()) - asked in (0, 1)
    assert engine.buffers.num_kept == engine.num_jobs == 0
    assert all(rank.pool.num_used == 0 for rank in pair.core.scheduler.ranks)


@pytest.mark.parametrize(
    ("tokens", "first", "end"),
    [(range(9), 2, 2), (range(8), 0, 2), ([1, -1, 3, 4, 5], 0, 1), ([1, 2, 3, 4, 300], 0, 1)],
)
def test_what_makes_no_sense_is_refused_before_it_reaches_a_device(tokens, first, end):
    pair, answers = Pair(), []
    for given in (int32s(tokens), int32s(tokens) + b"?"):
        pair.engines[0].post(PrefillRequest("odd", given, first, end), answers.append)
        pair.engines[0].turn(wait=False)
        assert isinstance(answers.pop(), TransferFailed)
    pair.settle()


def test_an_engine_that_ends_ends_its_prefill_threads():
    pair = Pair()
    pair.engines[0].start()
    pair.prefill_runs = False
    pair.add("a", [1] * 60)
    pair.turn()
    pair.core.shutdown()
    assert not pair.engines[0]._thread.alive
    assert pair.engines[0].core.executor.closed
    answers = []
    pair.engines[0].post(PrefillRequest("late", b"", 0, 1), answers.append)
    assert isinstance(answers[0], TransferFailed)


def test_when_decode_takes_nothing_prefill_keeps_so_much_and_no_more():
    pair = Pair(pages=(65, 129))
    pair.engines[0].buffers._room = [6]
    pair.core.executor.chunks_take = None
    requests = [pair.add(f"{i}", [i] * 50) for i in range(4)]
    for _ in range(60):
        pair.turn()
    assert pair.engines[0].buffers.room(0) == 0
    assert sum(lease.offer.count for lease in pair.engines[0].buffers._buffers.values()) == 6
    pair.core.executor.chunks_take = 0
    pair.run()
    assert [request.output_token_ids for request in requests] == [expected_tokens([i] * 50, 6) for i in range(4)]
    pair.engines[0].buffers._room = [256]
    pair.settle()


def test_a_prefill_engine_that_can_do_nothing_until_decode_takes_pages_waits_for_that():
    pair = Pair(pages=(17, 129))
    [engine] = pair.engines
    engine.buffers._room, pair.core.executor.chunks_take = [6], None
    requests = [pair.add(f"{i}", [i] * 50) for i in range(4)]
    for _ in range(60):
        pair.turn()
    assert engine.core.has_unfinished, "others wait for pages that are held for sending"
    turns, turn = [], engine._thread.turn
    engine._thread.turn = lambda: turns.append(1) or turn()
    engine.start()
    time.sleep(0.1)
    assert len(turns) < 10
    pair.core.executor.chunks_take, pair.prefill_runs = 0, False
    began = time.monotonic()
    while pair.core.has_unfinished and time.monotonic() < began + 10:
        engine.core.executor.move_chunks()
        pair.turn()
        time.sleep(0.0005)
    assert [request.output_token_ids for request in requests] == [expected_tokens([i] * 50, 6) for i in range(4)]
    assert pair.incoming.transfer_counts.completed == 4, "it goes on when pages are taken"
    pair.core.shutdown()


class CountedWaits:
    """The commands of an engine's thread, of which it waits for none: it is only noted that it would."""

    def __init__(self, engine):
        self._commands, engine._thread._commands = engine._thread._commands, self
        self.waits = 0

    def get(self, **timeout):
        self.waits += bool(timeout)
        return self._commands.get(block=False)

    def put(self, command):
        self._commands.put(command)

    def empty(self):
        return self._commands.empty()


def test_a_prefill_engine_waits_when_three_steps_in_a_row_have_computed_nothing_and_not_before():
    pair = Pair(pages=(17, 129))
    [engine] = pair.engines
    # Chunks of 6 pages at most, each taken after three looks: the prompts go on page by page, in steps between which nobody says anything.
    engine.buffers._room, pair.core.executor.chunks_take = [6], 3
    for name in range(4):
        pair.add(f"{name}", [name] * 50)
    commands, stuck = CountedWaits(engine), 0
    while pair.core.has_unfinished:
        engine.core.executor.move_chunks()
        if engine.core.has_unfinished:
            waits = commands.waits
            engine.turn()
            stuck += commands.waits - waits
        else:
            engine.turn(wait=False)
        pair.decode.wake.set()
        pair.core.step()
    assert stuck == 0, "a step that computes nothing may send pages, and the next one uses their room"

    pair.core.executor.chunks_take = None  # nobody takes anything any more
    engine.buffers._room = [6]
    for name in range(4, 8):
        pair.add(f"{name}", [name] * 50)
    for _ in range(60):
        engine.turn(wait=False)
        pair.decode.wake.set()
        pair.core.step()
    assert engine.core.has_unfinished
    engine._thread.call(lambda: None)  # counting begins anew when something is said
    waits = []
    for _ in range(5):
        before = commands.waits
        engine.turn()
        waits.append(commands.waits - before)
    assert waits == [1, 0, 0, 1, 1], "the first one takes what was said, and three steps compute nothing"


def decode_source(local_tokens=1):
    """The transfers of a decode engine with one rank and one prefill engine, without either."""
    pages = RankPages(PagePool(33, 4), LandingArea())
    source = RemotePrefills(1, local_tokens, timeout=10.0)
    source.bind([pages])
    return source


def waiting(source, name, tokens, names, cached=()):
    """A request for which the pages behind the cached ones are asked for."""
    request = Request(name, tokens, len(tokens), SamplingParams(temperature=0), 1, 0)
    assert source.lookup(0, request, names, cached, 8, now=0.0) is Lookup.WAIT
    [(_, asked)] = [sent for sent in source.take_messages() if isinstance(sent[1], PrefillRequest)]
    return request, asked


def test_pages_that_two_transfers_bring_are_awaited_from_the_other_one_when_the_first_ends():
    source, tokens = decode_source(), list(range(21))
    names = [b"%d" % page for page in range(5)]
    first, _ = waiting(source, "first", tokens, names, cached=[1, 2])  # its beginning was cached, and is evicted then
    _, asked = waiting(source, "second", tokens, names)
    assert (asked.first, asked.end) == (0, 5)
    source.release(0, first)
    third = Request("third", tokens, len(tokens), SamplingParams(temperature=0), 1, 0)
    assert all(source.awaits(0, third, name) for name in names), "all five pages still come"
    assert source._of[third].name == asked.transfer
    source.cancel(0)
    assert not source._expected


def test_an_offer_that_comes_twice_is_pulled_once_and_not_released_before_it_has_come():
    source, names = decode_source(), [b"0", b"1"]
    request, asked = waiting(source, "a", list(range(9)), names)
    offer = ChunkReady(asked.transfer, number=7, first=0, count=2)
    for _ in range(2):
        source.receive(0, offer, now=1.0)
    source.begin_rank(0, now=1.0)
    [(_, pull)] = source.commands()
    assert from_int32s(pull.ranks[0]).tolist() == [0, 7, 0, 0, 0, 7, 1, 1]
    source.receive(0, offer, now=1.0)
    source.begin_rank(0, now=1.0)
    assert list(source.commands()) == source.take_messages() == []
    assert source.num_under_way == 1
    assert request.is_loading
    for number in (0, 1):
        source.landed(0, number, True, now=2.0)
    assert source.transfer_counts.completed == 1
    assert source.transfer_counts.pages == 2


def test_what_an_executor_has_pulled_does_not_land_on_the_one_that_replaces_it():
    pair, landed = Pair(), []
    pair.decode.scheduled(SimpleNamespace(landed=lambda *arguments: landed.append(arguments)))
    pair.decode.report(PulledChunk(rank=0, link=0, number=12345, pages=[3], ok=True))
    executor = FakeExecutor(num_ranks=1, pages_per_rank=33, transfers=True)
    pair.decode.start(executor, SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16))
    pair.decode.begin_step(0.0)
    assert landed == []
    assert pair.sent == [ReleaseChunk(12345)], "its prefill engine need not keep it"
    pair.decode.report(PulledChunk(rank=0, link=0, number=12346, pages=[4], ok=True))
    pair.decode.begin_step(1.0)
    assert landed == [(0, [4], True, 1.0)]


def test_flushing_forgets_what_is_on_its_way():
    pair = Pair()
    pair.core.executor.chunks_take = 2
    tokens = list(range(50))
    request = pair.add("a", tokens)
    for _ in range(5):
        pair.turn()
    pair.core.flush_prefix_cache()
    assert pair.incoming.num_under_way == 0
    pair.run()
    assert request.output_token_ids == expected_tokens(tokens, 6)
    pair.settle()


@pytest.mark.parametrize(("sizes", "turns"), [((3, 1), 2), ((3, 1), 4), ((3, 1), 8), ((1, 2), 4)])
def test_a_prefill_engine_goes_on_with_more_or_fewer_ranks_and_decode_computes_what_it_had(sizes, turns):
    before, after = sizes
    pair = Pair(ranks=(before, 1), pages=(33, 129))
    [engine] = pair.engines
    pair.core.executor.chunks_take = 5  # some prompts are computed whole, and their chunks still kept
    requests = [pair.add(f"{i}", [i] * (20 + i)) for i in range(6)]
    for _ in range(turns):
        pair.turn()
    executor = FakeExecutor(num_ranks=after, pages_per_rank=33, transfers=True)
    config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
    changed = SimpleNamespace(due=True, regroup=lambda: SimpleNamespace(executor=executor, config=config))
    engine.core.generations = changed
    engine._thread.look_at_processes()
    assert engine.turn(wait=False)
    changed.due = False
    assert engine.num_jobs == engine.buffers.num_kept == 0
    pair.core.executor.chunks_take = 0
    pair.run()
    assert [one.output_token_ids for one in requests] == [expected_tokens([i] * (20 + i), 6) for i in range(6)]
    later = pair.add("later", [9] * 60)
    pair.run()
    assert later.output_token_ids == expected_tokens([9] * 60, 6)
    assert executor.steps, "it computes prompts again"
    pair.settle()


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("sizes", [(3, 1), (1, 2)])
def test_decode_goes_on_with_more_or_fewer_ranks_and_has_the_rest_computed_there(sizes, turns):
    before, after = sizes
    pair = Pair(ranks=(1, before))
    pair.core.executor.chunks_take = 2
    given = prompts(9)
    requests = [pair.add(str(i), tokens) for i, tokens in enumerate(given)]
    for _ in range(turns):
        pair.turn()
    executor = FakeExecutor(num_ranks=after, pages_per_rank=33, max_rows_decode=4, transfers=True)
    config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
    pair.core.change(lambda: SimpleNamespace(executor=executor, config=config, facts=None))
    asked = len(pair.asked())
    pair.run()
    assert [request.output_token_ids for request in requests] == [expected_tokens(tokens, 6) for tokens in given]
    assert len(pair.asked()) > asked
    pair.settle()


_prompts = st.builds(
    lambda shared, length, rest: shared[:length] + rest,
    st.sampled_from([[7] * 30, list(range(100, 130)), [7] * 9 + [8] * 21]),
    st.integers(8, 30),
    st.lists(st.integers(0, 299), min_size=1, max_size=6),
)


class TransferMachine(RuleBasedStateMachine):
    """Any order of requests, aborts, steps of either side, lost messages, timeouts, values not finite and flushes, with little room."""

    @initialize(
        ranks=st.tuples(st.integers(1, 2), st.integers(1, 2)),
        pages=st.tuples(st.integers(8, 40), st.integers(12, 40)),
        prefills=st.integers(1, 2),
        below=st.sampled_from([{}, {"host_pages_per_rank": 6}, {"disk_pages": 30}]),
    )
    def make(self, ranks, pages, prefills, below):
        self.pair = Pair(prefills=prefills, ranks=ranks, pages=pages, decode=below)
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
                assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 6)

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
        for pause in self.pair.incoming._backoffs:
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
        for core, sends in (
            (self.pair.core, None),
            *((engine.core, engine.service.source) for engine in self.pair.engines),
        ):
            for index, rank in enumerate(core.scheduler.ranks):
                pool = rank.pool
                held = Counter(
                    page for request in [*rank.running, *rank.waiting] for page in request.pages + request.held_pages
                )
                held.update(page for load in rank.loads.under_way if load.request for page in load.pages)
                if sends is not None:
                    held.update(page for _, _, pages in sends.waiting[index] for page in pages)
                leaving = pool.num_used - len(held)  # of requests that ended while a step has a row of them
                assert leaving == 0 or core._under_way
                if not core._under_way:
                    assert {page: count for page, count in enumerate(pool._holders) if count} == held
                everywhere = [*pool._free, *pool._idle, *(page for page, count in enumerate(pool._holders) if count)]
                assert sorted(everywhere) == list(range(1, pool.num_pages))

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        pair.lost, pair.prefill_runs = (), True
        self.change_the_link(0, 0)
        for turn in range(3000):
            if not pair.core.has_unfinished:
                break
            if turn == 200:  # an `PrefillRequest` was lost
                self.decode_has_waited_too_long()
            self.enter(pair.turn())
        assert not self.alive, "every request ends"
        pair.settle()


TransferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTransferMachine = TransferMachine.TestCase
