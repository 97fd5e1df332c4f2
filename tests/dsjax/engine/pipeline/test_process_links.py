"""What passes between processes of stages, here threads. Also tests `pipeline/stages_of_process.py`."""

import contextlib
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import zmq
from group_in_threads import groups
from jax.sharding import SingleDeviceSharding
from links_in_threads import links_of
from waits import until

from dsjax.engine.contract.commands import Score, Step, int32s
from dsjax.engine.contract.executor import ErrorKind, ExecutorCounts, ExpertCounts, RankResults, RowResult
from dsjax.engine.pipeline import process_links
from dsjax.engine.pipeline.process_links import HIDDEN, RESULTS
from dsjax.engine.pipeline.stage_executor import LastStageOutput
from dsjax.engine.pipeline.stages_of_process import StagesOfProcess
from dsjax.hosts.group import GroupError
from dsjax.messaging import Link, NotAMemberError


@pytest.fixture
def links():
    """Make the links of three processes, whose ids are not in the order of their stages."""
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(contextlib.closing(one)) for one in links_of([0, 2, 1])]


def listeners_of(links):
    return [inbox.listener for inbox in links._inboxes.values()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_go_to_the_next_stage_in_their_order_to_the_bit(links, dtype):
    first, middle, last = links
    sent = [jnp.arange(24, dtype=dtype).reshape(2, 3, 4) + 100 * number for number in range(3)]
    for array in sent:
        first.send_hidden(array)
    middle.send_hidden(-sent[0])
    arriving = middle.incoming(lambda array: array)
    for array in sent:
        found = arriving.popleft()
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, np.asarray(array))
    np.testing.assert_array_equal(last.incoming(lambda array: array).popleft(), -np.asarray(sent[0]))


def test_what_the_last_stage_makes_comes_to_all_others_as_it_was(links):
    first, middle, last = links
    row = RowResult([7, 8], scores=[(7, -0.125, 0, [(7, -0.125), (3, -2.5)])], num_drafts=2, drafts=[1])
    failed = RowResult((), finite=False, error="no", kind=ErrorKind.NO_ROOM)
    results = [RankResults([row], []), RankResults([], [failed, RowResult()])]
    outputs = [LastStageOutput(np.arange(6).reshape(2, 3), None), LastStageOutput(np.arange(4), np.full((2, 1), 9))]
    logits = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    last.send_results(lambda: (results, outputs))
    last.send_results(lambda: logits)
    for other in (first, middle):
        found, of_launches = other.receive_results(0)
        assert [rank.decodes for rank in found] == [[row], []]
        assert found[1].prefills == [failed._replace(token_ids=[], drafts=[]), RowResult([], drafts=[])]
        assert found[1].prefills[0].kind is ErrorKind.NO_ROOM
        for one, expected in zip(of_launches, outputs, strict=True):
            np.testing.assert_array_equal(one.outcome, expected.outcome)
            assert (one.drafts is None) == (expected.drafts is None)
        np.testing.assert_array_equal(other.receive_results(1), logits)


def counts_of(number):
    """Experts' loads of a process, whose arrays have shapes of their own."""
    arrays = [np.arange(6, dtype=dtype).reshape(2, 3) + 10 * number for dtype in (np.int64, np.int32)]
    return ExpertCounts(arrays[0], arrays[0][0], arrays[0][:1], arrays[1], number, 2 * number, 0.25)


class Stage:
    """A stage of three without a model: its hidden states, tokens and logits are one more than what arrives."""

    def __init__(self, number):
        mesh = SimpleNamespace(devices=np.array(jax.devices()[:1]))
        self.model = SimpleNamespace(mesh=mesh, stage=SimpleNamespace(count=3), is_first_stage=number == 0)
        self.limits, self.programs = None, SimpleNamespace(rows=SingleDeviceSharding(jax.devices()[0]))
        self.steps, self.outgoing, self.entered, self.recording = 0, deque(), [], False
        self.expert_counts, self.counts = partial(counts_of, number), partial(ExecutorCounts, 0)

    def launch(self, command):
        self.steps += 1
        value = 10 * self.steps if self.model.is_first_stage else self.incoming.popleft()[0] + 1
        self.outgoing.append(jnp.full(3, value))
        return SimpleNamespace(value=int(value), kept=[np.full((2, 4), value), np.full((1, 4), value)])

    def read_results(self, part):
        return [RankResults([RowResult([part.value])], [])]

    def outputs(self, part):
        return [LastStageOutput(np.full(2, part.value), None)]

    def commit_results(self, part, results, outputs):
        self.entered += results[0].decodes[0].token_ids

    def set_recording(self, on):
        self.recording = on

    wait = drop_interrupted = lambda self, *part: None


