"""Which prefill engine a prompt goes to, and that engines which share one get their own pages."""

from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from engine_pair import Pair, prompts
from greedy_requests import check_tokens, greedy

from dsjax.engine.schedule.request import RequestOptions
from dsjax.engine.transfer import messages
from dsjax.engine.transfer.prefill_links import PrefillLinks


@pytest.mark.parametrize("prefills", [1, 2])
def test_decode_engines_share_the_prefill_engines_and_nothing_of_one_comes_to_another(prefills):
    first = Pair(prefills=prefills, pages=(65, 33))
    pairs = [first, Pair(engines=first.engines, pages=(65, 33))]
    for pair in pairs:
        pair.core.executor.chunks_take = 2
    requests = [pair.add(f"{i}", tokens) for i, tokens in enumerate(prompts(18, seed=5)) for pair in pairs]
    for turn in range(2000):
        for pair in pairs:
            pair.turn()
        if turn == 5:
            pairs[0].core.abort("3")
            assert sum(pairs[0].incoming.pages_awaited_from.values()) > 0
        if turn == 9:
            pairs[1].core.flush_prefix_cache()
        if not any(pair.core.has_unfinished for pair in pairs):
            break
    del requests[6]  # the one that was aborted
    check_tokens(*requests)
    assert all(pair.incoming.transfer_counts.completed > 3 for pair in pairs)
    for pair in pairs:
        pair.settle()
        assert sum(pair.incoming.pages_awaited_from.values()) == 0
    names = [{ask.transfer for ask in pair.asked()} for pair in pairs]
    assert not names[0] & names[1]


def test_a_prompt_goes_to_the_prefill_engine_of_which_fewest_pages_are_awaited():
    pair = Pair(prefills=2, pages=(33, 65))
    pair.prefill_runs = False
    for first, tokens, awaited in ((0, 60, [14, 0]), (100, 40, [14, 9]), (200, 30, [14, 16])):
        pair.add(f"{first}", range(first, first + tokens))
        pair.turn()
        assert list(pair.incoming.pages_awaited_from.values()) == awaited
    pair.prefill_runs = True
    pair.run()
    pair.settle()


def test_an_engine_that_reaches_its_own_prefill_engines_alone_ignores_which_one_a_request_names():
    pair = Pair()
    prefill = {"address": "127.0.0.1:1", "transfer": "room-7"}
    request = pair.add("a", range(50), options=RequestOptions(prefill=prefill))
    pair.run()
    check_tokens(request)
    assert pair.incoming.transfer_counts.completed == 1
    pair.settle()


@pytest.fixture
def idle():
    """A list of the links that are made, none of them connected, and the `PrefillLinks` that makes them, without an engine."""
    made = []
    return made, PrefillLinks([], SimpleNamespace(link_to=lambda address: made.append(Mock(is_idle=True)) or made[-1]))


def test_links_to_prefill_engines_that_are_gone_are_dropped_when_no_request_names_them(idle):
    (made, links), source = idle, idle[1].source
    for port in range(100):
        request = greedy("a", [1, 2], prefill={"address": f"host:{port + 1}", "transfer": "a"})
        source.added(request)
        made[-1].receive(messages.TransferFailed("", "it is gone"))
        links.begin_step(1000.0 * port)
        assert len(links.links) == 1, "a request names it, and it is left alone for a while"
        source.ended(request)
        links.begin_step(1000.0 * port + 100)
    assert (links.links, links._addresses, source.pages_awaited_from, source._backoffs) == ({}, {}, {}, {})
    assert all(link.close.called for link in made)
    for late in (links.report, lambda chunk: made[0].receive(messages.ChunkReady("a", 1, 0, 1))):
        late(messages.PulledChunk(0, 0, 1, [], False))
    links.scheduler = SimpleNamespace(landed=lambda *landed: None)
    links.begin_step(1e6)
    with pytest.raises(messages.ChunkGoneError, match="is gone"):
        links.pull(messages.Source(0), 1, None)


def test_a_prefill_engine_that_was_dropped_is_flushed_when_it_is_named_again_if_pages_were_flushed_meanwhile(idle):
    made, links = idle
    links.number_of("host:1")
    links.begin_step(0.0)
    links.flush()
    links.number_of("host:1")
    assert [link.send.call_args_list for link in made] == [[], [call(messages.FlushPages())]]
