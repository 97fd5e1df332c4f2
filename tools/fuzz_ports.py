"""Send the ports of running engines what strangers, other programs and confused members would, and see that nothing comes of it.

    python tools/fuzz_ports.py                           # 5,000 cases a port
    python tools/fuzz_ports.py --cases 200 --seed 7 --only experts

It starts what it needs, with a tiny model and a cluster key of its own, and takes every port of every process, one after the other: control
endpoints, logs, links, KV events, HTTP. JAX's own ports (coordination service, gloo, transfer server) are left out: they trust whoever
reaches them (docs/security.md). What runs: a group of two servers, while it forms and when it serves; a group with a stage a process; a
prefill and a decode engine; attention, and a process with experts.

A case is a connection, or many. A stranger sends random bytes, a greeting that ends somewhere or is of another version or mechanism, a
HELLO that is none, has no end or has another key, messages before the handshake, HTTP that is none or has no end, a byte now and then, or
floods the port. A member sends frames that are no message, requests to every service that it should not make, answers that nobody has
asked for, or frames that are too long. Meanwhile requests are answered over HTTP, prompts go from prefill to decode, rows to experts, and
hidden states from stage to stage.

It exits with 1 unless all of this holds: every stranger's connection is closed, and has heard no more than a greeting, where the port has
one. Members are let in within a flood, and the endpoint answers them. Every answer is what it was before anything was sent. No background
work fails. Every process lives and has all of its ports, no more threads and open files than before, and at most 16 MiB more memory. One
seed makes the same cases again. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / part) for part in ("", "dsjax/hosts", "dsjax/engine"))]

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from dsjax.addresses import join_address
from dsjax.errors import UserError
from dsjax.messaging import Credentials, Endpoint
from dsjax.messaging.cluster_key import VARIABLE, ClusterKey
from dsjax.messaging.curve import ROLES, connect_with_curve
from dsjax.messaging.endpoint import CONNECT_SECONDS
from dsjax.messaging.wire import Kind, encode
from tools.labs.port_cases import GREETING, MEMBERS, REQUESTS, SERVICES, STRANGERS, mechanism_of, ports_of
from tools.labs.port_owners import RUNS, Running

PATIENCE = 20.0
"""Seconds in which a listener must have ended a connection; it gives a handshake 5."""
MOST_GROWTH = 16
"""MiB of a process's memory."""
_MOST_HEARD = {"CURVE": GREETING, "PLAIN": GREETING + 16}  # behind its greeting a PLAIN listener says ERROR
_MOST_HELD, _FLOOD = 24, 200


