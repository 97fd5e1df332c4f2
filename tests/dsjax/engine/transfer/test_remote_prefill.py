"""Whatever goes wrong between prefill and decode changes no token and costs no page. Also tests `transfer/prefill_service.py`."""

import time
from types import SimpleNamespace

import pytest
from engine_pair import Pair, prompts
from fake_executor import FakeExecutor
from greedy_requests import check_tokens, greedy

from dsjax.engine.contract.commands import Step, from_int32s
from dsjax.engine.schedule.landing_area import MOST_LANDED, LandingArea
from dsjax.engine.schedule.mesh_changer import MeshEpoch
from dsjax.engine.schedule.page_source import Lookup, RankPages
from dsjax.engine.schedule.pages import PagePool, extend_hashes
from dsjax.engine.schedule.request import RequestOptions
from dsjax.engine.transfer import messages
from dsjax.engine.transfer.messages import CancelTransfer, ChunkReady, PrefillRequest, PulledChunk, ReleaseChunk
from dsjax.engine.transfer.remote_prefill import RemotePrefills

ROOM_7 = {"address": "127.0.0.1:1", "transfer": "room-7"}


def added(pair, given, **options):
    return [pair.add(f"{i}", tokens, options=RequestOptions(**options)) for i, tokens in enumerate(given)]


def prefill_rows(pair):
    """The rows of prompts that the decode engine has computed."""
    steps = [command for command in pair.core.executor.commands if isinstance(command, Step)]
    return [row for step in steps for rank in step.ranks for row in rank.prefills]


@pytest.mark.parametrize("ranks", [(1, 1), (2, 3)])
@pytest.mark.parametrize("takes", [0, 3])
def test_tokens_are_those_of_one_engine_and_decode_computes_no_whole_page(ranks, takes):
    pair = Pair(ranks=ranks, pages=(129, 129))
    for core in (pair.core, *(engine.core for engine in pair.engines)):
        core.executor.chunks_take = takes
    pair.core.executor.keep_commands = True
    requests = added(pair, prompts(24))
    pair.run()
    check_tokens(*requests)
    pair.settle()
    lengths = [row.length for row in prefill_rows(pair)]
    assert max(lengths) <= pair.core.executor.limits.page_size
    assert pair.incoming.transfer_counts.given_up == 0
    assert pair.incoming.transfer_counts.completed > 8


def test_a_prompt_that_fits_a_page_or_is_nearly_cached_is_computed_by_decode():
    pair, long = Pair(local_tokens=9), list(range(40))
    for tokens in (long, [5, 6], [*long[:36], 1, 2, 3, 4, 5, 6, 7, 8], long):
        requests = added(pair, [tokens])
        pair.run()
        check_tokens(*requests)
        assert len(pair.asked()) == 1
    pair.settle()


def test_prompts_that_begin_alike_are_asked_for_once_and_each_is_told_what_was_cached():
    pair, tokens = Pair(), list(range(60))
    first = added(pair, [tokens] * 3)
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


def test_a_transfer_is_cancelled_when_the_last_request_that_waits_for_it_is_aborted():
    pair = Pair()
    pair.prefill_runs = False
    for name in "ab":
        pair.add(name, list(range(60)))
    pair.turn()
    [asked] = pair.asked()
    for name, cancelled in (("a", []), ("b", [CancelTransfer(asked.transfer)])):
        pair.core.abort(name)
        pair.turn()
        assert [message for message in pair.sent if isinstance(message, CancelTransfer)] == cancelled
    pair.settle()


def test_two_requests_that_were_handed_the_same_transfer_both_get_their_own_pages():
    pair = Pair()
    pair.incoming.connect = lambda address: 0
    requests = added(pair, [range(50), range(100, 150)], prefill=ROOM_7)
    pair.run()
    check_tokens(*requests)
    assert pair.incoming.transfer_counts.completed == 2
    pair.settle()


