"""What fails beside the engine costs itself alone: every thread and task is listed, and each kind of background work is made to fail."""

import ast
import asyncio
import csv
import errno
import inspect
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from fake_executor import FakeExecutor
from group_in_threads import enter, groups
from waits import until

from dsjax import background
from dsjax.background import WORK, WorkQueue, contained, failure_counts, start_thread
from dsjax.engine.afd.messages import OPEN, Answered, Open, Opened
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.elastic import compile_ahead, follower
from dsjax.engine.engine_thread import AsyncEngine
from dsjax.engine.expert_process import ExpertProcess
from dsjax.engine.experts import expert_balancer
from dsjax.engine.experts.eplb import EplbConfig
from dsjax.engine.stats import EngineObserver
from dsjax.engine.text.output_processor import Completion
from dsjax.engine.tiers import disk_pages, event_publisher, page_folder
from dsjax.engine.transfer import chunk_network, jax_transport, messages, page_chunks, page_network
from dsjax.hosts import HostOptions, coordination
from dsjax.hosts.group import GroupError
from dsjax.hosts.links import Links
from dsjax.hosts.wire import Announcement
from dsjax.messaging import Link
from dsjax.serve import connections, headless
from dsjax.serve.front_ends import processes
from dsjax.serve.front_ends.messages import Add
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions
from dsjax.serve.server import Server

ROOT = Path(__file__).parents[2]
STARTS = {
    *("Thread", "Timer", "start_thread", "WorkQueue", "ThreadPoolExecutor", "ProcessPoolExecutor"),
    *("create_task", "ensure_future", "run_in_executor", "to_thread", "run_coroutine_threadsafe"),
}
"""What starts a thread or a task, by the last part of its name."""