class Fuzzer:
    """Makes cases for one port.

    services: that members ask for. said: what a member may also say there, a service and its body, that changes nothing.

    kinds: what was sent, by kind. wrong: what was found.
    """

    def __init__(
        self,
        address: tuple[str, int],
        credentials: Credentials,
        *,
        services: Sequence[str] = SERVICES,
        said: Sequence[tuple[str, Any]] = (),
        seed: int = 0,
        name: str = "",
    ):
        self.address, self._credentials, self._services, self._said = address, credentials, services, said
        self.mechanism = mechanism_of(address)
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._random = random.Random(f"{seed} {name}")
        self._strangers = REQUESTS if self.mechanism == "HTTP" else STRANGERS
        self._held: list[socket.socket] = []
        # Of members' sockets a log lets in subscribers alone, and a link answers no ping.
        self._kind = self._answers = None

    def run(self, cases: int) -> Fuzzer:
        """Send so many cases."""
        with contextlib.closing(Endpoint("127.0.0.1", self._credentials)) as self._endpoint:
            if self.mechanism == "CURVE" and self._kind is None:
                self._kind = next(filter(self._admits, (zmq.DEALER, zmq.XSUB)), None)
                self._answers = self._kind == zmq.DEALER and self._ping(CONNECT_SECONDS)
                if self._kind is None:
                    self.wrong.append("no member is let in")
            for number in range(cases):
                choice = self._random.random()
                of_members = choice > 0.7 and self._kind is not None
                kind = self._random.choice(list(MEMBERS if of_members else self._strangers))
                case = functools.partial(self._say if of_members else self._send_and_end, kind)
                if choice < 0.1:
                    kind, case = ("flood", self._flood) if choice < 0.005 else ("slow greeting", self._slow_greeting)
                self.kinds[kind] += 1
                try:
                    case()
                except Exception as error:
                    self.wrong.append(f"case {number}, {kind}: {type(error).__name__}: {error}")
            while self._held:
                self._held.pop().close()
            if self._answers and not self._ping(PATIENCE):
                self.wrong.append("a member is not answered at the end")
        return self

    # Strangers.

    def _send_and_end(self, kind: str) -> None:
        heard = 0
        with socket.create_connection(self.address, PATIENCE) as stranger:
            with contextlib.suppress(OSError):  # it may be closed already; what is wrong is seen below
                stranger.sendall(self._strangers[kind](self._random, self.mechanism))
                stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while said := stranger.recv(1 << 16):
                    heard += len(said)
        assert heard <= _MOST_HEARD.get(self.mechanism, 1 << 20), f"a stranger heard {heard} bytes"

    def _slow_greeting(self) -> None:
        """Connections that say a byte now and then, and are left open."""
        if len(self._held) >= _MOST_HELD:
            self._held.pop(0).close()
        self._held.append(socket.create_connection(self.address, PATIENCE))
        for held in self._held:
            with contextlib.suppress(OSError):
                held.send(b"\xff")

    def _flood(self) -> None:
        """Many strangers at once: a member comes in beside them."""
        with contextlib.ExitStack() as stack:
            for number in range(_FLOOD):
                stranger = stack.enter_context(socket.create_connection(self.address, PATIENCE))
                with contextlib.suppress(OSError):
                    stranger.sendall(STRANGERS["wrong hello"](self._random, self.mechanism)[: 200 * (number % 2)])
            assert self._kind is None or self._admits(self._kind), "no member is let in beside strangers"
            assert not self._answers or self._ping(CONNECT_SECONDS), "a member is not answered beside strangers"

    # Members.

    @contextlib.contextmanager
    def _as_member(self, kind: int = 0) -> Iterator[zmq.Socket | None]:
        """A socket of a member that is let in; None where it is not."""
        host, port = self.address
        member = self._endpoint.socket(kind or self._kind, host)
        connect_with_curve(member, self._credentials.key, self._random.choice(ROLES))
        monitor = self._endpoint.watch(member)
        member.connect(f"tcp://{host}:{port}")
        try:
            ended, event = time.monotonic() + CONNECT_SECONDS, zmq.EVENT_CONNECTED
            while event == zmq.EVENT_CONNECTED and monitor.poll(max(0.0, ended - time.monotonic()) * 1000):
                event = recv_monitor_message(monitor)["event"]
            yield member if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else None
        finally:
            Endpoint.unwatch(member, monitor, linger=1.0)

    def _admits(self, kind: int) -> bool:
        with self._as_member(kind) as member:
            return member is not None

    def _ping(self, seconds: float) -> bool:
        """Whether the port answers a member, as an endpoint does."""
        try:
            self._endpoint.ping(join_address(*self.address), self._random.choice(ROLES), seconds)
        except (OSError, UserError):
            return False
        return True

    def _say(self, kind: str) -> None:
        with self._as_member() as member:
            assert member is not None, "a member is not let in"
            for _ in range(4):
                frames = MEMBERS[kind](self._random, self._services)
                if kind == "nonsense request" and self._said and self._random.random() < 0.3:
                    service, body = self._random.choice(self._said)
                    frames = encode(Kind.REQUEST, service, 1, body)
                with contextlib.suppress(zmq.Again):  # its connection was ended
                    member.send_multipart(frames, zmq.NOBLOCK)


class UnderWay:
    """Requests that are made again and again while it is entered, each held to its answer at the beginning.

    ask: answers one of `count`, in words that can be compared; None: nothing is asked.

    answered: how many. wrong: what was wrong.
    """

    def __init__(self, ask: Callable[[int], Any] | None, count: int):
        self._ask, self._count = ask, count
        self._expected = [ask(number) for number in range(count)] if ask else []
        self.answered, self.wrong = 0, []

    def __enter__(self) -> UnderWay:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=[self._ended], daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)
        if self._thread.is_alive():
            self.wrong.append("a request is not answered")

    def _run(self, ended: threading.Event) -> None:
        while self._ask and not ended.is_set():
            number = self.answered % self._count
            try:
                answer = self._ask(number)
            except Exception as error:
                self.wrong.append(f"request {number}: {type(error).__name__}: {error}")
                return
            if answer != self._expected[number]:
                self.wrong.append(f"request {number} is answered by {answer!r}, expected {self._expected[number]!r}")
            self.answered += 1

    def take(self) -> list[str]:
        """What was wrong since this was called last."""
        wrong, self.wrong = self.wrong, []
        return wrong or (["no request was answered"] if self._ask and not self.answered else [])


