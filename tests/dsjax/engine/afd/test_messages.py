"""What a process with experts says to messages that cannot be, and to sides that do not go with it."""

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import DEFAULT, Mock

import msgspec
import numpy as np
import pytest
from layouts import write_checkpoint
from msgspec.structs import replace as changed
from processes import free_port
from waits import until

from dsjax.engine import expert_process
from dsjax.engine.afd.expert_slots import NO_EXPERT
from dsjax.engine.afd.messages import COMPILE, OPEN, PLACE, STAGE, Answered, Call, Compile, Open, Opened, Place, Stage
from dsjax.engine.expert_process import load_experts
from dsjax.engine.setup.args import EngineArgs
from dsjax.messaging import Endpoint, Link, LinkListener, RefusedError
from dsjax.messaging.cluster_key import local_credentials
from dsjax.messaging.endpoint import PING

FIRST = 2
"""The second of two processes with two devices each."""
SECONDS = 60
NOT_FILLED = np.zeros((2, 2), "<i4").tobytes()
"""Of each device the queues of two senders."""
CALL = Call("moe_layers", 0, 8, 8, NOT_FILLED)


def filled_by(sender):
    """A call in which each of two devices gets a row from a sender."""
    filled = np.zeros((2, 2), "<i4")
    filled[:, sender] = 1
    return changed(CALL, filled=filled.tobytes())


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    model, addresses = write_checkpoint(tmp_path_factory.mktemp("experts")), [free_port(), free_port()]
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "max_model_len": 64}
    meshes = {"attention_mesh": "dp=2", "expert_mesh": "ep=4", "afd_role": "expert", "afd_server_rank": 1}
    address = ",".join(f"127.0.0.1:{port}" for port in addresses)
    return EngineArgs(model=str(model), afd_address=address, dtype="float32", **meshes, **sizes)


@pytest.fixture(scope="module")
def process(args):
    with contextlib.closing(load_experts(args)) as process:
        yield process


@pytest.fixture(scope="module")
def endpoint():
    with contextlib.closing(Endpoint("127.0.0.1", local_credentials())) as endpoint:
        yield endpoint


class Attention:
    def __init__(self, endpoint, peer, opened):
        self.peer, self.link = peer, Link(endpoint, opened.address, opened.ticket, opened.name, "attention")

    def ask(self, body):
        service = {Compile: COMPILE, Stage: STAGE, Place: PLACE}[type(body)]
        return failure(lambda: self.peer.request(service, body).result(SECONDS))

    def send(self, call, *rows):
        self.link.send(msgspec.msgpack.encode(call), *rows)

    def answer(self, *arrays):
        message = self.link.receive(SECONDS)
        error = msgspec.msgpack.decode(message.header, type=Answered).error
        if not error:
            message.read_into(*arrays)
        return error

    def call(self, call):
        self.send(call)
        return self.answer()

    def close(self):
        self.link.close()
        self.peer.close()


def failure(do):
    try:
        do()
    except (RefusedError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.fixture
def enter(process, endpoint):
    """``enter(side, **opening)``: an attention process that is let in, and leaves at the end of the test at the latest."""
    made = []

    def enter(side=b"one", /, *, rows=None, first=FIRST, **place):
        placement = np.asarray(process._writer.placement if rows is None else rows, "<i4").tobytes()
        peer = endpoint.connect(process.endpoint.address, "attention")
        try:
            opening = Open(process._space, placement, side, first, **place)
            opened = peer.request(OPEN, opening, kind=Opened).result(SECONDS)
        except BaseException:
            peer.close()
            raise
        made.append(Attention(endpoint, peer, opened))
        return made[-1]

    yield enter
    for one in made:
        one.close()
    until(lambda: not process.num_connections)


@pytest.fixture
def refusal(process, enter):
    """``refusal(side, **opening)``: why a side is not let in; nothing where it is, which leaves then."""

    def refusal(side=b"one", /, **place):
        before, entered = process.num_connections, []
        error = failure(lambda: entered.append(enter(side, **place)))
        for one in entered:
            one.close()
        until(lambda: process.num_connections == before)
        return error

    return refusal


def test_who_comes_in_the_moment_before_all_is_ready_is_let_in_then(args, endpoint, monkeypatch):
    early, addresses = [], ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))

    def listener(own):
        peer = endpoint.connect(own.address, "attention")
        early.append(peer.request(OPEN, Open({})))
        assert peer.request(PING).result(SECONDS) is None  # so that it has come
        return LinkListener(own)

    monkeypatch.setattr(expert_process, "LinkListener", listener)
    process = load_experts(replace(args, afd_address=addresses))
    with pytest.raises(RefusedError, match="it gives no name of an attention side"):
        early[0].result(SECONDS)
    process.close()


