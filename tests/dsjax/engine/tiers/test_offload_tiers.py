"""Offload tiers under requests: pages come back as they left, and nobody waits who need not.
Also tests `schedule/attachment.py`, `schedule/landing_area.py` and `schedule/page_loads.py`."""

import random

import pytest
from fake_executor import expected_tokens
from greedy_requests import check_tokens, greedy, small_core

from dsjax.engine.contract.commands import DropPages, FetchPages, PlacePages, ReadPages, Step, StorePages
from dsjax.engine.schedule import landing_area
from dsjax.engine.schedule.pages import extend_hashes
from dsjax.engine.tiers import offload_tiers
from dsjax.engine.tiers.offload_tiers import OffloadAttachment


def tiers(engine):
    return engine.part(OffloadAttachment).source


def run(engine, prompts, *, abort=()):
    """Tokens that each prompt gets, all added at once; `abort`: of these after a few steps."""
    requests = added(engine, prompts)
    for step in range(3000):
        engine.step()
        for name in abort if step == 2 else ():
            engine.abort(name)
        if not engine.has_unfinished:
            return {request.request_id: request.output_token_ids for request in requests}
    pytest.fail("nothing moves any more")


def added(engine, prompts):
    requests = [greedy(name, tokens) for name, tokens in prompts]
    for request in requests:
        engine.add(request)
    return requests


def begin_alike(number, count=5, beginnings=8):
    """Prompts that begin with one of a few beginnings, the same ones for every `number`."""
    choose = random.Random(4)
    shared = [[choose.randrange(300) for _ in range(24)] for _ in range(beginnings)]
    choose = random.Random(number)
    tails = [[choose.randrange(300) for _ in range(choose.randrange(9))] for _ in range(count)]
    return [(1000 * number + i, choose.choice(shared) + tail) for i, tail in enumerate(tails)]


HOST_ALONE, DISK_ALONE = {"host_pages_per_rank": 60}, {"disk_pages": 200}
LITTLE_HOST, LITTLE_DISK = DISK_ALONE | {"host_pages_per_rank": 3}, HOST_ALONE | {"disk_pages": 20}


@pytest.mark.parametrize(
    ("below", "ranks", "in_flight", "disk_takes"),
    [
        (HOST_ALONE, 1, 1, 0),
        (HOST_ALONE, 2, 2, 0),
        (DISK_ALONE, 1, 2, 0),
        (DISK_ALONE, 2, 1, 3),
        (DISK_ALONE, 2, 2, 20),
        (LITTLE_HOST, 2, 1, 0),
        (LITTLE_HOST, 1, 2, 3),
        (LITTLE_HOST, 1, 1, 20),
        (LITTLE_DISK, 2, 2, 3),
        (LITTLE_DISK, 1, 1, 0),
        (LITTLE_DISK, 2, 1, 20),
    ],
)
def test_tokens_are_those_without_a_tier_however_long_the_disk_takes_and_pages_come_back(
    below, ranks, in_flight, disk_takes
):
    """Every pair of values occurs."""
    engine = small_core(num_ranks=ranks, max_in_flight=in_flight, **below)
    engine.executor.disk_takes = disk_takes
    for turn in range(12):
        prompts = begin_alike(turn)
        gone = [f"{prompts[0][0]}"] if turn % 3 == 0 else []
        outputs = run(engine, prompts, abort=gone)
        for name, tokens in prompts:
            if f"{name}" not in gone:
                assert outputs[f"{name}"] == expected_tokens(tokens, 6)
        assert all(rank.pool.num_used == 0 for rank in engine.scheduler.ranks)
    if "host_pages_per_rank" in below and below != LITTLE_HOST:
        counts = [host.counts() for host in tiers(engine).host]
        assert all(one.stored > 20 and one.fetched > 20 for one in counts), counts
    if "disk_pages" in below:
        counts = tiers(engine).disk.counts()
        assert counts.stored > 10
        if below != LITTLE_DISK:
            assert counts.fetched > 20, counts
            assert sum(rank.hits["disk"] for rank in engine.scheduler.ranks) > 40


def test_pages_that_come_after_a_flush_do_not_keep_their_request_waiting():
    """It needs all of the device's pages, and those that were on their way are found by nobody any more."""
    engine = small_core(host_pages_per_rank=60)
    for number, tokens in enumerate((range(56), range(100, 156))):
        run(engine, [(number, tokens)])
    [request] = added(engine, [(2, [*range(56), 7])])
    engine.step()
    assert request.is_loading
    engine.scheduler.flush_prefix_cache()
    for _ in range(50):
        engine.step()
    check_tokens(request)


def on_disk_alone():
    """An engine whose disk alone has the pages of a first prompt, and the disk hangs."""
    engine = small_core(disk_pages=200)
    for prompts in ([(0, range(40))], [(1, range(100, 156)), (2, range(200, 256))]):
        run(engine, prompts)
    engine.executor.disk_takes = None
    return engine


