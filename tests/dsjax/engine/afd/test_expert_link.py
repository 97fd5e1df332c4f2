"""A link to a process with experts: who is waited for, and who is not. The process is an endpoint of this one."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
from deployments import KEY, OTHER
from processes import free_port
from waits import until

from dsjax.engine.afd.expert_link import ExpertLink, ExpertsGoneError, LinkClosedError, check_reachable
from dsjax.engine.afd.messages import OPEN, PLACE, Answered, Call, Open, Opened, Place
from dsjax.errors import UserError
from dsjax.messaging import Endpoint, LinkListener, NotAMemberError, PeerLostError
from dsjax.messaging.link import LinkLostError


class Experts:
    """A process with experts. It answers a call with its rows.

    opens: what it does when it is asked to open; None: it lets everybody in. answers: whether it answers what it is asked for.
    """

    def __init__(self, port=0, opens=None, answers=True, key=KEY):
        self.endpoint = Endpoint("127.0.0.1", key, port=port)
        self.port, self.calls, self.asked = self.endpoint.port, [], threading.Semaphore(0)
        self._listener, self._answers, self._names = LinkListener(self.endpoint), answers, itertools.count()
        self.endpoint.serve(OPEN, opens or self._open, roles=("attention",), kind=Open)
        self.endpoint.serve(PLACE, self._place, roles=("attention",), kind=Place)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self):
        self.endpoint.close()
        self._thread.join(60)

    def _open(self, request):
        request.reply(Opened(self._listener.address, self._listener.ticket, str(next(self._names))))

    def _place(self, request):
        self.asked.release()
        if self._answers:
            request.reply()

    def _run(self):
        while True:
            try:
                message = self._listener.receive()
            except LinkLostError:
                continue
            except PeerLostError:
                return
            self.calls.append(msgspec.msgpack.decode(message.header, type=Call))
            self.asked.release()
            if self._answers:
                self.answer(message)

    def answer(self, message):
        with contextlib.suppress(PeerLostError):  # it asks again
            self._listener.send(message.sender, msgspec.msgpack.encode(Answered()), *message.frames)


def refuse(request):
    request.refuse("the checkpoint cannot be read")


@contextlib.contextmanager
def linked(port, patience=120.0, **options):
    with contextlib.closing(Endpoint("127.0.0.1", KEY, **options)) as endpoint:
        own = ExpertLink(endpoint, f"127.0.0.1:{port}", lambda: Open({}, b"", b"one"), patience=patience)
        with contextlib.closing(own):
            yield own


def ask(own):
    return own.ask(PLACE, Place(0, b""))


def call(own, number=0, rows=b""):
    sent = np.frombuffer(rows, np.uint8)
    answers = np.empty_like(sent)
    return own.begin(lambda: (Call("moe_layers", 0, 8, 8, b"", number), sent, answers)), answers


@contextlib.contextmanager
def left(**options):
    """A link to a process that has answered and gone, and the port that it had."""
    with contextlib.closing(Experts()) as first, linked(first.port, **options) as own:
        ask(own).result(60)
        first.close()
        yield own, first.port


def test_rows_go_there_and_answers_come_back():
    with contextlib.closing(Experts()) as process, linked(process.port) as own:
        for number, rows in enumerate((b"some rows", b"")):
            done, answers = call(own, number, rows)
            done.result(60)
            assert answers.tobytes() == rows
        assert (own.counts.calls, own.counts.sent, own.counts.received) == (2, 9, 9)


def test_who_lets_nobody_in_is_waited_for_if_it_was_there_before(caplog):
    reason = "refuses: the checkpoint cannot be read"
    with left() as (own, port):
        with contextlib.closing(Experts(port, opens=refuse)):
            done = ask(own)
            until(lambda: reason in caplog.text or done.done())
        with contextlib.closing(Experts(port)):
            done.result(60)
        assert (own.calls, own.losses) == (2, 1)
    assert caplog.text.count(reason + "); it is waited for") == 1


@pytest.mark.parametrize("end", [Experts.close, lambda process: None], ids=["goes", "says nothing"])
def test_a_process_that_goes_or_is_silent_while_it_is_opened_is_waited_for_as_long_as_one_that_is_not_there(end):
    opens = lambda request: threading.Thread(target=end, args=(one,)).start()  # noqa: E731
    gone = pytest.raises(ExpertsGoneError, match=r"for 0.5 s .*expert")
    with contextlib.closing(Experts(opens=opens)) as one, linked(one.port, patience=0.5) as own, gone:
        ask(own).result(60)


@pytest.mark.parametrize(
    ("opens", "end", "says"),
    [(False, ExpertLink.close, "is closed"), (True, ExpertLink.give_up, "closed under a call")],
)
@pytest.mark.parametrize("begin", [ask, lambda own: call(own)[0]], ids=["request", "call"])
def test_a_link_that_is_ended_waits_for_no_welcome_and_no_answer_and_calls_nobody_else(opens, end, says, begin):
    class Silent(Experts):
        def _open(self, request):
            super()._open(request) if opens else self.asked.release()

    with contextlib.closing(Silent(answers=False)) as process, linked(process.port) as own:
        done = begin(own)
        assert process.asked.acquire(timeout=60)
        ending = threading.Thread(target=end, args=(own,), daemon=True)
        ending.start()
        ending.join(60)
        assert not ending.is_alive()
        with pytest.raises(LinkClosedError, match=says):
            done.result(60)


def test_a_call_that_is_made_again_says_so():
    class Leaves(Experts):
        """It ends the connection of its second call."""

        def _open(self, request):
            self.peer = request.peer
            super()._open(request)

        def answer(self, message):
            self.peer.close() if len(self.calls) == 2 else super().answer(message)

    with contextlib.closing(Leaves()) as process, linked(process.port) as own:
        for number in range(3):
            call(own, number)[0].result(60)
        assert own.counts.losses == 1
        assert own.counts.last_gap > 0
    assert [(call.number, call.again) for call in process.calls] == [(0, False), (1, False), (1, True), (2, False)]


def test_what_a_process_could_not_do_is_an_error_with_its_reason():
    class Fails(Experts):
        def answer(self, message):
            self._listener.send(message.sender, msgspec.msgpack.encode(Answered("ValueError: no such layer")))

        def _place(self, request):
            request.refuse("another attention side is connected")

    with contextlib.closing(Fails()) as process, linked(process.port) as own:
        with pytest.raises(RuntimeError, match=r"the process with experts at .* failed: ValueError: no such layer"):
            call(own)[0].result(60)
        with pytest.raises(RuntimeError, match="failed: another attention side is connected"):
            ask(own).result(60)
        assert own.counts.connected


@pytest.mark.parametrize(("refuses", "reason"), [(True, "the checkpoint cannot be read"), (False, "--afd-role expert")])
def test_who_refuses_or_stays_away_for_too_long_ends_the_call_with_the_reason(refuses, reason):
    with left(patience=0.5) as (own, port):
        refusing = contextlib.closing(Experts(port, opens=refuse)) if refuses else contextlib.nullcontext()
        with refusing, pytest.raises(ExpertsGoneError, match=rf"for 0.5 s .*{reason}"):
            ask(own).result(60)


def test_a_process_with_another_key_is_no_loss_but_a_mistake():
    mistake = pytest.raises(NotAMemberError, match="another cluster key")
    with contextlib.closing(Experts(key=OTHER)) as process, linked(process.port) as own, mistake:
        own.connect()


def test_a_process_is_looked_for_beside_a_call_that_is_under_way():
    with contextlib.closing(Endpoint("127.0.0.1", KEY)) as endpoint, contextlib.closing(Experts()) as process:
        address = f"127.0.0.1:{process.port}"
        check_reachable(endpoint, address)
        process.close()
        with pytest.raises(UserError, match=f"no expert process answers at {address} .* ask again when it is there"):
            check_reachable(endpoint, address)


PROCESS = """
import sys
from deployments import KEY
from dsjax.engine.afd.messages import OPEN, Open, Opened
from dsjax.messaging import Endpoint, LinkListener
endpoint = Endpoint("127.0.0.1", KEY, port=int(sys.argv[1]), holds=[OPEN])
listener = LinkListener(endpoint)
opened = Opened(listener.address, listener.ticket, "0")
endpoint.serve(OPEN, lambda request: request.reply(opened), roles=("attention",), kind=Open)
listener.receive()
print("called", flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_stopped_under_a_call_is_lost_after_a_silence_and_the_next_one_gets_the_call():
    """Its kernel lives, and goes on to acknowledge what it is sent. When it is called first, nobody is there yet."""
    port, pipes = free_port(), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command, environment = [sys.executable, "-c", PROCESS, str(port)], {"PYTHONPATH": os.pathsep.join(sys.path)}
    stopping = subprocess.Popen(command, env=os.environ | environment, **pipes)
    with linked(port, silence=4.0) as own, stopping as stopped:
        made, answers = call(own, rows=b"a row")
        assert stopped.stdout.readline() == "called\n"
        stopped.send_signal(signal.SIGSTOP)
        until(lambda: own.losses == 1)
        assert not made.done()
        stopped.kill()
        stopped.wait()
        with contextlib.closing(Experts(port)) as experts:
            made.result(60)
            assert answers.tobytes() == b"a row"
            assert [one.again for one in experts.calls] == [True]
