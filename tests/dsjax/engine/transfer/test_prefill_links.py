"""Which prefill engine a prompt goes to, and that engines which share one get their own pages."""

import pytest
from engine_pair import Pair, prompts
from fake_executor import expected_tokens

from dsjax.engine.schedule.request import RequestOptions


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


def test_an_engine_that_reaches_its_own_prefill_engines_alone_ignores_which_one_a_request_names():
    pair = Pair()
    prefill = {"address": "127.0.0.1:1", "transfer": "room-7"}
    request = pair.add("a", list(range(50)), options=RequestOptions(prefill=prefill))
    pair.run()
    assert request.output_token_ids == expected_tokens(list(range(50)), 6)
    assert pair.incoming.transfer_counts.completed == 1
    pair.settle()