def starts(node: ast.AST, within: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the functions within `node` that start threads or tasks."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        within = (*within, node.name)
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in STARTS:
        yield ".".join(within)
    for inner in ast.iter_child_nodes(node):
        yield from starts(inner, within)


def started() -> set[tuple[str, str]]:
    package = ROOT / "dsjax"
    files = {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    return {(file, name) for file, text in files.items() for name in starts(ast.parse(text))}


def rows() -> list[dict[str, str]]:
    """The rows of docs/background-work.csv."""
    with (ROOT / "docs" / "background-work.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_thread_and_task_is_listed_with_what_its_failure_costs():
    listed = {(row["file"], name) for row in rows() for name in row["started in"].split(", ")}
    assert listed == started(), (
        "list it in docs/background-work.csv, say what its failure costs, and have it fail below"
    )


def test_every_named_work_is_in_that_list():
    assert {work for row in rows() for work in row["work"].split(", ") if work} == set(WORK)


def once(error, then=lambda *arguments: None):
    """A function that raises when it is called first, and is `then` afterwards."""
    failures = [error]

    def call(*arguments, **named):
        try:
            first = failures.pop()  # of one thread alone, whichever it is
        except IndexError:
            return then(*arguments, **named)
        raise first

    return call


BROKEN = ArithmeticError("injected")
"""What no code expects."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(background, "RESTART_SECONDS", 0.0)


# One function for each kind of work, given the fixtures that it names: it injects a failure, and sees that what has nothing to do with
# it goes on.


def fail_expert_balancing(monkeypatch):
    """The next decision is made; nothing is raised into the engine's thread."""
    slots = SimpleNamespace(expert_bytes=1, seconds=None)
    executor = SimpleNamespace(extension=lambda kind: SimpleNamespace(slots=slots))
    balancer = expert_balancer.ExpertBalancer(EplbConfig(window_size=4, step_interval=1))
    balancer.start(executor, None)
    stays = expert_balancer.Decision([], [], (1.0, 1.0))
    monkeypatch.setattr(expert_balancer, "decide", once(BROKEN, lambda *a, **k: stays))
    window = SimpleNamespace(logical=np.ones((1, 4)), by_rank=np.ones((1, 2)))
    begun = []
    monkeypatch.setattr(balancer, "_begin", begun.append)
    for _ in range(2):
        balancer._steps += 1
        balancer._record_window(window, decide=True)
        until(balancer._pending_decision.done)
        balancer.after_step(0.1)
    assert begun == [stays]
    # A pool that has no thread for it is no end either.
    monkeypatch.setattr(balancer._pool, "submit", once(RuntimeError("can't start new thread")))
    balancer._record_window(window, decide=True)
    assert failure_counts()["expert balancing"] >= 2


def fail_expert_calls(endpoints):
    """Who has called is disconnected, so that it calls again: no call is lost in silence."""
    half = SimpleNamespace(wire=SimpleNamespace(empty_row=lambda _: 0))
    side = SimpleNamespace(half=lambda step: half, first=0)
    writer = SimpleNamespace(side=side, placement=np.zeros((1, 1), np.int32))
    experts, caller = endpoints(), endpoints()
    process = ExpertProcess(None, writer, {}, experts)
    process._receive_call = once(BROKEN, lambda message: process._reply(message.sender, Answered()))

    def call():
        peer = caller.connect(experts.address, "attention")
        opened = peer.request(OPEN, Open({}, bytes(4), b"one"), kind=Opened).result(60)
        link = Link(caller, opened.address, opened.ticket, opened.name, "attention")
        link.send(b"a call")
        return peer, link

    peer, _ = call()
    until(lambda: peer.lost)
    assert call()[1].receive(60)
    caller.close()
    process.close()


def fail_compile_ahead(monkeypatch):
    args = SimpleNamespace(compile_ahead=1, model="/nowhere", revision=None, expert_mesh=None)
    ahead = compile_ahead.CompileAhead(args, None)
    monkeypatch.setattr(compile_ahead, "enable_compile_cache", lambda: None)
    monkeypatch.setattr(compile_ahead, "resolve", once(BROKEN))
    ahead.begin(None, None, [0], "f32")
    ahead._thread.join(60)
    assert not ahead._thread.is_alive()


def chunks():
    made = object.__new__(page_chunks.PageChunks)
    made._offers, made._pulls = WorkQueue("chunk offer", "offers"), WorkQueue("chunk pull", "pulls", threads=2)
    made._lock, made._closed, made._landed, made._devices = threading.Lock(), False, {}, {0: None}
    return made


def fail_chunk_offer():
    """Who waits for the chunk is told of it, and finds it gone, as it is dropped too; the next one is offered, and the next are dropped."""
    made, offered, dropped = chunks(), [], []
    made.send_chunks(once(BROKEN, lambda *offer: offered.append(offer)), once(BROKEN, dropped.append))
    for number in (1, 2):
        made._offers.put(partial(lambda numbers: made._drop(numbers), [6 + number]))
        made._offers.put(partial(made._offer_when_computed, number, {}, is_kept=True))
    until(lambda: len(offered) == 2)
    assert offered == [(1, None), (2, {})]
    assert dropped == [[1], [8]]
    made.close()


def fail_chunk_pull():
    """Both the transport and who is told of it."""
    made, reports, before = chunks(), [], failure_counts()["chunk pull"]
    made.pull_chunks(once(BROKEN, lambda *arguments: {"latent": 1}), once(BROKEN, reports.append))
    for number in range(6):
        made._landed[0, number] = (None, 0)
        landing = page_chunks.Landing(0, messages.Source(0, ""), number, [number])
        made._pulls.put(partial(made._pull_and_report, landing))
    until(lambda: len(reports) == 5)
    assert sum(report.ok for report in reports) >= 4
    until(lambda: failure_counts()["chunk pull"] == before + 2)  # the thread whose report has failed may be the last
    made.close()


def fail_chunk_drain(monkeypatch):
    transport = object.__new__(jax_transport.JaxTransport)
    transport.address, transport._device, transport._tickets = "", None, {1: b""}
    monkeypatch.setattr(transport, "pull", once(BROKEN))
    transport.withdraw(1, {}, pulled=False)


def fail_chunk_server(endpoints):
    """A transport that raises is answered: who pulls need not wait out its limit."""
    transport = SimpleNamespace(address="here", publish=once(BROKEN, lambda *a: b"t"), withdraw=once(BROKEN))
    keeper = endpoints()
    server = chunk_network.ChunkServer(keeper, lambda number, take: take({}), transport, 0.0)
    peer = endpoints().connect(keeper.address, "decode")
    with pytest.raises(RuntimeError, match="injected"):
        peer.request("pull", 5).result(60)
    for number in (6, 7):  # the second withdraws the first, which raises
        assert peer.request("pull", number, messages.PublishedChunk).result(60).ticket == b"t"
    server.close()


def fail_client_watch():
    """A request whose client cannot be watched is answered."""

    request = SimpleNamespace(receive=AsyncMock(side_effect=BROKEN))
    answered = connections.cancel_if_client_leaves(request, asyncio.sleep(0.01, "answer"))
    assert asyncio.run(answered) == "answer"


def fail_leave(monkeypatch):
    """A process that is told to end, and cannot ask process 0, ends all the same."""
    ended = []
    monkeypatch.setattr(follower.os, "_exit", ended.append)
    made = follower.Follower(SimpleNamespace(epoch=0))
    made.has_served = True
    monkeypatch.setattr(made, "leave", once(BROKEN))
    made._on_signal(15, None)
    until(lambda: ended)
    assert ended == [1]


def disk(tmp_path):
    shapes = {"latent": ((2,), np.dtype(np.uint16))}
    files = page_folder.PageFiles(page_folder.PageFolder(tmp_path), {"page_size": 4}, shapes)
    return disk_pages.DiskPages(files, 1 << 20)


def fail_disk_writer(tmp_path):
    pages = disk(tmp_path)
    pages._writer.put(once(BROKEN))
    pages.write(3, bytes(32), {"latent": np.zeros(2, np.uint16)})
    written = []
    until(lambda: written.extend(pages.reports().written) or written)
    assert written == [(3, True)]
    pages.close()


def fail_disk_reader(tmp_path):
    pages, before = disk(tmp_path), failure_counts()["disk reader"]
    for _ in range(disk_pages.READERS):
        pages._readers.put(once(BROKEN))  # each reader, or one of them often
    pages.read(0, 1, bytes(32))
    read = []
    until(lambda: read.extend(pages.reports().read) or read)
    assert read == [(0, 1, False)]  # there is none
    until(lambda: failure_counts()["disk reader"] == before + disk_pages.READERS)
    pages.close()


def fail_cache_events():
    """Neither a sink that raises ends the engine's thread, nor an event that cannot be written the publisher's."""
    told = []
    stream = event_publisher.PageEventStream(SimpleNamespace(publish=once(BROKEN, lambda *a: told.append(a))))
    stream.scheduler = SimpleNamespace(take_page_events=lambda: [(0, "first"), (1, "second")])
    stream.planned()
    assert told == [(1, "second")]
    config = event_publisher.KvEventsConfig(enable_kv_cache_events=True, endpoint="inproc://failing")
    publisher = event_publisher.EventPublisher(config, 1)
    publisher._encoder = SimpleNamespace(encode=once(BROKEN, lambda batch: b"batch"))
    for _ in range(2):
        publisher.publish(0, [])
    publisher.close()
    publisher._thread.join(60)
    assert list(publisher._kept[0]) == [(1, b"batch")]


def fail_transfer_connection(monkeypatch):
    """Who has asked hears that nothing comes."""
    links = SimpleNamespace(chunks=SimpleNamespace(peer=lambda address: SimpleNamespace()))  # has no `request`
    link, told = page_network.RemoteLink("127.0.0.1:1", links), []
    monkeypatch.setattr(link, "_fail_queued", once(BROKEN, link._fail_queued))
    link.receive = told.append
    link.send(messages.CancelTransfer("a"))
    until(lambda: told)
    assert isinstance(told[0], messages.TransferFailed)


def fail_messaging():
    """The log is read on although what an announcement asks for fails, and a loss is told although a collective cannot be cut."""
    (leader, follower), losses = groups(2), []
    leader.on_change = losses.append
    for group in (leader, follower):
        group.collectives = SimpleNamespace(cut=once(BROKEN))
    leader.announce(Announcement(1, [0, 1], broken=0))
    assert follower.next_announcement(60).number == 1
    follower.endpoint.close()
    until(lambda: losses)
    assert "process 1" in str(losses[0])


def fail_link_monitor(monkeypatch):
    """The next look sees the links."""
    made = Links(SimpleNamespace(present=[], me=None), Mock(), lambda epoch: None)
    looked = threading.Event()
    monkeypatch.setattr(made, "probe", once(BROKEN, lambda members: looked.set()))
    made.watch(0.01)
    assert looked.wait(60)
    made.close()


def fail_welcome(monkeypatch):
    """A process that could not be welcomed keeps no other one from coming back."""
    (first, second), changes = groups(2), []
    first.on_change = changes.append
    monkeypatch.setattr(coordination, "wait_until_forgotten", once(BROKEN))
    second.leaving = True
    second.endpoint.close()
    until(lambda: len(changes) == 1)
    with pytest.raises(GroupError, match="gone away while the group was forming"):
        enter(second.options)
    until(lambda: len(changes) == 2)
    assert enter(second.options).epoch == 1


def make_engine():
    """What front ends need of the engine's process; it cannot admit the first request."""
    return Mock(observers=[], on_death=None, **{"drop.return_value": [], "make_rules": once(BROKEN, lambda *a: [])})


def request_with(handle, grammar):
    made = SimpleNamespace(params=SimpleNamespace(structured_outputs=grammar), stop_ids=[], token_ids=[1])
    made.completions, made.to_requests = [(handle, f"r{handle}", 0)], lambda rules: []
    return made


def fail_front_end_requests(monkeypatch):
    """A request that cannot be admitted, with a grammar or without, is answered and gets an error, and the next one is admitted."""

    async def serve(grammar):
        engine, sent = make_engine(), []
        front_ends = processes.FrontEnds(engine, [], None)
        process = Mock(**{"poll.return_value": None, "wait.return_value": 0})
        link = SimpleNamespace(index=0, compiling=set(), send=sent.append, requests={}, samples=[], process=process)
        front_ends._links[0] = link

        async def read():
            for handle in (1, 2):
                yield Add(handle, [request_with(handle, grammar)])
                while front_ends._tasks:
                    await asyncio.sleep(0.001)

        link.channel = Mock(messages=read)
        await front_ends._serve(link)
        assert [(message.number, message.failed) for message in sent] == [(1, True), (2, False)]
        (admitted,) = engine.admit.call_args_list
        assert admitted.args[1].completions[0][0] == 2

    for grammar in (None, "root"):
        asyncio.run(serve(grammar))
    assert failure_counts()["front end requests"] >= 2


def fail_front_end(monkeypatch):
    """One that cannot be started is tried again, and given up with a reason: nobody waits for it for ever."""
    monkeypatch.setattr(processes, "_RESTART_SECONDS", 0.0)
    front_ends = processes.FrontEnds(make_engine(), [SimpleNamespace(fileno=lambda: 0)], None)
    monkeypatch.setattr(processes.subprocess, "Popen", Mock(side_effect=OSError(errno.EAGAIN, "no process")))
    with pytest.raises(ValueError, match="front end 0 failed to start 3 times"):
        asyncio.run(asyncio.wait_for(front_ends.start("address"), 60))


def fail_front_end_counters(monkeypatch):
    async def gather():
        front_ends, gathered = processes.FrontEnds(make_engine(), [], None), asyncio.Event()
        monkeypatch.setattr(front_ends, "gather", AsyncMock(side_effect=once(BROKEN, gathered.set)))
        monkeypatch.setattr(processes, "_GATHER_SECONDS", 0.001)
        front_ends._spawn(front_ends._gather_periodically())
        await asyncio.wait_for(gathered.wait(), 60)

    asyncio.run(gather())


def fail_headless_server(monkeypatch):
    """A follower without its endpoints follows."""
    monkeypatch.setattr(headless.uvicorn.Server, "run", once(BROKEN))
    monkeypatch.setattr(headless, "join_group", Mock(side_effect=BrokenPipeError("it follows")))
    options = HostOptions(("127.0.0.1", 1), 2, 0, "127.0.0.1", 1, 1)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(BrokenPipeError, match="it follows"):
        headless.Headless(options, ServeOptions()).serve(None, listener, Mock())


def fail_load_reports(monkeypatch):
    """Neither the task that asks while nothing is computed ends, nor the engine's thread that tells of a step."""
    dynamo = pytest.importorskip("dsjax.dynamo.engine")
    monkeypatch.setattr("dsjax.dynamo.worker.snapshot", lambda load: load)
    monkeypatch.setattr(dynamo, "_IDLE_SECONDS", 0.001)
    load, told = SimpleNamespace(rank=0, used_pages=1, usable_pages=8, queried=0), []

    async def look():
        async def call(function):
            return [SimpleNamespace(rank=0, used_pages=0, usable_pages=8, queried=0)]

        publisher = dynamo.LoadPublisher(1, SimpleNamespace(num_unfinished=0, call=once(BROKEN, call)))
        publisher.publisher = SimpleNamespace(publish=once(BROKEN, lambda rank, load: told.append(load.used_pages)))
        for _ in range(2):
            publisher.on_step(SimpleNamespace(ranks=[load]))
        publisher.start()
        while told != [1, 0]:
            await asyncio.sleep(0.001)
        publisher.stop()

    asyncio.run(asyncio.wait_for(look(), 60))
    assert failure_counts()["load reports"] >= 2


def answers(observers=()):
    """What two requests at once get of an engine: tokens, or an exception."""

    async def ask():
        engine = AsyncEngine(FakeExecutor().parts())
        engine.observers.extend(observers)
        engine.start()
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

        async def one(name):
            stream = await engine.submit(name, [[1, 2]], params)
            return [output.outputs[0].token_ids async for _, output in stream][-1]

        result = await asyncio.gather(one("first"), one("second"), return_exceptions=True)
        await engine.shutdown()
        return result

    return asyncio.run(asyncio.wait_for(ask(), 60))


def fail_request_text(monkeypatch):
    """The other requests of that step get their tokens."""
    append = Completion.append

    def sometimes(completion, update):
        if completion.request.request_id == "first":
            raise BROKEN
        append(completion, update)

    monkeypatch.setattr(Completion, "append", sometimes)
    first, second = answers()
    assert first is BROKEN
    assert len(second) == 4


def fail_observers():
    """The observers behind it are told, and streams go on."""
    failing, behind = Mock(spec=EngineObserver), Mock(spec=EngineObserver)
    failing.on_outputs.side_effect = once(BROKEN)
    assert [len(tokens) for tokens in answers([failing, behind])] == [4, 4]
    assert 1 < failing.on_outputs.call_count == behind.on_outputs.call_count


def fail_warm_up():
    """Of what is compiled while requests are served: a program is compiled when it is wanted."""
    how = {"_warm_up": lambda check: Mock(side_effect=BROKEN), "_raise_if_stopped": None, "_warm_up_error": None}
    server = SimpleNamespace(**how, _serving=SimpleNamespace(), _warming=True, _can_serve=False)
    Server._run_warm_up(server)
    assert (server._can_serve, server._warming, server._warm_up_error) == (True, False, None)


FAILURES = {
    name.removeprefix("fail_").replace("_", " "): function
    for name, function in dict(globals()).items()
    if name.startswith("fail_")
}


def test_each_kind_of_background_work_is_made_to_fail():
    assert set(FAILURES) == set(WORK)


@pytest.mark.parametrize("work", WORK)
def test_a_failure_costs_that_work_alone_is_logged_and_counted(work, request, caplog):
    before = failure_counts()
    fixtures = {name: request.getfixturevalue(name) for name in inspect.signature(FAILURES[work]).parameters}
    with caplog.at_level(logging.ERROR):
        FAILURES[work](**fixtures)
        until(lambda: failure_counts()[work] > before[work])
    assert {name for name in WORK if failure_counts()[name] != before[name]} == {work}
    assert f"Background work has failed ({work})" in caplog.text


def test_the_counts_are_shown_as_a_counter_from_the_start():
    shown = Metrics("demo", 1, 64).render(["dsjax_background_failures_total"]).decode()
    for work in WORK:
        assert f'dsjax_background_failures_total{{model_name="demo",work="{work}"}} {failure_counts()[work]}' in shown


def test_a_thread_that_does_not_restart_releases_who_waits_and_ends(caplog):
    released: Future = Future()
    fail = Mock(side_effect=BROKEN)
    thread = start_thread("messaging", fail, name="fails", on_failure=released.set_exception)
    assert released.exception(60) is BROKEN
    thread.join(60)
    assert not thread.is_alive()
    assert "injected" in caplog.text


def test_an_interrupt_is_not_contained():
    with pytest.raises(KeyboardInterrupt), contained("messaging"):
        raise KeyboardInterrupt


def test_only_the_first_failure_of_a_work_has_its_traceback(monkeypatch, caplog):
    monkeypatch.setattr(background, "_counts", Counter())
    for _ in range(2):
        with contained("leave"):
            raise BROKEN
    told = [record for record in caplog.records if "(leave)" in record.getMessage()]
    assert [record.exc_info is not None for record in told] == [True, False]


def test_a_queue_that_is_closed_does_all_its_tasks_and_ends_each_of_its_threads():
    work, done = WorkQueue("chunk pull", "pulls to their end", threads=3), []
    for number in range(9):
        work.put(partial(done.append, number))
    work.start()
    assert work.close(60)
    assert sorted(done) == list(range(9))
    assert "pulls to their end" not in [thread.name for thread in threading.enumerate()]


def test_a_queue_whose_tasks_go_on_says_so_after_one_wait_for_all_its_threads():
    work, go_on = WorkQueue("chunk pull", "long pulls", threads=80), threading.Event()
    work.start()
    for _ in range(80):
        work.put(go_on.wait)
    began = time.monotonic()
    assert not work.close(0.5)
    assert time.monotonic() - began < 30
    go_on.set()
    assert work.close(60)
