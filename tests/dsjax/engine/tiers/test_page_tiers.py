"""Pages that leave the device for host memory and the disk come back as they were, and nobody waits who need not."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from fake_executor import FakeExecutor, expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.backoff import FIRST_SECONDS
from dsjax.engine.contract.commands import DropPages, FetchPages, PlacePages, ReadPages, Step, StorePages
from dsjax.engine.core import EngineCore
from dsjax.engine.engine import attachments_of
from dsjax.engine.schedule import landing_area
from dsjax.engine.schedule.pages import extend_hashes
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.loading import lock_disk
from dsjax.engine.tiers import offload_tiers, page_files
from dsjax.engine.tiers.disk_tier import MOST_WRITING, DiskTier
from dsjax.engine.tiers.offload_tiers import OffloadAttachment
from dsjax.engine.tiers.page_tiers import HostTier
from dsjax.errors import UserError


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["store", "fetch", "forget", "step"]), st.integers(0, 9))))
def test_each_page_has_a_slot_of_its_own_and_is_found_where_it_was_put(slots, actions):
    tier, memory, where = HostTier(slots), {}, {}
    for action, number in actions:
        name = bytes([number])
        if action == "store":
            stored = tier.store(name)
            assert (stored is None) == (name in where)
            if stored is not None:
                slot, victim = stored
                assert victim == next((other for other, at in where.items() if at == slot), None)
                where = {other: at for other, at in where.items() if at != slot}
                where[name], memory[slot] = slot, name
        elif action == "fetch":
            if tier.can_fetch(name):
                assert memory[tier.fetch(name)] == name
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
    assert not tier.can_fetch(b"a")
    tier.begin_step()
    tier.begin_step()
    assert tier.can_fetch(b"a")
    assert not tier.can_fetch(b"b")


def written(tier, *names, ok=True, now=0.0):
    """Have pages written, and say so."""
    numbers = [tier.write(name) for name in names]
    assert all(number >= 0 for number in numbers)
    for number in numbers:
        tier.written(number, ok, now)


def test_a_page_is_found_on_the_disk_when_it_has_been_written_and_only_then():
    tier = DiskTier(4)
    assert tier.write(b"a") == -1, "what an earlier run left is not known yet"
    tier.listed([])
    number = tier.write(b"a")
    assert b"a" not in tier
    assert tier.write(b"a") == -1, "it is on its way"
    tier.written(number, True, 0.0)
    assert b"a" in tier
    assert tier.counts()[:6] == (1, 4, 1, 0, 0, 0)


def test_the_disks_room_is_never_exceeded_and_what_was_asked_for_stays():
    tier = DiskTier(4)
    tier.listed([b"old", b"new"])
    written(tier, b"a")
    tier.fetch(b"old")
    written(tier, b"b", b"c")
    assert tier.take_dropped() == (False, [b"new"])
    written(tier, b"d")
    assert tier.take_dropped() == (False, [b"a"])
    assert [name for name in (b"old", b"new", b"a", b"b", b"c", b"d") if name in tier] == [b"old", b"b", b"c", b"d"]
    smaller = DiskTier(1)
    smaller.listed([b"old", b"new"])
    assert b"new" in smaller
    assert smaller.take_dropped() == (False, [b"old"])


def test_a_page_that_is_forgotten_while_it_is_written_is_deleted_and_never_found():
    tier = DiskTier(4)
    tier.listed([])
    number = tier.write(b"a")
    tier.forget([b"a"])
    tier.written(number, True, 0.0)
    assert b"a" not in tier
    assert tier.take_dropped() == (False, [b"a"])
    number = tier.write(b"a")
    tier.flush()
    tier.written(number, True, 0.0)
    assert b"a" not in tier
    assert tier.take_dropped() == (True, [])


def test_a_disk_that_cannot_be_written_is_left_alone_for_longer_and_longer():
    tier = DiskTier(1000)
    tier.listed([b"old"])
    written(tier, b"a", b"b", ok=False, now=10.0)
    tier.begin_step(10.0 + FIRST_SECONDS / 2)
    assert tier.write(b"c") == -1
    assert b"old" in tier, "it can still be read"
    tier.begin_step(10.0 + FIRST_SECONDS)
    written(tier, b"c", ok=False, now=20.0)
    tier.begin_step(20.0 + 1.5 * FIRST_SECONDS)
    assert tier.write(b"d") == -1
    tier.begin_step(20.0 + 2 * FIRST_SECONDS)
    written(tier, b"d", now=30.0)
    written(tier, b"e", ok=False, now=40.0)
    tier.begin_step(40.0 + FIRST_SECONDS)
    assert all(tier.write(f"page {n}".encode()) >= 0 for n in range(MOST_WRITING))
    assert tier.write(b"one too many") == -1


def core(**sizes):
    executor = FakeExecutor(pages_per_rank=17, max_rows_decode=4, **sizes)
    config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
    return EngineCore(executor, config, attachments=attachments_of(config))


def tiers(engine):
    return engine.part(OffloadAttachment).source


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
        outputs = run(engine, prompts, abort=gone)
        for name, tokens in prompts:
            if f"{name}" not in gone:
                assert outputs[f"{name}"] == expected_tokens(tokens, 6)
        assert all(rank.pool.num_used == 0 for rank in engine.scheduler.ranks)
    counts = [host.counts() for host in tiers(engine).host]
    assert all(one.stored > 20 and one.fetched > 20 for one in counts), counts


def test_requests_whose_pages_are_kept_give_way_to_one_that_needs_room():
    """Each of these needs most of the device's pages, and a beginning of it lies below."""
    engine = core(host_pages_per_rank=60)
    prompts = [[n] * 4 + list(range(n, n + 44)) for n in range(0, 200, 40)]
    for turn in range(4):
        outputs = run(engine, [(turn * 10 + i, tokens) for i, tokens in enumerate(prompts)])
        assert list(outputs.values()) == [expected_tokens(tokens, 6) for tokens in prompts]
    assert tiers(engine).host[0].counts().fetched > 20