def test_a_prompt_in_a_queue_longer_than_the_time_limit_is_waited_for(monkeypatch):
    now = 1000.0  # a clock of its own: on a busy machine a turn takes longer than the time limit
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pair = Pair(timeout=0.1, pages=(257, 257))
    requests, waits = added(pair, [[70 * i + place % 70 for place in range(120)] for i in range(4)]), {}
    while pair.core.has_unfinished:
        pair.turn()
        now += 0.02
        for one in pair.incoming._transfers.values():
            if not one.offered_chunks:
                waits[one.name] = now - one.request_time
    assert max(waits.values()) > 0.2, "the queue is not as long as the test wants it"
    check_tokens(*requests)
    assert (pair.incoming.transfer_counts.completed, pair.incoming.transfer_counts.given_up) == (4, 0)
    pair.settle()


@pytest.mark.parametrize("has_room", [False, True])
def test_a_link_is_left_alone_for_what_it_does_not_send_and_not_for_what_finds_no_room_here(has_room):
    pair = Pair()
    if has_room:
        pair.core.executor.chunks_take = None
    else:
        pair.core.scheduler.ranks[0].loads.landing.make_room = lambda *_: False
    requests = added(pair, [range(50)])
    pair.turn()
    [transfer] = pair.incoming._transfers.values()
    while not (transfer.pulling if has_room else transfer.offers):
        pair.turn()
    pair.prefill_runs = False
    pair.turn()  # takes what has been said already
    transfer.last_message_time -= 1000
    pair.turn()
    assert pair.incoming.transfer_counts.given_up == 1
    assert pair.incoming._backoffs[0].holds(time.monotonic()) is has_room
    pair.run()
    check_tokens(*requests)
    pair.settle()


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("sizes", [(3, 1), (1, 2)])
def test_decode_goes_on_with_more_or_fewer_ranks_and_has_the_rest_computed_there(sizes, turns):
    before, after = sizes
    pair = Pair(ranks=(1, before))
    pair.core.executor.chunks_take = 2
    requests = added(pair, prompts(9))
    for _ in range(turns):
        pair.turn()
    executor = FakeExecutor(num_ranks=after, pages_per_rank=33, max_rows_decode=4, transfers=True)
    pair.core.change(lambda: MeshEpoch(executor, executor.config))
    asked = len(pair.asked())
    pair.run()
    check_tokens(*requests)
    assert len(pair.asked()) > asked
    pair.settle()


def decode_source(local_tokens=1):
    """The transfers of a decode engine with one rank and one prefill engine, without either."""
    pages = RankPages(PagePool(33, 4), LandingArea())
    source = RemotePrefills(1, local_tokens, timeout=10.0)
    source.bind([pages])
    return source


def waiting(source, name, tokens, names, cached=()):
    """A request for which the pages behind the cached ones are asked for."""
    request = greedy(name, tokens)
    assert source.lookup(0, request, names, cached, 8, now=0.0) is Lookup.WAIT
    [(_, asked)] = [sent for sent in source.take_messages() if isinstance(sent[1], PrefillRequest)]
    return request, asked


def commanded(source, now=1.0):
    source.begin_rank(0, now)
    return [command for _, command in source.commands()]


def test_pages_that_two_transfers_bring_are_awaited_from_the_other_one_when_the_first_ends():
    source, names = decode_source(), [b"%d" % page for page in range(5)]
    # Its beginning was cached, and is evicted then.
    first, _ = waiting(source, "first", range(21), names, cached=[1, 2])
    _, asked = waiting(source, "second", range(21), names)
    assert (asked.first, asked.end) == (0, 5)
    source.release(0, first)
    third = greedy("third", range(21))
    assert all(source.awaits(0, third, name) for name in names), "all five pages still come"
    assert source._transfer_by_request[third].name == asked.transfer
    source.cancel(0)
    assert not source._transfer_by_page