class Figures(NamedTuple):
    """What a process takes at a moment. memory: in MiB."""

    memory: int
    threads: int
    files: int

    def exceeds(self, was: Figures) -> bool:
        """Whether this is more than it was."""
        return self.memory > was.memory + MOST_GROWTH or self.threads > was.threads or self.files > was.files

    @classmethod
    def at_rest(cls, pid: int, seconds: float = 60.0) -> Figures:
        """Read them once threads and files are the same for 6 s, and memory nearly so: handshakes that were under way have ended then."""
        seen: list[Figures] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (len(seen) > 12 and len(set(seen[-12:])) == 1):
            process = psutil.Process(pid)
            seen.append(cls(process.memory_info().rss >> 20, process.num_threads(), process.num_fds()))
            time.sleep(0.5)
        return seen[-1]

    @classmethod
    def of(cls, running: Running) -> dict[str, Figures]:
        """Read those of all processes."""
        return {name: cls.at_rest(pid) for name, (pid, _) in running.processes.items()}


def fuzz(running: Running, cases: int, seed: int, key: Credentials) -> Iterator[Fuzzer]:
    """Fuzz all ports of what runs, and hold what its processes take and answer against what it was before. Print what came of each."""
    requests, warm, failures = UnderWay(running.ask, 6), running.warm_requests, running.failures()
    for process, (pid, count) in running.processes.items():
        ports = ports_of(pid)
        assert len(ports) == count, f"{process} of {running.name} has {len(ports)} ports, expected {count}"
        for number, address in enumerate(ports):
            name = f"{running.name}, {process}, port {number + 1} of {count}"
            fuzzer = Fuzzer(address, key, said=running.said, seed=seed, name=name)
            requests.answered = 0
            with requests:
                fuzzer.run(max(50, cases // 10))  # threads that are made once, memory that a first time takes
                while running.ask and requests.answered < warm and not requests.wrong:
                    time.sleep(0.1)
            warm, after = 1, Figures.of(running)
            for _ in range(2):  # what is taken once may come late; what leaks grows again
                before = after
                with requests:
                    fuzzer.run(cases)
                after = Figures.of(running)
                grown = [one for one, was in before.items() if after[one].exceeds(was)]
                if not grown:
                    break
            fuzzer.wrong += [*requests.take(), *(f"{one} has grown, twice" for one in grown)]
            if running.failures() != failures:
                fuzzer.wrong.append(f"failures: {failures} before, {running.failures()} after")
                failures = running.failures()
            print(
                f"{name} ({fuzzer.mechanism}): {fuzzer.kinds.total():,} cases, {requests.answered:,} requests answered"
            )
            print(*(f"  {one}: before {was}, after {after[one]}" for one, was in before.items()), sep="\n")
            print("  " + ", ".join(f"{count} {kind}" for kind, count in fuzzer.kinds.most_common()))
            print(*(f"  wrong: {wrong}\n" for wrong in fuzzer.wrong[:10]), sep="", end="", flush=True)
            yield fuzzer


def main() -> int:
    """Fuzz all ports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000, help="of each port")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=RUNS, help="the ports of this alone")
    args = parser.parse_args()
    text = secrets.token_hex(32)
    os.environ[VARIABLE] = text
    key, ports, wrong = Credentials(ClusterKey(text, "this tool")), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for name in [args.only] if args.only else RUNS:
            (place := Path(folder) / name).mkdir()
            with contextlib.closing(RUNS[name](place)) as states:
                for fuzzer in (one for state in states for one in fuzz(state, args.cases, args.seed, key)):
                    ports, wrong = ports + 1, wrong + len(fuzzer.wrong)
    print(f"{ports} ports, {wrong} findings")
    return 1 if wrong or not ports else 0


if __name__ == "__main__":
    sys.exit(main())
