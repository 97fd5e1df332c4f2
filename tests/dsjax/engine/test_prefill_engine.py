"""A prefill engine keeps pages until decode has them, refuses bad requests, and ends. Also tests `transfer/prefill_service.py`."""

from types import SimpleNamespace

import msgspec
import pytest
from engine_pair import Pair, prefill_request
from fake_executor import FakeExecutor, expected_tokens
from waits import until

from dsjax.engine.contract.commands import int32s
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.engine_thread import EngineThread
from dsjax.engine.schedule.mesh_changer import MeshEpoch
from dsjax.engine.schedule.request import Request, RequestOptions
from dsjax.engine.transfer.messages import CancelTransfer, ChunkReady, PrefillRequest, ReleaseChunk, TransferFailed
from dsjax.serve.metrics import Metrics


class Peer:
    """A decode engine, by what it says and hears."""

    def __init__(self, engine):
        self.engine, self.heard = engine, []

    def __call__(self, message):
        self.heard.append(message)

    def say(self, *messages):
        for message in messages:
            self.engine.post(message, self)
        self.turn()

    def turn(self, times=1):
        for _ in range(times):
            self.engine.core.executor.move_chunks()
            self.engine.turn(wait=False)

    @property
    def chunks(self):
        return [message.number for message in self.heard if isinstance(message, ChunkReady)]


def assert_made(requests):
    assert [one.output_token_ids for one in requests] == [expected_tokens(one.prompt_token_ids, 6) for one in requests]


def test_what_each_prefill_engine_has_and_did_is_shown():
    pair = Pair(prefills=2, pages=(33, 65))
    metrics = Metrics("tiny", 1, 128, prefills=pair.engines)

    def values(name, **labels):
        each = [labels | {"model_name": "tiny", "prefill_engine": str(engine)} for engine in range(2)]
        return [metrics.registry.get_sample_value(f"dsjax_prefill_engine_{name}", one) for one in each]

    pair.core.executor.chunks_take = None
    for i in range(4):
        pair.add(f"{i}", [i] * 50)
    for _ in range(2):
        pair.turn()
    assert all(values("prompts", state="running"))
    for _ in range(25):
        pair.turn()
    assert (values("kept_pages"), values("prompts", state="waiting")) == ([24, 24], [0, 0]), "of two prompts each"
    assert all(96 <= tokens <= 98 for tokens in values("tokens_total"))
    assert all(values("step_seconds_total"))
    pair.core.executor.chunks_take = 0
    pair.run()
    pair.engines[0].error = RuntimeError()
    assert (values("kept_pages"), values("up")) == ([0, 0], [0, 1])
    pair.engines[0].error = None
    pair.settle()


def test_a_decode_engine_that_dies_ends_the_prefill_engine_of_its_process():
    pair, deaths = Pair(decode={"max_rows_prefill": 1}), []
    [engine] = pair.engines
    pair.core.executor.chunks_take, pair.core.executor.fail_at_step = None, 2
    thread = EngineThread(pair.core, on_death=deaths.append)
    pair.add("has its prompt computed", range(50))
    thread.start()
    until(lambda: pair.incoming.num_under_way)
    # A transfer is under way before the engine has been told of it.
    peer = Peer(engine)
    until(lambda: peer.turn() or engine.buffers.num_kept)
    assert engine.num_jobs
    engine.start()
    thread.add([Request("short", [1, 2], 2, SamplingParams(temperature=0), 6, 0)])
    thread.join(60)
    assert engine.num_jobs == engine.buffers.num_kept == 0
    assert len(deaths) == 1
    assert not engine.thread.alive
    assert engine.error is None


def test_a_prefill_engine_that_dies_says_so_and_is_asked_no_more():
    pair = Pair()
    engine = pair.engines[0]
    engine.core.executor.fail_at_step = 2
    engine.start()
    pair.prefill_runs = False
    requests = [pair.add(f"{i}", [i] * 60) for i in range(3)]
    until(lambda: not pair.turn() and not pair.core.has_unfinished, every=0.0005)
    assert_made(requests)
    assert isinstance(engine.error, RuntimeError)
    asked = len(pair.asked())
    pair.add("later", [9] * 60)
    pair.run()
    assert len(pair.asked()) - asked in (0, 1)
    assert engine.buffers.num_kept == engine.num_jobs == 0
    assert all(rank.pool.num_used == 0 for rank in pair.core.scheduler.ranks)