@pytest.fixture
def processes(links):
    """The executors of three processes with a stage each."""
    return [StagesOfProcess([Stage(number)], link) for number, link in enumerate(links)]


def test_process_0_goes_a_step_ahead_and_a_step_that_it_has_waited_for_is_done_at_the_last_stage(processes):
    first, middle, last = processes
    heard, hear = [], first._links.receive_results
    first._links.receive_results = lambda number: heard.append(number) or hear(number)
    steps = [first.launch(Step([])) for _ in range(2)]
    behind = [middle.launch(Step([])) for _ in range(2)]
    assert heard == []
    for _ in range(2):
        last.launch(Step([]))
    first.wait(steps[0])
    assert heard == [0]
    for process, own in ((first, steps), (middle, behind)):
        assert [process.collect(step)[0].decodes[0].token_ids for step in own] == [[12], [22]]
        assert process.stages[0].entered == [12, 22]
    scored, *_ = [process.launch(Score(int32s([5, 6]), int32s([2]))) for process in processes]
    np.testing.assert_array_equal(first.collect(scored), np.full((2, 4), 32))
    assert heard == [0, 1, 2]


def test_the_record_of_loads_has_the_layers_and_devices_of_all_processes_until_it_ends(processes):
    for process in processes:
        process.set_recording(True)
    with ThreadPoolExecutor(3) as pool:
        found, *_ = pool.map(StagesOfProcess.expert_counts, processes)
    each = [counts_of(number) for number in range(3)]
    for name in ("tokens_per_expert", "rows_sent", "logical_load", "physical_to_logical"):
        np.testing.assert_array_equal(getattr(found, name), np.concatenate([getattr(one, name) for one in each]))
    assert (found.rounds, found.dispatch_bytes, found.padding_share) == (3, 6, 0.25)
    assert processes[0].counts().experts is found
    processes[0].set_recording(False)
    assert processes[0].expert_counts() is processes[0].counts().experts is None


def test_after_an_interrupt_the_same_results_are_heard_once_more(links, monkeypatch):
    first, _, last = links
    for number in range(3):
        made = [RankResults([RowResult([number])], [])], [LastStageOutput(np.full(2, number), None)]
        last.send_results(lambda made=made: made)

    def tokens(number):
        return first.receive_results(number)[0][0].decodes[0].token_ids

    assert tokens(0) == [0]
    with monkeypatch.context() as patch:
        patch.setattr(process_links, "LastStageOutput", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            first.receive_results(1)
    assert [tokens(1), tokens(2)] == [[1], [2]]


def test_after_an_interrupt_the_loads_that_others_had_told_before_are_passed_over(links):
    with ThreadPoolExecutor(3) as pool:

        def gather(*reads):
            return [pool.submit(one.gather_counts, read) for one, read in zip(links, reads, strict=True)]

        first, *others = gather(Mock(side_effect=KeyboardInterrupt), *[partial(counts_of, 10)] * 2)
        assert isinstance(first.exception(60), KeyboardInterrupt)
        assert [other.result(60)[0].rounds for other in others] == [10, 10]
        first, *_ = gather(*(partial(counts_of, number) for number in (20, 21, 22)))
        assert [one.rounds for one in first.result(60)] == [20, 21, 22]


def test_what_a_process_has_sent_before_it_ends_is_heard_by_those_that_ask_later_and_its_end_then(links, monkeypatch):
    monkeypatch.setattr(process_links, "_LINGER_SECONDS", 60)  # where others use the machine
    first, middle, last = links
    logits = np.arange(3_000_000, dtype=np.float32)
    last.send_results(lambda: logits)
    last._last_send.result(60)
    last.close()
    for other in (first, middle):
        np.testing.assert_array_equal(other.receive_results(0), logits)
        with pytest.raises(GroupError, match=r"connection between two stages has ended: process 1 .* has ended it"):
            other.receive_results(1)


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_that_cannot_be_reached_is_named_and_this_one_listens_no_more(ends):
    class Links(process_links.ProcessLinks):
        def close(self):
            super().close()
            self._group.endpoint.close()

    with socket.create_server(("127.0.0.1", 0)) as other:
        port, told, [group] = other.getsockname()[1], [], groups(1)
        if ends:  # what answers there speaks no word
            threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        else:
            other.close()

        def ask(stage, value):
            told.extend(value.values())
            return [value, {HIDDEN: (f"127.0.0.1:{port}", b"ticket")}]

        group.members = group.present = [group.me, msgspec.structs.replace(group.me, process_id=1)]
        group.agreement, group.check = SimpleNamespace(all_gather=ask), lambda error=None: None
        with pytest.raises(GroupError, match=f"process 1 .* cannot be reached at 127.0.0.1:{port}"):
            Links(group, [0, 1])
    for address, _ in told:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 10)