def test_flushing_forgets_what_is_below_and_what_is_on_its_way():
    engine = core(host_pages_per_rank=60)
    prompts = [(i, [i] * 4 + list(range(40))) for i in range(4)]
    run(engine, prompts)
    engine.flush_prefix_cache()
    assert tiers(engine).host[0].counts().used_pages == 0
    before = tiers(engine).host[0].counts().fetched
    run(engine, [(10 + i, tokens) for i, tokens in prompts])
    assert tiers(engine).host[0].counts().fetched == before


def test_pages_that_come_after_a_flush_do_not_keep_their_request_waiting():
    """It needs all of the device's pages, and those that were on their way are found by nobody any more."""
    engine = core(host_pages_per_rank=60)
    tokens = list(range(56))
    run(engine, [(0, tokens)])
    run(engine, [(1, list(range(100, 156)))])
    request = Request("2", [*tokens, 7], 57, SamplingParams(temperature=0), 6, 0)
    engine.add(request)
    engine.step()
    assert request.is_loading
    engine.scheduler.flush_prefix_cache()
    for _ in range(50):
        engine.step()
    assert request.output_token_ids == expected_tokens([*tokens, 7], 6)


DISKS = [
    {"disk_pages": 200},
    {"disk_pages": 200, "host_pages_per_rank": 3},
    {"disk_pages": 20, "host_pages_per_rank": 60},
]


def begin_alike(number, count=5, beginnings=8):
    """Prompts that begin with one of a few beginnings, the same ones for every `number`."""
    choose = random.Random(4)
    shared = [[choose.randrange(300) for _ in range(24)] for _ in range(beginnings)]
    choose = random.Random(number)
    tails = [[choose.randrange(300) for _ in range(choose.randrange(9))] for _ in range(count)]
    return [(1000 * number + i, choose.choice(shared) + tail) for i, tail in enumerate(tails)]