def test_a_process_at_another_place_than_the_attention_side_thinks_is_refused(refusal):
    error = refusal(first=0)
    assert "it has the experts' devices from 2 on" in error
    assert "from 0 on here; give --afd-address in the same order on both" in error
    assert not refusal()


def test_experts_are_placed_for_a_side_that_is_alone(process, enter, refusal):
    rows = process._writer.placement.copy()
    other = np.roll(rows[0], 1)
    first, second = enter(b"one"), enter(b"two")
    assert not second.ask(Place(0, rows[0].tobytes()))  # as before steps begin
    assert "experts can be moved for one that is alone" in second.ask(Place(0, other.tobytes()))
    np.testing.assert_array_equal(process._writer.placement, rows)
    second.close()
    until(lambda: process.num_connections == 1)
    assert not first.ask(Place(0, other.tobytes()))
    error = refusal(b"two", rows=process._writer.placement)
    assert "another attention side is connected, which has experts moved" in error
    assert not first.ask(Place(0, rows[0].tobytes()))


def test_a_side_that_moves_experts_stays_alone_when_its_connection_comes_back(process, enter, refusal):
    target = process._writer.own_slots.start
    stage = Stage(0, np.array([0, target], "<i4").tobytes())
    first = enter(b"mover")
    assert not first.ask(stage)
    again = enter(b"mover")
    first.close()
    until(lambda: process.num_connections == 1)
    assert "it must be alone" in refusal(b"other")
    assert not again.ask(stage)
    again.close()
    until(lambda: not process.num_connections)
    assert not refusal(b"other")


def test_a_slot_whose_writing_has_failed_half_way_holds_nobody_and_is_written_anew(
    process, enter, refusal, monkeypatch
):
    writer, rows = process._writer, process._writer.placement.copy()
    slot = writer.own_slots.start
    before = {path: np.asarray(value) for path, value in writer.take(0, slot).items()}
    other, attention = rows[0].copy(), enter()
    other[slot] = (other[slot] + 1) % rows[0].max()
    fails_at_the_second_array = [DEFAULT, RuntimeError("RESOURCE_EXHAUSTED: out of memory")]
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write", Mock(wraps=writer._write, side_effect=fails_at_the_second_array))
        assert "out of memory" in attention.ask(Place(0, other.tobytes()))
    assert writer.placement[0, slot] == NO_EXPERT
    assert not refusal(rows=rows)
    for path, value in writer.take(0, slot).items():
        np.testing.assert_array_equal(np.asarray(value), before[path])


@pytest.mark.parametrize(
    ("opened", "later", "says"),
    [
        ({"generation": 2}, {"generation": 1}, "generation 1 of the attention side, which goes on with generation 2"),
        # The side that is prepared knows nothing of experts that are moved meanwhile on the one of now.
        ({}, {"change": 1}, "it is already on a side of experts that this attention side is connected to"),
    ],
    ids=["an earlier generation", "another side, whatever its address is called"],
)
def test_a_connection_that_is_late_or_of_another_side_is_refused_and_moves_no_experts_back(
    process, enter, refusal, opened, later, says
):
    side, rows = says[:9].encode(), process._writer.placement.copy()
    moved = np.roll(rows, 1, axis=1)
    attention = enter(side, rows=moved, **opened)
    assert says in refusal(side, rows=rows, **later)
    np.testing.assert_array_equal(process._writer.placement, moved)
    attention.close()
    until(lambda: not process.num_connections)
    assert not refusal(b"not " + side, rows=rows, **later)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_process_that_leaves_is_waited_for_no_more_and_none_when_a_new_generation_begins(process, enter, leaves):
    first, second = (enter(b"hangs", process=number, processes=2, generation=1) for number in range(2))
    first.send(CALL)
    assert first.link.receive(0.5) is None
    second.close() if leaves else enter(b"hangs", generation=2)
    assert not first.answer()