def test_a_host_that_hangs_is_noticed_within_the_heartbeat_timeout(links):
    for link in (link for one in links for link in (*one._outgoing, *listeners_of(one))):
        assert 0 < link._socket.heartbeat_ivl < link._socket.heartbeat_timeout < 60_000


def test_hidden_states_alone_go_unencrypted(links):
    first, middle, last = links
    names = [[sorted(listener._names) for listener in listeners_of(one)] for one in links]
    assert names == [[[RESULTS]], [[HIDDEN], [RESULTS]], [[HIDDEN]]]
    encrypted = [listeners_of(first)[0], listeners_of(middle)[1], *last._outgoing]
    plain = [listeners_of(middle)[0], listeners_of(last)[0], *first._outgoing, *middle._outgoing]
    for sockets, mechanism in ((encrypted, zmq.CURVE), (plain, zmq.PLAIN)):
        assert {one._socket.mechanism for one in sockets} == {mechanism}


@pytest.mark.parametrize(
    ("name", "ticket"),
    [(HIDDEN, b"another"), (HIDDEN, None), (RESULTS, None), (RESULTS, b"another"), ("weights", None)],
)
def test_a_member_that_is_no_stage_of_this_generation_is_not_heard_and_disturbs_nobody(links, name, ticket):
    first, middle, last = links
    sent = np.arange(6, dtype=np.float32).reshape(2, 3)
    first.send_hidden(sent)
    last.send_results(lambda: sent)
    arriving = middle.incoming(lambda array: array)
    np.testing.assert_array_equal(arriving.popleft(), sent)
    np.testing.assert_array_equal(middle.receive_results(0), sent)
    for listener, encrypted in zip(listeners_of(middle), (False, True), strict=True):
        where = last._group.endpoint, listener.address, ticket or listener.ticket
        with contextlib.suppress(NotAMemberError):
            process_links._send([Link(*where, name, encrypted=encrypted)], [], [np.zeros(1)])
    time.sleep(0.1)
    first.send_hidden(2 * sent)
    last.send_results(lambda: 2 * sent)
    np.testing.assert_array_equal(arriving.popleft(), 2 * sent)
    np.testing.assert_array_equal(middle.receive_results(1), 2 * sent)


def test_what_cannot_be_read_ends_the_wait_for_it(links):
    first, middle, _ = links
    first._outgoing[0].send(b"\xc1")
    assert "connection between two stages has ended" in raised(middle.incoming(None).popleft)[0]


def raised(take):
    """What taking raises, twice, in a thread, since it might wait for ever."""
    found = []

    def run():
        for _ in range(2):
            try:
                take()
            except GroupError as error:
                found.append(str(error))

    threading.Thread(target=run, daemon=True).start()
    until(lambda: len(found) == 2)
    return found


fails = Mock(side_effect=RuntimeError("a program failed"))


def test_where_something_cannot_be_sent_all_that_wait_or_send_afterwards_are_told(links, caplog):
    _, middle, last = links
    middle.send_results(fails)
    own = "the connection between two stages has ended: a program failed"
    assert raised(lambda: middle.receive_results(0)) == [own] * 2
    assert raised(middle.incoming(None).popleft) == [own] * 2
    others = raised(last.incoming(None).popleft)
    assert all("the connection between two stages has ended" in error for error in others)
    assert "Sending to the other stages failed" in caplog.text
    middle._last_send.exception(60)
    with pytest.raises(GroupError, match="a program failed"):
        middle.send_results(fails)