@pytest.mark.parametrize("takes", [0, 3, 20])
@pytest.mark.parametrize("below", DISKS, ids=["disk alone", "little host memory", "little disk"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_without_a_disk_however_long_it_takes(ranks, below, takes):
    engine = core(num_ranks=ranks, **below)
    engine.executor.disk_takes = takes
    for turn in range(12):
        prompts = begin_alike(turn)
        gone = [f"{prompts[0][0]}"] if turn % 3 == 0 else []
        outputs = run(engine, prompts, abort=gone)
        for name, tokens in prompts:
            if f"{name}" not in gone:
                assert outputs[f"{name}"] == expected_tokens(tokens, 6)
        assert all(rank.pool.num_used == 0 for rank in engine.scheduler.ranks)
    counts = tiers(engine).disk.counts()
    assert counts.stored > 10
    if below.get("host_pages_per_rank", 0) < 60:
        assert counts.fetched > 20, counts
        assert sum(rank.hits["disk"] for rank in engine.scheduler.ranks) > 40
    for rank in engine.scheduler.ranks:
        assert sum(rank.hits.values()) == rank.prefix_hits


def test_others_go_on_while_a_request_waits_for_the_disk():
    engine = core(disk_pages=200)
    run(engine, [(0, list(range(40)))])
    run(engine, [(1, list(range(100, 156))), (2, list(range(200, 256)))])
    engine.executor.disk_takes = None
    waiting = Request("3", list(range(40)), 40, SamplingParams(temperature=0), 6, 0)
    engine.add(waiting)
    engine.step()
    assert waiting.is_loading
    assert tiers(engine).is_reading
    other = Request("4", [5, 6, 7], 3, SamplingParams(temperature=0), 6, 0)
    engine.add(other)
    for _ in range(20):
        engine.step()
    assert other.output_token_ids == expected_tokens([5, 6, 7], 6)
    assert waiting.output_token_ids == []
    engine.executor.disk_takes = 0
    while engine.has_unfinished:
        engine.step()
    assert waiting.output_token_ids == expected_tokens(list(range(40)), 6)
    assert engine.scheduler.ranks[0].hits["disk"] > 5 * 4


def test_a_request_goes_on_without_a_disk_that_hangs(monkeypatch):
    monkeypatch.setattr(offload_tiers, "PATIENCE", 0.01)
    engine = core(disk_pages=200)
    run(engine, [(0, list(range(40)))])
    run(engine, [(1, list(range(100, 156))), (2, list(range(200, 256)))])
    engine.executor.disk_takes = None
    assert run(engine, [(3, list(range(40)))]) == {"3": expected_tokens(list(range(40)), 6)}
    assert tiers(engine).disk.counts().late == 1
    assert run(engine, [(4, list(range(100, 156)))]) == {"4": expected_tokens(list(range(100, 156)), 6)}
    assert tiers(engine).disk.counts().late == 1, "it is left alone for a while"


def test_reads_that_hang_after_their_request_has_gone_take_nobodys_room(monkeypatch):
    monkeypatch.setattr(offload_tiers, "PATIENCE", 0.01)
    monkeypatch.setattr(landing_area, "MOST_LANDED", 3)
    engine = core(disk_pages=200)
    engine.executor.disk_takes = 0
    for number in range(4):
        run(engine, [(number, list(range(60 * number, 60 * number + 56)))])
    engine.executor.disk_takes = None
    engine.add(Request("a", list(range(56)), 56, SamplingParams(temperature=0), 6, 0))
    engine.step()
    assert tiers(engine).is_reading
    engine.abort("a")
    tokens = list(range(60, 116))
    assert run(engine, [(9, tokens)]) == {"9": expected_tokens(tokens, 6)}


def test_a_disk_that_fails_costs_the_hits_and_nothing_else():
    engine = core(disk_pages=200, host_pages_per_rank=3)
    for turn in range(8):
        engine.executor.disk_fails = turn % 2 == 1
        prompts = begin_alike(turn)
        assert list(run(engine, prompts).values()) == [expected_tokens(tokens, 6) for _, tokens in prompts]
    counts = tiers(engine).disk.counts()
    assert counts.failed_reads
    assert counts.failed_writes


def test_the_next_engine_finds_what_the_last_one_left():
    first = core(disk_pages=200)
    for turn in range(4):
        run(first, begin_alike(turn))
    first.executor.page_reports(), first.executor.page_reports()
    second = core(disk_pages=200, disk=dict(first.executor.disk))
    prompts = begin_alike(9)
    assert list(run(second, prompts).values()) == [expected_tokens(tokens, 6) for _, tokens in prompts]
    assert second.scheduler.ranks[0].hits["disk"] > 40


@pytest.mark.parametrize("kind", [PlacePages, FetchPages, ReadPages, DropPages, StorePages, Step])
def test_an_interrupt_while_pages_are_sent_for_leaves_nothing_wrong(kind):
    """Whichever command it comes before, what is launched afterwards is right, and the disk keeps to its room."""
    engine = core(host_pages_per_rank=3, disk_pages=20)
    launch, left = engine.executor.launch, iter(range(1, 6))

    def interrupted(command):
        if isinstance(command, kind) and next(left, 0) in (2, 5):
            raise KeyboardInterrupt
        return launch(command)

    for turn in range(6):
        run(engine, begin_alike(turn))
        engine.executor.launch = interrupted
        requests = [
            Request(f"{name}+", list(tokens), len(tokens), SamplingParams(temperature=0), 6, 0)
            for name, tokens in begin_alike(turn + 50)
        ]
        for request in requests:
            engine.add(request)
        while engine.has_unfinished:
            try:
                engine.step()
            except KeyboardInterrupt:
                continue
        engine.executor.launch = launch
        for request in requests:
            assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 6)
    assert next(left, None) is None, "it came twice"


def test_what_only_the_devices_have_goes_to_the_disk_at_the_end_the_newest_first():
    first = core(disk_pages=8)
    first.executor.disk_takes = 0
    for number in range(2):
        run(first, [(number, list(range(100 * number, 100 * number + 25)))])
    assert not first.executor.disk
    first.shutdown()
    assert first.executor.closed
    first.executor.page_reports()
    newest, older = [], []
    for number, names in enumerate((older, newest)):
        request = Request("", list(range(100 * number, 100 * number + 25)), 25, SamplingParams(), 1, 0)
        names += [name for name in extend_hashes(request, 4) if name in first.executor.disk]
    assert len(newest) == 6, "all of them"
    assert len(first.executor.disk) == 8
    assert next(iter(first.executor.disk)) in older, "the next one to go"
    second = core(disk_pages=8, disk=dict(first.executor.disk))
    run(second, [(3, list(range(100, 125)))])
    assert second.scheduler.ranks[0].hits["disk"] == 24


def test_an_end_does_not_wait_for_a_disk_that_hangs(monkeypatch):
    monkeypatch.setattr(offload_tiers, "CLOSE_SECONDS", 0.05)
    first = core(disk_pages=1000)
    run(first, [(n, list(range(100 * n, 100 * n + 24))) for n in range(2)])
    first.executor.disk_takes = None
    first.shutdown()
    assert first.executor.closed


def test_flushing_empties_the_disk_and_wakes_who_waits_for_it():
    engine = core(disk_pages=200)
    run(engine, [(0, list(range(40)))])
    run(engine, [(1, list(range(100, 156))), (2, list(range(200, 256)))])
    engine.executor.disk_takes = None
    request = Request("3", list(range(40)), 40, SamplingParams(temperature=0), 6, 0)
    engine.add(request)
    engine.step()
    assert request.is_loading
    engine.flush_prefix_cache()
    for _ in range(30):
        engine.step()
    assert request.output_token_ids == expected_tokens(list(range(40)), 6)
    engine.executor.disk_takes = 0
    engine.executor.page_reports()
    assert not engine.executor.disk
    assert tiers(engine).disk.counts().used_pages == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_drafting_checkpoint(tmp_path_factory.mktemp("tiers"))


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def load(checkpoint, **options):
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "max_model_len": 64}
    llm = LLM(str(checkpoint), dtype="float32", **sizes, **options)
    llm.executor.buckets = dataclasses.replace(
        llm.executor.buckets, decode=(2,)
    )  # one program for decodes instead of two
    return llm


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


