"""What a process with experts says to messages that cannot be, and to sides that do not go with it."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from layouts import write_checkpoint
from processes import free_port
from waits import until

from dsjax.engine.afd.expert_slots import NOBODY
from dsjax.engine.afd.messages import SERVICE, VERSION, Answered, Call, Hello, Place, Welcome, receive, send
from dsjax.engine.expert_process import load_experts
from dsjax.engine.setup.args import EngineArgs
from dsjax.hosts.secure_channel import connect
from dsjax.messaging.credentials import CredentialOptions

FIRST = 2
"""The second of two processes with two devices each."""


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    args = EngineArgs(
        model=str(write_checkpoint(tmp_path_factory.mktemp("experts"))),
        afd_role="expert",
        afd_address=f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}",
        afd_server_rank=1,
        attention_mesh="dp=2",
        expert_mesh="ep=4",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        prefill_chunk=16,
        page_size=4,
        max_model_len=64,
    )
    process = load_experts(args)
    yield process
    process.close()


def enter(process, side=b"one", /, *, rows=None, first=FIRST, **place):
    """Connect as an attention side; return the channel and why it is refused."""
    channel = connect(("127.0.0.1", process.port), SERVICE, CredentialOptions().read("127.0.0.1"))
    channel.settimeout(120)
    placement = process._writer.rows if rows is None else rows
    told = np.asarray(placement, "<i4").tobytes()
    send(channel, Hello(VERSION, process._space, told, side, first, **place))
    return channel, receive(channel, Welcome).error


@contextlib.contextmanager
def entered(process, side=b"one", /, **place):
    """An attention side that is let in, and leaves: its channel."""
    channel, error = enter(process, side, **place)
    assert not error
    with channel:
        yield channel
    until(lambda: side not in process._sides)


@contextlib.contextmanager
def both_entered(process, side, **place):
    """The two processes of an attention side, which leave: their channels."""
    with contextlib.ExitStack() as stack:
        channels = [enter(process, side, process=number, processes=2, **place)[0] for number in range(2)]
        for channel in channels:
            stack.enter_context(channel)
        yield channels
    until(lambda: not process._joint and not process._sides)


def refusal(process, side=b"one", /, **place):
    """Why a side is not let in; nothing where it is, which leaves then."""
    channel, error = enter(process, side, **place)
    channel.close()
    until(lambda: error or side not in process._sides)
    return error


def test_a_process_at_another_place_than_the_attention_side_thinks_is_refused(process):
    error = refusal(process, first=0)
    assert "it has the experts' devices from 2 on" in error
    assert "from 0 on here; give --afd-address in the same order on both" in error
    assert not refusal(process)


def ask(channel, message):
    send(channel, message)
    return receive(channel, Answered).error


def test_experts_are_placed_for_a_side_that_is_alone(process):
    rows = process._writer.rows.copy()
    other = np.roll(rows[0], 1)
    with entered(process, b"one") as first:
        with entered(process, b"two") as second:
            assert not ask(second, Place(0, rows[0].tobytes()))  # as before steps begin
            assert "experts can be moved for one that is alone" in ask(second, Place(0, other.tobytes()))
            np.testing.assert_array_equal(process._writer.rows, rows)
        assert not ask(first, Place(0, other.tobytes()))
        error = refusal(process, b"two", rows=process._writer.rows)
        assert "another attention side is connected, which has experts moved" in error
        assert not ask(first, Place(0, rows[0].tobytes()))


def test_a_slot_whose_writing_has_failed_half_way_holds_nobody_and_is_written_anew(process, monkeypatch):
    writer, rows = process._writer, process._writer.rows.copy()
    slot = writer.own.start
    before = {path: np.asarray(value) for path, value in writer.take(0, slot).items()}
    other, write, calls = rows[0].copy(), writer._write, []
    other[slot] = (other[slot] + 1) % rows[0].max()

    def fail_at_the_second_array(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return write(*arguments)

    with entered(process) as channel, monkeypatch.context() as patch:
        patch.setattr(writer, "_write", fail_at_the_second_array)
        assert "out of memory" in ask(channel, Place(0, other.tobytes()))
    assert writer.rows[0, slot] == NOBODY
    assert not refusal(process, rows=rows)
    for path, value in writer.take(0, slot).items():
        np.testing.assert_array_equal(np.asarray(value), before[path])


def test_a_connection_of_an_earlier_generation_is_late_and_moves_no_experts_back(process):
    rows = process._writer.rows.copy()
    moved = np.roll(rows, 1, axis=1)
    with entered(process, b"group", rows=moved, generation=2):
        refused = refusal(process, b"group", rows=rows, generation=1)
        assert "generation 1 of the attention side, which goes on with generation 2" in refused
        np.testing.assert_array_equal(process._writer.rows, moved)
    assert not refusal(process, b"another", rows=rows)  # whose generations are its own


def test_a_process_of_the_side_of_now_is_on_no_other_side_whatever_its_address_is_called(process):
    """The side that is prepared knows nothing of experts that are moved meanwhile on the one of now."""
    rows = process._writer.rows.copy()
    with entered(process, b"scales", rows=np.roll(rows, 1, axis=1)):
        refused = refusal(process, b"scales", rows=rows, change=1)
        assert "it is already on a side of experts that this attention side is connected to" in refused
        np.testing.assert_array_equal(process._writer.rows, np.roll(rows, 1, axis=1))
    assert not refusal(process, b"scales", rows=rows, change=2)


def test_a_new_generation_ends_what_waits_for_a_process_of_the_one_before(process):
    with both_entered(process, b"hangs", generation=1) as old:
        send(old[0], Call("moe_layers", 0, 8, 8, np.zeros((2, 2), "<i4").tobytes(), 0))
        until(lambda: process._joint[b"hangs", 1]._parts)
        new, error = enter(process, b"hangs", generation=2)
        with new:
            assert not error
            assert not receive(old[0], Answered).error


def test_a_process_that_cannot_be_one_of_the_attention_side_is_refused(process):
    assert "it is process 2 of 2" in refusal(process, process=2, processes=2)
    assert "it gives no name" in refusal(process, b"")
    with entered(process, b"numbers", process=0, processes=2):
        refused = refusal(process, b"numbers", process=1, processes=3)
    assert refused == "it is one of 3 processes, and others of this generation are of 2"
    until(lambda: not process._joint)


def test_two_processes_that_fill_the_same_cells_get_no_answers_of_each_other(process):
    filled = np.zeros((2, 2), "<i4")
    filled[:, 0] = 1
    with both_entered(process, b"overlap") as channels:
        for channel in channels:
            send(channel, Call("moe_layers", 0, 8, 8, filled.tobytes(), 0))
            channel.send_bytes(memoryview(np.repeat(process._empty_row, 2, axis=0).view(np.uint8)))
        for channel in channels:
            assert "two processes of the attention side fill the same cells" in receive(channel, Answered).error


def test_two_processes_of_an_attention_side_have_one_program_run_and_each_gets_its_own_answers(process):
    wire, counts = process._half.wire, (process.num_calls, process.num_products)
    rng = np.random.default_rng(0)
    rows, answers = [], []
    with both_entered(process, b"both") as channels, entered(process, b"both too") as alone:
        for number, channel in enumerate([*channels, alone]):
            filled = np.zeros((2, 2), "<i4")  # of each device the queues of two senders
            filled[:, number % 2] = 1
            own = np.repeat(process._empty_row, 2, axis=0)
            own[:, 0] = rng.integers(0, 1 << 8, 2)
            rows.append(own if number < 2 else rows[0])
            send(channel, Call("moe_layers", 0, 8, 8, filled.tobytes(), 0))
            channel.send_bytes(memoryview(rows[number].view(np.uint8)))
        for channel in [*channels, alone]:
            assert not receive(channel, Answered).error
            answer = np.empty((2, process._half.columns, wire.width), wire.dtype)
            channel.receive_into(memoryview(answer.view(np.uint8)))
            answers.append(answer)
    np.testing.assert_array_equal(answers[0], answers[2])
    assert (process.num_calls - counts[0], process.num_products - counts[1]) == (3, 2)


def test_of_two_processes_of_a_side_with_different_sizes_that_come_at_once_one_is_refused(process, monkeypatch):
    lock = process._lock

    class Slow:
        """A lock whose holder does nothing for a moment after it has let go, so that the other one goes on."""

        def __enter__(self):
            lock.acquire()

        def __exit__(self, *_):
            lock.release()
            time.sleep(0.2)

    monkeypatch.setattr(process, "_lock", Slow())
    with ThreadPoolExecutor(2) as threads:
        came = list(threads.map(lambda i: enter(process, b"at once", process=i, processes=2 + i), range(2)))
    refused = [error for _, error in came if error]
    for channel, _ in came:
        channel.close()
    assert len(refused) == 1
    assert "and others of this generation are of" in refused[0]
    until(lambda: not process._joint)


def test_a_side_that_compiles_does_not_hold_up_the_calls_of_another(process, monkeypatch):
    compiling, go_on, original = threading.Event(), threading.Event(), process.side.compile

    def compile_slowly(*arguments):
        compiling.set()
        assert go_on.wait(60)
        return original(*arguments)

    filled = np.zeros((2, 2), "<i4").tobytes()
    with entered(process, b"serves") as serving, entered(process, b"warms up") as warming:
        assert not ask(serving, Call("moe_layers", 0, 8, 8, filled, 0))
        monkeypatch.setattr(process.side, "compile", compile_slowly)
        send(warming, Call("moe_layers", -1, 4, 16, b""))
        assert compiling.wait(60)
        serving.settimeout(20)
        assert not ask(serving, Call("moe_layers", 0, 8, 8, filled, 1))
        go_on.set()
        assert not receive(warming, Answered).error


def test_a_side_hears_why_its_experts_cannot_be_read(process, monkeypatch):
    def read(*_):
        raise OSError("the disk is gone")

    rows = process._writer.rows.copy()
    monkeypatch.setattr(process._writer, "_read", read)
    assert refusal(process, rows=np.roll(rows, 1, axis=1)) == "OSError: the disk is gone"
    np.testing.assert_array_equal(process._writer.rows, rows)
    assert not refusal(process, rows=rows)


def test_an_expert_of_another_process_is_read_when_it_is_staged_and_not_when_it_is_placed(process, monkeypatch):
    writer = process._writer
    target, read, original = writer.own.start, [], writer._read
    before, after = writer.rows[0].copy(), writer.rows[0].copy()
    after[[0, target]] = before[[target, 0]]
    monkeypatch.setattr(writer, "_read", lambda *cell: read.append(cell) or original(*cell))
    writer.stage(0, [(0, target)])
    assert {expert for _, _, expert in read} == {before[0]}
    read.clear()
    writer.place(0, after)
    assert not read
    writer.place(0, before)


@pytest.mark.parametrize(
    ("stack", "layer", "says"),
    [
        ("nothing", -1, "there is no stack of experts 'nothing', only moe_layers"),  # to compile
        ("nothing", 0, "there is no stack of experts 'nothing', only moe_layers"),  # to compute
        ("moe_layers", 2, "moe_layers has no experts in layer 2"),
    ],
)
def test_an_unknown_stack_of_experts_and_a_layer_that_it_has_not_are_refused_in_a_line(
    process, caplog, stack, layer, says
):
    with entered(process) as channel:
        assert ask(channel, Call(stack, layer, 8, 8, np.zeros((2, 2), "<i4").tobytes())) == says
        assert not ask(channel, Call("moe_layers", -1, 8, 8, b""))
    (record,) = [record for record in caplog.records if says in record.getMessage()]
    assert (record.levelname, record.exc_info) == ("WARNING", None)


def test_rows_for_which_there_is_no_memory_are_answered_and_the_connection_stays(process, monkeypatch):
    filled, original = np.full((2, 1), 4096, "<i4"), np.empty

    def empty(shape, *arguments, **options):
        if np.ndim(shape) and shape[0] == filled.sum():
            raise MemoryError
        return original(shape, *arguments, **options)

    with entered(process) as channel:
        monkeypatch.setattr(np, "empty", empty)
        send(channel, Call("moe_layers", 0, 4096, 4096, filled.tobytes()))
        channel.send_bytes(bytes(int(filled.sum()) * process._half.wire.row_bytes))
        assert receive(channel, Answered).error == "MemoryError: there is no memory for 8,192 rows"
        assert not ask(channel, Place(0, process._writer.rows[0].tobytes()))