def test_a_process_that_cannot_be_one_of_the_attention_side_is_refused(enter, refusal):
    assert "it is process 2 of 2" in refusal(process=2, processes=2)
    assert "it gives no name" in refusal(b"")
    enter(b"numbers", process=0, processes=2)
    refused = refusal(b"numbers", process=1, processes=3)
    assert refused == "it is one of 3 processes, and others of this generation are of 2"


def test_two_processes_that_fill_the_same_cells_get_no_answers_of_each_other(process, enter):
    both = [enter(b"overlap", process=number, processes=2) for number in range(2)]
    for one in both:
        one.send(filled_by(0), np.repeat(process._empty_row, 2, axis=0))
    for one in both:
        assert "two processes of the attention side fill the same cells" in one.answer()


def test_two_processes_of_an_attention_side_have_one_program_run_and_each_gets_its_own_answers(process, enter):
    wire, counts = process._exchange.wire, (process.num_calls, process.num_products)
    rows, answers = np.tile(process._empty_row, (2, 2, 1)), []
    rows[..., 0] = np.random.default_rng(0).integers(0, 1 << 8, (2, 2))
    sides = [enter(b"both", process=number, processes=2) for number in range(2)] + [enter(b"both too")]
    for number, one in enumerate(sides):
        one.send(filled_by(number % 2), rows[number % 2])
    for one in sides:
        answer = np.empty((2, process._exchange.columns, wire.width), wire.dtype)
        assert not one.answer(answer)
        answers.append(answer)
    np.testing.assert_array_equal(answers[0], answers[2])
    assert (process.num_calls - counts[0], process.num_products - counts[1]) == (3, 2)


def test_of_two_processes_of_a_side_with_different_sizes_that_come_at_once_one_is_refused(refusal, enter):
    def come(number):
        return failure(lambda: enter(b"at once", process=number, processes=2 + number))

    with ThreadPoolExecutor(2) as threads:
        [refused] = filter(None, threads.map(come, range(2)))
    assert "and others of this generation are of" in refused


def test_a_side_that_compiles_and_one_that_opens_do_not_hold_up_the_calls_of_another(process, enter, monkeypatch):
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slowly(original):
        def run(*arguments):
            begun.release()
            assert go_on.wait(SECONDS)
            return original(*arguments)

        return run

    serving, warming = enter(b"serves"), enter(b"warms up")
    assert not serving.call(CALL)
    monkeypatch.setattr(process.side, "compile", slowly(process.side.compile))
    monkeypatch.setattr(process, "_check", slowly(process._check))
    with ThreadPoolExecutor(1) as pool:
        warmed = warming.peer.request(COMPILE, Compile("moe_layers", 4, 16))
        assert begun.acquire(timeout=SECONDS)
        entered = pool.submit(enter, b"opens")
        assert begun.acquire(timeout=SECONDS)
        warming.send(changed(CALL, tokens=2, cells=4))  # which no program is there for either
        assert not serving.call(changed(CALL, number=1))
        go_on.set()
        assert warmed.result(SECONDS) is None
        entered.result(SECONDS)
    assert not warming.answer()