def test_room_for_less_than_a_page_is_refused(checkpoint):
    with pytest.raises(UserError, match="give at least"):
        load(checkpoint, host_cache_bytes=10)


def generated(llm):
    return [list(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) for prompt in prompts()]


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "dp=2,tp=2", "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        {"mesh": "tp=2", "mla_prefill": "CD", "mla_decode": "CD", "host_cache_bytes": 0},
    ],
    ids=["dp=2,tp=2, drafts", "keys and values, disk alone"],
)
def test_a_models_tokens_are_the_same_and_its_pages_come_back_after_a_restart_too(
    checkpoint, expected, options, tmp_path
):
    """The first engine has room for all in host memory, the second one for a page or two of each rank, 5 % of what is needed."""
    on_disk = {"disk_cache": str(tmp_path), "disk_cache_bytes": 1 << 22, "cache_tokens": 92}
    first = load(checkpoint, **on_disk, **{"host_cache_bytes": 1 << 20} | options)
    try:
        assert generated(first) == expected
        source = tiers(first.engine.core)
        hosts = sum(host.counts().fetched for host in source.host)
        disk = tiers(first.engine.core).disk.counts()
        assert (hosts or disk.fetched) > 20
        assert disk.stored > 20
        assert first.executor.limits.disk_page_bytes == page_files.bytes_on_disk(first.facts.page_bytes)
        with pytest.raises(UserError, match="in use by another engine"):
            load(checkpoint, **on_disk, **options)
    finally:
        first.shutdown()
    files = list(Path(tmp_path).glob("*/*/*.page"))
    assert {-(-file.stat().st_size // 4096) * 4096 for file in files} == {first.executor.limits.disk_page_bytes}
    files[0].write_bytes(files[0].read_bytes()[:-3])
    second = load(checkpoint, **on_disk, **{"host_cache_bytes": 1 << 14} | options)
    try:
        assert generated(second) == expected
        ranks = second.engine.core.scheduler.ranks
        assert sum(rank.hits["disk"] for rank in ranks) > 300
        for _ in range(2):  # several at a time, which have to give way to each other; one of them is given up
            second.engine.add_request("gone", prompts()[0], GREEDY)
            second.engine.step()
            second.engine.abort("gone")
            outputs = second.generate(prompts(), GREEDY)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert all(rank.pool.num_used == 0 for rank in ranks)
        assert len(ranks) > 1 or ranks[0].num_preemptions
        second.engine.flush_prefix_cache()
        assert tiers(second.engine.core).disk.counts().used_pages == 0
    finally:
        second.shutdown()
    assert not list(Path(tmp_path).glob("*/*/*.page"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"disk_cache": "x"}, "without --disk-cache-bytes"),
        ({"disk_cache_bytes": 5}, "without --disk-cache"),
        ({"disk_cache": "x", "disk_cache_bytes": 5, "enable_prefix_caching": False}, "turns off"),
        ({"disk_cache": "x", "disk_cache_bytes": 5, "record_steps": "y"}, "--record-steps does not go with"),
        ({"disk_cache": "/proc/nothing", "disk_cache_bytes": 1 << 20}, "cannot be used as a folder"),
    ],
)
def test_options_of_the_disk_that_cannot_be_are_refused(checkpoint, options, says):
    with pytest.raises(UserError, match=says):
        load(checkpoint, **options)


def test_a_mesh_of_several_processes_is_refused_a_disk(tmp_path):
    args = EngineArgs.from_options(disk_cache=str(tmp_path), disk_cache_bytes=1 << 20)
    with pytest.raises(UserError, match="does not work on a mesh of several processes"):
        lock_disk(args, object())


def test_a_disk_with_less_room_than_a_page_is_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match="give at least 4,096"):
        load(checkpoint, disk_cache=str(tmp_path), disk_cache_bytes=100)