def test_an_offer_that_comes_twice_is_pulled_once_and_not_released_before_it_has_come():
    source, names = decode_source(), [b"0" * 32, b"1" * 32]
    request, asked = waiting(source, "a", range(9), names)
    offer = ChunkReady(asked.transfer, number=7, first=0, count=2, names=b"".join(names))
    for _ in range(2):
        source.receive(0, offer, now=1.0)
    [pull] = commanded(source)
    assert from_int32s(pull.ranks[0]).tolist() == [0, 7, 0, 0, 0, 7, 1, 1]
    source.receive(0, offer, now=1.0)
    assert commanded(source) == source.take_messages() == []
    assert source.num_under_way == 1
    assert request.is_loading
    for number in (0, 1):
        source.landed(0, number, True, now=2.0)
    assert source.transfer_counts.completed == 1
    assert source.transfer_counts.pages == 2


NAMES = [bytes([page]) * 32 for page in range(messages.CHUNK_PAGES + 2)]
WRONG_OFFERS = {
    "others' names": {"names": NAMES[0] + NAMES[2]},
    "no names": {"names": b""},
    "too few names": {"names": NAMES[0]},
    "the names of other places": {"first": 1},
    "a number that no chunk has": {"number": 2**31},
    "more pages than a chunk has": {"count": len(NAMES) - 1, "names": b"".join(NAMES[:-1])},
}


@pytest.mark.parametrize("fields", WRONG_OFFERS.values(), ids=WRONG_OFFERS)
def test_an_offer_that_cannot_be_or_is_of_other_pages_is_never_pulled_and_its_request_computes_them(fields, caplog):
    source = decode_source()
    request, asked = waiting(source, "a", range(4 * len(NAMES) + 1), NAMES)
    offer = {"transfer": asked.transfer, "number": 7, "first": 0, "count": 2, "names": NAMES[0] + NAMES[1]} | fields
    source.receive(0, ChunkReady(**offer), now=1.0)
    assert commanded(source) == []
    sent = [message for _, message in source.take_messages()]
    assert sent == [ReleaseChunk(offer["number"]), CancelTransfer(asked.transfer)]
    assert not request.is_loading
    assert (source.transfer_counts.refused, source.transfer_counts.given_up) == (1, 1)
    assert "not those asked for" in caplog.text


def test_chunks_that_are_not_full_take_the_room_of_full_ones_until_their_last_page_has_gone():
    source, names = decode_source(), [bytes([page]) * 32 for page in range(20)]
    source.ranks[0].pool.can_hold = lambda *_: True
    landing, most = source.ranks[0].landing, MOST_LANDED // messages.CHUNK_PAGES
    request, asked = waiting(source, "a", range(81), names)
    for number in range(10):
        pages = names[2 * number : 2 * number + 2]
        source.receive(0, ChunkReady(asked.transfer, number, 2 * number, 2, names=b"".join(pages)), now=1.0)

    def pulled():
        return [int(number) for pull in commanded(source) for number in from_int32s(pull.ranks[0])[1::8]]

    assert pulled() == list(range(most))
    assert landing.is_full
    assert source.transfer_counts.landed == MOST_LANDED
    for number in range(2 * most):
        source.landed(0, number, True, now=1.0)
    landing.load(0, names[0])
    assert pulled() == [], "the other page of the first chunk still lies in its memory"
    landing.load(0, names[1])
    assert pulled() == [most]
    source.release(0, request)  # nobody wants the rest: chunks go whole where others need their room
    names, before = [bytes([100 + page]) * 32 for page in range(2)], set(landing._pages)
    _, asked = waiting(source, "b", range(9), names)
    source.receive(0, ChunkReady(asked.transfer, 77, 0, 2, names=b"".join(names)), now=2.0)
    assert pulled() == [77]
    assert len(before & set(landing._pages)) in (len(before), len(before) - 2)


def test_a_prefill_engine_has_nothing_to_say_of_what_another_one_was_asked_for():
    source, names = decode_source(), [b"0" * 32, b"1" * 32]
    _, asked = waiting(source, "a", range(9), names)
    other = source.add_link()
    source.receive(other, ChunkReady(asked.transfer, 7, 0, 2, names=b"".join(names)), now=1.0)
    source.receive(other, messages.TransfersUnderWay([asked.transfer]), now=9.0)
    source.receive(other, messages.TransferFailed(asked.transfer, "no"), now=9.0)
    assert commanded(source, now=9.0) == []
    assert source.take_messages() == [(other, ReleaseChunk(7))]
    assert source.num_under_way == 1
    source.begin_step(now=10.5)
    assert source.num_under_way == 0, "what the other one said was no sign of life"