def test_a_program_that_could_not_be_compiled_is_an_error_and_is_compiled_when_it_is_asked_for_again(
    process, enter, monkeypatch
):
    attention, call = enter(), changed(CALL, tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(process.side, "compile", Mock(side_effect=RuntimeError("out of memory")))
        assert attention.ask(Compile("moe_layers", 2, 8)) == "RuntimeError: out of memory"
        assert attention.call(call) == "RuntimeError: out of memory"
    assert not attention.call(changed(call, number=1))


def test_a_side_hears_why_its_experts_cannot_be_read(process, refusal, monkeypatch):
    rows = process._writer.placement.copy()
    monkeypatch.setattr(process._writer, "_read", Mock(side_effect=OSError("the disk is gone")))
    assert refusal(rows=np.roll(rows, 1, axis=1)) == "OSError: the disk is gone"
    np.testing.assert_array_equal(process._writer.placement, rows)
    assert not refusal(rows=rows)


def test_an_expert_of_another_process_is_read_when_it_is_staged_and_not_when_it_is_placed(process, monkeypatch):
    writer = process._writer
    target, read, before = writer.own_slots.start, Mock(wraps=writer._read), writer.placement[0].copy()
    monkeypatch.setattr(writer, "_read", read)

    def experts_read(act, *arguments):
        read.reset_mock()
        act(0, *arguments)
        return {call.args[2] for call in read.call_args_list}

    after = before.copy()
    after[[0, target]] = before[[target, 0]]
    assert experts_read(writer.stage, [(0, target)]) == {before[0]}
    assert experts_read(writer.place, after) == set()
    writer.stage(0, [(0, target)])
    after[target] = before[target + 1]
    assert experts_read(writer.place, after) == {after[target]}, "what was staged is another one"
    writer.place(0, before)


def test_an_unknown_stack_of_experts_and_a_layer_that_it_has_not_are_refused_in_a_line(enter, caplog):
    attention, no_stack = enter(), "there is no stack of experts 'nothing', only moe_layers"
    for call, says in (
        (changed(CALL, stack="nothing"), no_stack),
        (changed(CALL, layer=2), "moe_layers has no experts in layer 2"),
    ):
        assert attention.call(call) == says
        [record] = [record for record in caplog.records if says in record.getMessage()]
        assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert no_stack in attention.ask(Compile("nothing", 8, 8))
    assert not attention.ask(Compile("moe_layers", 8, 8))


def test_rows_for_which_there_is_no_memory_are_answered_and_the_connection_stays(process, enter, monkeypatch):
    filled, original = np.full((2, 1), 4096, "<i4"), np.empty

    def empty(shape, *arguments, **options):
        if np.ndim(shape) and shape[0] == filled.sum():
            raise MemoryError("there is none")
        return original(shape, *arguments, **options)

    attention = enter()
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", empty)
        rows = np.zeros(int(filled.sum()) * process._exchange.wire.row_bytes, np.uint8)
        attention.send(Call("moe_layers", 0, 4096, 4096, filled.tobytes()), rows)
        assert attention.answer() == "MemoryError: there is none"
    assert not attention.ask(Place(0, process._writer.placement[0].tobytes()))


def test_what_a_member_may_send_by_mistake_harms_its_own_requests_alone(process, endpoint, enter):
    """Any bytes as a call, any value as a request, and calls that cannot be: another side is answered as before."""
    serving, other, rng = enter(b"serves"), enter(b"mistaken"), random.Random(0)
    stranger = endpoint.connect(process.endpoint.address, "attention")
    bad = [Call("moe_layers", 0, 2**40, 2**40, bytes(4)), changed(CALL, filled=bytes(7)), changed(CALL, layer=-1)]
    # The last one's rows are missing.
    bad += [changed(CALL, filled=np.full((2, 2), count, "<i4").tobytes()) for count in (9, -1, 1)]
    values = [None, 7, "text", b"", [], {}, [1, 2], Place(10**6, bytes(4)), Stage(0, bytes(3)), [{}, b"", b"me"]]
    for turn in range(60):
        call = msgspec.msgpack.encode(rng.choice(bad))
        header = rng.choice([call, call[: rng.randrange(1, len(call))], rng.randbytes(rng.randrange(1, 40))])
        other.link.send(header, *[rng.randbytes(rng.randrange(50)) for _ in range(rng.randrange(3))])
        assert other.answer()
        service = rng.choice([OPEN, COMPILE, STAGE, PLACE, "experts.nothing"])
        with pytest.raises((RefusedError, RuntimeError)):
            stranger.request(service, rng.choice(values)).result(SECONDS)
        assert not serving.call(changed(CALL, number=turn))
    stranger.close()


def test_an_attention_process_whose_link_ends_is_asked_to_connect_anew(enter):
    attention = enter()
    attention.link.close()
    until(lambda: attention.peer.lost)
