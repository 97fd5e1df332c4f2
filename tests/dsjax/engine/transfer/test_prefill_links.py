"""Which prefill engine a prompt goes to, and that engines which share one get their own pages."""

from types import SimpleNamespace

import pytest
from engine_pair import Pair, prompts
from fake_executor import expected_tokens

from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import Request, RequestOptions
from dsjax.engine.transfer.messages import (
    ChunkGoneError,
    ChunkReady,
    FlushPages,
    PrefillLink,
    PulledChunk,
    Source,
    TransferFailed,
)
from dsjax.engine.transfer.prefill_links import PrefillLinks


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
            assert sum(pairs[0].incoming.awaited.values()) > 0
        if turn == 9:
            pairs[1].core.flush_prefix_cache()
        if not any(pair.core.has_unfinished for pair in pairs):
            break
    for index, request in enumerate(requests):
        assert index == 6 or request.output_token_ids == expected_tokens(given[index // 2], 6)
    assert all(pair.incoming.transfer_counts.completed > 3 for pair in pairs)
    for pair in pairs:
        pair.settle()
        assert sum(pair.incoming.awaited.values()) == 0
    names = [{ask.transfer for ask in pair.asked()} for pair in pairs]
    assert not names[0] & names[1]


def test_a_prompt_goes_to_the_prefill_engine_of_which_fewest_pages_are_awaited():
    pair = Pair(prefills=2, pages=(33, 65))
    pair.prefill_runs = False
    for first, tokens, awaited in ((0, 60, [14, 0]), (100, 40, [14, 9]), (200, 30, [14, 16])):
        pair.add(f"{first}", range(first, first + tokens))
        pair.turn()
        assert list(pair.incoming.awaited.values()) == awaited
    pair.prefill_runs = True
    pair.run()
    pair.settle()


def test_an_engine_that_reaches_its_own_prefill_engines_alone_ignores_which_one_a_request_names():
    pair = Pair()
    prefill = {"address": "127.0.0.1:1", "transfer": "room-7"}
    request = pair.add("a", list(range(50)), options=RequestOptions(prefill=prefill))
    pair.run()
    assert request.output_token_ids == expected_tokens(list(range(50)), 6)
    assert pair.incoming.transfer_counts.completed == 1
    pair.settle()


class IdleLink(PrefillLink):
    """A link that is not connected, or not any more."""

    def __init__(self):
        self.is_closed, self.sent = False, []

    is_idle = True

    def send(self, message):
        self.sent.append(message)

    def close(self):
        self.is_closed = True


def test_links_to_prefill_engines_that_are_gone_are_dropped_when_no_request_names_them():
    dialer = SimpleNamespace(link_to=lambda address: made.append(IdleLink()) or made[-1])
    made, links = [], PrefillLinks([], dialer)
    source = links.source
    for port in range(100):
        options = RequestOptions(prefill={"address": f"host:{port + 1}", "transfer": "a"})
        request = Request("a", [1, 2], 2, SamplingParams(), 1, 0, options=options)
        source.added(request)
        made[-1].receive(TransferFailed("", "it is gone"))
        links.begin_step(1000.0 * port)
        assert len(links.links) == 1, "a request names it, and it is left alone for a while"
        source.ended(request)
        links.begin_step(1000.0 * port + 100)
    assert (links.links, links._addresses, source.awaited, source._backoffs) == ({}, {}, {}, {})
    assert all(link.is_closed for link in made)
    for late in (links.report, lambda chunk: made[0].receive(ChunkReady("a", 1, 0, 1))):
        late(PulledChunk(0, 0, 1, [], False))
    links.scheduler = SimpleNamespace(landed=lambda *landed: None)
    links.begin_step(1e6)
    with pytest.raises(ChunkGoneError, match="is gone"):
        links.pull(Source(0), 1, None)


def test_a_prefill_engine_that_was_dropped_is_flushed_when_it_is_named_again_if_pages_were_flushed_meanwhile():
    made = []
    dialer = SimpleNamespace(link_to=lambda address: made.append(IdleLink()) or made[-1])
    links = PrefillLinks([], dialer)
    links.number_of("host:1")
    links.begin_step(0.0)
    links.flush()
    links.number_of("host:1")
    assert [link.sent for link in made] == [[], [FlushPages()]]