def test_a_request_that_needs_nothing_of_what_is_computed_for_it_names_the_last_page_when_it_cancels():
    source = decode_source()
    source.release(0, handed_request(source, 11, cache_salt="mine"))
    same = greedy("b", range(8), cache_salt="mine")
    assert source.take_messages() == [(1, CancelTransfer("room-7", extend_hashes(same, 4)[1]))]


def handed_request(source, tokens, **options):
    """A request of so many tokens, which another prefill engine computes already, under the name of a transfer."""
    source.connect = lambda address: source.add_link()
    request = greedy("handed", range(tokens), prefill=ROOM_7, **options)
    source.added(request)
    return request


def test_what_is_computed_for_a_request_goes_on_while_it_waits_for_pages_that_others_have_asked_for():
    source, names = decode_source(), [b"%d" % page * 32 for page in range(5)]
    request = handed_request(source, 21)
    for number, end in enumerate((1, 2)):  # one after the other: each brings a page of its prompt
        _, asked = waiting(source, f"other {number}", range(4 * end + 1), names[:end], cached=range(end - 1))
        assert source.awaits(0, request, names[end - 1])
        source.receive(0, ChunkReady(asked.transfer, number, end - 1, 1, names=names[end - 1]), now=1.0)
        source.begin_rank(0, now=1.0)
        source.landed(0, number, True, now=1.0)
    assert source.transfer_counts.completed == 2
    assert [message for _, message in source.take_messages()] == []
    assert source.lookup(0, request, names, [1, 2], 8, now=1.0) is Lookup.WAIT
    [(link, asked)] = source.take_messages()
    assert (link, asked.transfer, asked.first, asked.end) == (1, "room-7", 2, 5)


def test_nothing_is_kept_of_a_request_that_ends_before_its_prompt_was_asked_for():
    source = decode_source()
    source.ended(handed_request(source, 21))  # a smaller mesh cannot hold it: it was not released before
    assert not source._named_transfers
    assert not source._named_links


def test_what_an_executor_has_pulled_does_not_land_on_the_one_that_replaces_it():
    pair, landed = Pair(), []
    pair.decode.scheduled(SimpleNamespace(landed=lambda *arguments: landed.append(arguments)))
    pair.decode.report(PulledChunk(rank=0, link=0, number=12345, pages=[3], ok=True))
    executor = FakeExecutor(num_ranks=1, pages_per_rank=33, transfers=True)
    pair.decode.start(executor, executor.config)
    pair.decode.begin_step(0.0)
    assert landed == []
    assert pair.sent == [ReleaseChunk(12345)], "its prefill engine need not keep it"
    pair.decode.report(PulledChunk(rank=0, link=0, number=12346, pages=[4], ok=True))
    pair.decode.begin_step(1.0)
    assert landed == [(0, [4], True, 1.0)]


def test_the_window_page_of_the_last_border_comes_behind_the_pages():
    pair = Pair(windows=(30, 30), pages=(65, 65))
    pair.core.executor.keep_commands = True
    for length, first in ((38, 0), (38, 8), (22, 4)):  # whole, without its window page, its beginning
        requests = added(pair, [range(100, 100 + length)])
        pair.run()
        check_tokens(*requests)
        ask, end = pair.asked()[-1], (length - 1) // 4
        assert (ask.first, ask.end) == (first, end)
        assert sum(row.length for row in prefill_rows(pair)) == length - 4 * end
        pair.core.executor.commands.clear()
        pool = pair.core.scheduler.ranks[0].pool
        pool.release(pool.allocate(pool.num_free_windows, windows=True))
    pair.settle()
    assert not pair.core.scheduler.ranks[0].pool.num_windows - 1 - pool.num_free_windows