def waiting_for_the_disk(engine):
    """The first prompt again, which waits for its pages."""
    [request] = added(engine, [(3, range(40))])
    engine.step()
    assert request.is_loading
    return request


def test_others_go_on_while_a_request_waits_for_the_disk():
    engine = on_disk_alone()
    waiting = waiting_for_the_disk(engine)
    assert tiers(engine).is_reading
    [other] = added(engine, [(4, [5, 6, 7])])
    for _ in range(20):
        engine.step()
    check_tokens(other)
    assert waiting.output_token_ids == []
    engine.executor.disk_takes = 0
    while engine.has_unfinished:
        engine.step()
    check_tokens(waiting)
    assert engine.scheduler.ranks[0].hits["disk"] > 5 * 4


def test_a_request_goes_on_without_a_disk_that_hangs(monkeypatch):
    monkeypatch.setattr(offload_tiers, "PATIENCE", 0.01)
    engine = on_disk_alone()
    for tokens in (list(range(40)), list(range(100, 156))):
        assert run(engine, [("a", tokens)]) == {"a": expected_tokens(tokens, 6)}
        assert tiers(engine).disk.counts().late == 1, "afterwards it is left alone for a while"


def test_reads_that_hang_after_their_request_has_gone_take_nobodys_room(monkeypatch):
    monkeypatch.setattr(offload_tiers, "PATIENCE", 0.01)
    monkeypatch.setattr(landing_area, "MOST_LANDED", 3)
    engine = small_core(disk_pages=200)
    engine.executor.disk_takes = 0
    for number in range(4):
        run(engine, [(number, range(60 * number, 60 * number + 56))])
    engine.executor.disk_takes = None
    added(engine, [("a", range(56))])
    engine.step()
    assert tiers(engine).is_reading
    engine.abort("a")
    tokens = list(range(60, 116))
    assert run(engine, [(9, tokens)]) == {"9": expected_tokens(tokens, 6)}


@pytest.mark.parametrize("kind", [PlacePages, FetchPages, ReadPages, DropPages, StorePages, Step])
def test_an_interrupt_while_pages_are_sent_for_leaves_nothing_wrong(kind):
    """Whichever command it comes before, what is launched afterwards is right, and the disk keeps to its room."""
    engine = small_core(host_pages_per_rank=3, disk_pages=20)
    launch, left = engine.executor.launch, iter(range(1, 6))

    def interrupted(command):
        if isinstance(command, kind) and next(left, 0) in (2, 5):
            raise KeyboardInterrupt
        return launch(command)

    for turn in range(6):
        run(engine, begin_alike(turn))
        engine.executor.launch = interrupted
        requests = added(engine, begin_alike(turn + 50))
        while engine.has_unfinished:
            try:
                engine.step()
            except KeyboardInterrupt:
                continue
        engine.executor.launch = launch
        check_tokens(*requests)
    assert next(left, None) is None, "it came twice"


def test_what_only_the_devices_have_goes_to_the_disk_at_the_end_the_newest_first():
    first, prompts = small_core(disk_pages=8), (range(25), range(100, 125))
    first.executor.disk_takes = 0
    for number, tokens in enumerate(prompts):
        run(first, [(number, tokens)])
    assert not first.executor.disk
    first.shutdown()
    assert first.executor.closed
    first.executor.page_reports()
    older, newest = (
        [name for name in extend_hashes(greedy("", tokens), 4) if name in first.executor.disk] for tokens in prompts
    )
    assert len(newest) == 6, "all of them"
    assert len(first.executor.disk) == 8
    assert next(iter(first.executor.disk)) in older, "the next one to go"
    second = small_core(disk_pages=8, disk=dict(first.executor.disk))
    run(second, [(3, prompts[1])])
    assert second.scheduler.ranks[0].hits["disk"] == 24


def test_an_end_does_not_wait_for_a_disk_that_hangs(monkeypatch):
    monkeypatch.setattr(offload_tiers, "CLOSE_SECONDS", 0.05)
    first = small_core(disk_pages=1000)
    run(first, [(n, range(100 * n, 100 * n + 24)) for n in range(2)])
    first.executor.disk_takes = None
    first.shutdown()
    assert first.executor.closed


def test_flushing_empties_the_disk_and_wakes_who_waits_for_it():
    engine = on_disk_alone()
    request = waiting_for_the_disk(engine)
    engine.flush_prefix_cache()
    for _ in range(30):
        engine.step()
    check_tokens(request)
    engine.executor.disk_takes = 0
    engine.executor.page_reports()
    assert not engine.executor.disk
    assert tiers(engine).disk.counts().used_pages == 0
