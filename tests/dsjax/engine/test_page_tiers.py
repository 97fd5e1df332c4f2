"""Pages that leave the device for host memory come back as they were, and nobody waits who need not."""

import random

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from fake_executor import FakeExecutor, expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax import LLM, SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.page_tiers import HostTier
from dsjax.engine.request import Request
from dsjax.engine.scheduler import SchedulerConfig
from dsjax.errors import UserError


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["store", "fetch", "forget", "step"]), st.integers(0, 9))))
def test_each_page_has_a_slot_of_its_own_and_is_found_where_it_was_put(slots, actions):
    tier, memory, where = HostTier(slots), {}, {}
    for action, number in actions:
        name = bytes([number])
        if action == "store":
            slot = tier.store(name)
            assert (slot is None) == (name in where)
            if slot is not None:
                where = {other: at for other, at in where.items() if at != slot}
                where[name], memory[slot] = slot, name
        elif action == "fetch":
            for found in tier.find([name]):
                assert memory[tier.fetch(found)] == name
        elif action == "forget":
            tier.forget([name])
            where.pop(name, None)
        else:
            tier.begin_step()
        assert {name for name in (bytes([n]) for n in range(10)) if name in tier} == set(where)
        assert tier.counts().used_pages == len(where) <= slots


def test_what_was_fetched_outlives_what_was_only_stored():
    tier = HostTier(4)
    for name in b"abcd":
        tier.store(bytes([name]))
    tier.begin_step(), tier.begin_step()
    tier.fetch(b"a")
    for name in b"efg":
        tier.store(bytes([name]))
    assert b"a" in tier
    assert b"b" not in tier


def test_a_page_is_not_fetched_while_it_leaves():
    tier = HostTier(4)
    tier.store(b"a")
    assert tier.find([b"a"]) == []
    tier.begin_step()
    tier.begin_step()
    assert tier.find([b"a", b"b"]) == [b"a"]


def core(**sizes):
    executor = FakeExecutor(pages_per_rank=17, max_rows_decode=4, **sizes)
    return EngineCore(executor, SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16))


def run(engine, prompts, *, abort=()):
    """Tokens that each prompt gets, all added at once; `abort`: of these after a few steps."""
    requests = [
        Request(f"{i}", list(tokens), len(tokens), SamplingParams(temperature=0), 6, 0) for i, tokens in prompts
    ]
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
        assert steps < 3000, "nothing moves any more"
        if steps == 3:
            for name in abort:
                engine.abort(name)
    return {request.request_id: request.output_token_ids for request in requests}


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_without_a_tier_and_pages_come_back(in_flight, ranks):
    engine = core(num_ranks=ranks, host_pages_per_rank=60, max_in_flight=in_flight)
    choose = random.Random(4)
    beginnings = [[choose.randrange(300) for _ in range(24)] for _ in range(8)]
    number = 0
    for turn in range(12):
        prompts = []
        for _ in range(5):
            tail = [choose.randrange(300) for _ in range(choose.randrange(9))]
            prompts.append((number, choose.choice(beginnings) + tail))
            number += 1
        gone = [f"{prompts[0][0]}"] if turn % 3 == 0 else []
        found = run(engine, prompts, abort=gone)
        for name, tokens in prompts:
            if f"{name}" not in gone:
                assert found[f"{name}"] == expected_tokens(tokens, 6)
        assert all(rank.pool.num_used == 0 for rank in engine.scheduler.ranks)
    counts = [rank.pool.below.counts() for rank in engine.scheduler.ranks]
    assert all(one.stored > 20 and one.fetched > 20 for one in counts), counts


def test_requests_whose_pages_are_kept_give_way_to_one_that_needs_room():
    """Each of these needs most of the device's pages, and a beginning of it lies below."""
    engine = core(host_pages_per_rank=60)
    prompts = [[n] * 4 + list(range(n, n + 44)) for n in range(0, 200, 40)]
    for turn in range(4):
        found = run(engine, [(turn * 10 + i, tokens) for i, tokens in enumerate(prompts)])
        assert list(found.values()) == [expected_tokens(tokens, 6) for tokens in prompts]
    assert engine.scheduler.ranks[0].pool.below.counts().fetched > 20


def test_flushing_forgets_what_is_below_and_what_is_on_its_way():
    engine = core(host_pages_per_rank=60)
    prompts = [(i, [i] * 4 + list(range(40))) for i in range(4)]
    run(engine, prompts)
    engine.flush_prefix_cache()
    assert engine.scheduler.ranks[0].pool.below.counts().used_pages == 0
    before = engine.scheduler.ranks[0].pool.below.counts().fetched
    run(engine, [(10 + i, tokens) for i, tokens in prompts])
    assert engine.scheduler.ranks[0].pool.below.counts().fetched == before


def test_pages_that_come_after_a_flush_do_not_keep_their_request_waiting():
    """It needs all of the device's pages, and those that were on their way are found by nobody any more."""
    engine = core(host_pages_per_rank=60)
    tokens = list(range(56))
    run(engine, [(0, tokens)])
    run(engine, [(1, list(range(100, 156)))])
    request = Request("2", [*tokens, 7], 57, SamplingParams(temperature=0), 6, 0)
    engine.add(request)
    engine.step()
    assert request.is_arriving
    engine.scheduler.flush_prefix_cache()
    for _ in range(50):
        engine.step()
    assert request.output_token_ids == expected_tokens([*tokens, 7], 6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_drafting_checkpoint(tmp_path_factory.mktemp("tiers"))


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def load(checkpoint, **options):
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "max_model_len": 64}
    return LLM(str(checkpoint), dtype="float32", **sizes, **options)


def prompts():
    rng = np.random.default_rng(8)
    beginnings = [rng.integers(2, 290, size=40).tolist() for _ in range(4)]
    return [{"prompt_token_ids": beginnings[i % 4] + [int(t)]} for i, t in enumerate(rng.integers(2, 290, size=16))]


@pytest.fixture(scope="module")
def expected(checkpoint):
    llm = load(checkpoint)
    outputs = [list(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) for prompt in prompts()]
    llm.shutdown()
    return outputs


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "dp=1"},
        {"mesh": "dp=2,tp=2"},
        {"mesh": "tp=2", "mla_prefill": "CD", "mla_decode": "CD"},
        {"mesh": "dp=1", "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    ],
    ids=["dp=1", "dp=2,tp=2", "keys and values", "drafts"],
)
def test_a_models_tokens_are_the_same_and_its_pages_come_back(checkpoint, expected, options):
    llm = load(checkpoint, cache_tokens=80, host_cache_bytes=1 << 20, **options)
    try:
        outputs = [list(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) for prompt in prompts()]
        counts = [rank.pool.below.counts() for rank in llm.engine.core.scheduler.ranks]
        assert outputs == expected
        assert sum(one.fetched for one in counts) > 20, counts
    finally:
        llm.shutdown()


def test_room_for_less_than_a_page_is_refused(checkpoint):
    with pytest.raises(UserError, match="give at least"):
        load(checkpoint, host_cache_bytes=10)