@pytest.mark.parametrize("salts", [(None, None), ("theirs", "mine")], ids=["other tokens", "another salt"])
def test_a_prompt_never_gets_the_pages_of_another_one_that_has_its_name(salts, caplog):
    pair = Pair(pages=(33, 65))
    tokens = [8 if salts == (None, None) else 7] * 41
    pair.engines[0].post(prefill_request("room-7", [7] * 41, salts[0]), None)
    pair.incoming.connect = lambda address: 0
    handed = {"address": "127.0.0.1:1", "transfer": "room-7"}
    request = pair.add("b", tokens, options=RequestOptions(cache_salt=salts[1], prefill=handed))
    pair.run()
    again = pair.add("again", tokens, options=RequestOptions(cache_salt=salts[1]))
    pair.run()
    assert_made([request, again])
    assert "another prompt is under way under this name" in caplog.text
    assert pair.incoming.transfer_counts.pages == 0, "the pages under this name are another prompt's"
    assert pair.incoming.transfer_counts.given_up == 1
    assert pair.engines[0].num_jobs == 1, "the first one goes on"
    pair.settle()


def test_a_transfer_and_its_chunks_obey_the_engine_that_asked_for_them_alone():
    pair = Pair()
    engine = pair.engines[0]
    owner, other = Peer(engine), Peer(engine)
    ask = prefill_request("room-7", range(33))
    owner.say(ask)
    engine.post(ask, None)  # whoever has the prompt may come after its decode engine
    owner.turn(8)
    kept = engine.buffers.num_kept
    assert owner.chunks
    other.say(CancelTransfer("room-7", ask.page), CancelTransfer("room-7"))
    other.say(*map(ReleaseChunk, owner.chunks), ask)
    assert (engine.num_jobs, engine.buffers.num_kept) == (1, kept)
    assert other.heard == [TransferFailed("room-7", "another engine has asked for it under this name")]
    assert not any(isinstance(message, TransferFailed) for message in owner.heard)
    owner.say(ReleaseChunk(owner.chunks[0]))
    assert engine.buffers.num_kept == kept - 1
    owner.say(CancelTransfer("room-7"))
    assert engine.num_jobs == engine.buffers.num_kept == 0
    pair.settle()


def test_a_transfer_ends_whose_last_chunk_is_released_before_the_step_is_entered_that_ends_its_request():
    pair = Pair()
    engine, executor = pair.engines[0], pair.engines[0].core.executor

    def receive(message):
        if isinstance(message, ChunkReady):
            engine.post(ReleaseChunk(message.number), receive)

    def meanwhile():  # the devices and decode are faster than this process
        while executor._queue:
            executor.wait(executor._queue[0])
        executor.move_chunks()
        engine._take()

    for name in ("computed", "cached"):
        engine.post(prefill_request(name, range(9)), receive)
        engine._take()
        while engine.core.has_unfinished:
            engine.core.step(meanwhile)
        executor.move_chunks()
        engine._take()
        assert engine.num_jobs == engine.buffers.num_kept == 0
    assert engine.buffers.pages_sent == 4
    assert engine.core.rest_seconds is None
    pair.settle()


def test_a_transfer_that_nobody_has_asked_for_yet_is_cancelled_by_who_knows_its_prompt():
    pair = Pair()
    engine = pair.engines[0]
    stranger, ask = Peer(engine), prefill_request("room-7", range(33))

    def jobs_after(message):
        engine.post(message, None)
        engine.turn(wait=False)
        return engine.num_jobs

    assert jobs_after(ask) == 1
    stranger.say(CancelTransfer("room-7"), CancelTransfer("room-7", bytes(32)))
    assert engine.num_jobs == 1
    stranger.say(CancelTransfer("room-7", ask.page))
    assert engine.num_jobs == 0
    # Whoever has the prompt may come after its decode engine.
    assert jobs_after(ask) == 0, "its decode engine has said that it needs nothing"
    assert jobs_after(prefill_request("room-7", range(1, 34))) == 1, "another prompt of that name was not cancelled"
    assert jobs_after(CancelTransfer("room-7")) == 0
    pair.settle()


@pytest.mark.parametrize(
    ("tokens", "first", "end"),
    [(range(9), 2, 2), (range(8), 0, 2), ([1, -1, 3, 4, 5], 0, 1), ([1, 2, 3, 4, 300], 0, 1)],
)
def test_what_makes_no_sense_is_refused_before_it_reaches_a_device(tokens, first, end):
    pair = Pair()
    peer, ask = Peer(pair.engines[0]), prefill_request("a", range(9))
    for given in (int32s(tokens), int32s(tokens) + b"?"):
        peer.say(PrefillRequest("odd", given, first, end))
        assert isinstance(peer.heard.pop(), TransferFailed)
    for wrong in (b"", prefill_request("a", range(1, 10)).page, prefill_request("a", range(9), "salt").page):
        peer.say(msgspec.structs.replace(ask, page=wrong))
        assert "are not those of the pages that it names" in peer.heard.pop().reason
    pair.settle()


@pytest.mark.parametrize(("sizes", "turns"), [((3, 1), 2), ((3, 1), 4), ((3, 1), 8), ((1, 2), 4)])
def test_a_prefill_engine_goes_on_with_more_or_fewer_ranks_and_decode_computes_what_it_had(sizes, turns):
    before, after = sizes
    executor = FakeExecutor(num_ranks=after, pages_per_rank=33, transfers=True)
    new = MeshEpoch(executor, executor.config, is_reduced=True)
    changed = SimpleNamespace(needs_change=True, regroup=lambda: new)
    pair = Pair(ranks=(before, 1), pages=(33, 129), generations=changed)
    [engine] = pair.engines
    pair.core.executor.chunks_take = 5  # some prompts are computed whole, and their chunks still kept
    requests = [pair.add(f"{i}", [i] * (20 + i)) for i in range(6)]
    for _ in range(turns):
        pair.turn()
    engine.thread.look_at_processes()
    assert engine.turn(wait=False)
    changed.needs_change = False
    assert engine.num_jobs == engine.buffers.num_kept == 0
    pair.core.executor.chunks_take = 0
    pair.run()
    requests.append(pair.add("later", [9] * 60))
    pair.run()
    assert_made(requests)
    assert executor.steps, "it computes prompts again"
    pair.settle()


def counted_waits(engine):
    """A function that turns an engine and returns how often its thread would have waited for commands; it waits no more."""
    commands, waits = engine.thread._commands, []

    def get(**timeout):
        waits.extend([True] * bool(timeout))
        return commands.get(block=False)

    def turn():
        waits.clear()
        engine.turn()
        return len(waits)

    engine.thread._commands = SimpleNamespace(get=get, put=commands.put, empty=commands.empty)
    return turn


def test_a_prefill_engine_waits_when_three_steps_in_a_row_have_computed_nothing_and_not_before():
    pair = Pair(pages=(17, 129))
    [engine] = pair.engines
    # Chunks of 6 pages at most, each taken after three looks: the prompts go on page by page, in steps between which nobody says anything.
    engine.buffers._room, pair.core.executor.chunks_take = [6], 3
    for name in range(4):
        pair.add(f"{name}", [name] * 50)
    waits, pair.prefill_runs = counted_waits(engine), False
    while pair.core.has_unfinished:
        engine.core.executor.move_chunks()
        if engine.core.has_unfinished:
            assert not waits(), "a step that computes nothing may send pages, and the next one uses their room"
        else:
            engine.turn(wait=False)
        pair.turn()

    pair.core.executor.chunks_take = None  # nobody takes anything any more
    engine.buffers._room = [6]
    for name in range(4, 8):
        pair.add(f"{name}", [name] * 50)
    for _ in range(60):
        engine.turn(wait=False)
        pair.turn()
    assert engine.core.has_unfinished
    engine.thread.call(lambda: None)  # counting begins anew when something is said
    found = [waits() for _ in range(5)]
    assert found == [1, 0, 0, 1, 1], "the first one takes what was said, and three steps compute nothing"
