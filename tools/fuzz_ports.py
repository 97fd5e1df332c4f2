"""Send the internal ports of running engines what strangers, other programs and confused members would, and see that nothing comes of it.

    python tools/fuzz_ports.py                           # 5,000 cases a port
    python tools/fuzz_ports.py --cases 200 --seed 7 --only experts

It starts what it needs, with a tiny model and a cluster key of its own, and takes every ZeroMQ port of every process, one after the other:

    | what runs                                 | ports                                                             |
    |-------------------------------------------|-------------------------------------------------------------------|
    | process 0 of a group of two servers       | its endpoint and its log, while the group forms                   |
    | the group of two servers                  | those of both                                                     |
    | a group with a stage a process            | those, and the links between the stages                           |
    | a prefill and a decode engine             | those of prefill                                                  |
    | attention, and a process with experts     | those of both, and the link for experts' calls                    |

A case is a connection, or many. A stranger sends random bytes, a greeting that ends somewhere or is of another version or mechanism, a
HELLO that is none, has no end or has another key, messages before the handshake, a byte now and then, or floods the port. A member sends
frames that are no message, requests to every service that it should not make, answers that nobody has asked for, or frames that are too
long. Meanwhile requests are answered over HTTP, prompts go from prefill to decode, rows to experts, and hidden states from stage to stage.

It exits with 1 unless all of this holds: every stranger's connection is closed, and has heard no more than a greeting. Members are let in
within a flood, and the endpoint answers them. Every answer is what it was before. Every process lives, with no more threads and open files
than before, and at most 16 MiB more memory. One seed makes the same cases again. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import secrets
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = [str(ROOT), *(str(TESTS / part) for part in ("", "dsjax/hosts", "dsjax/engine"))]

import msgspec
import psutil
import zmq
from listening_sockets import listening_addresses
from processes import Group, Processes, free_port
from quick_compilation import QUICK_COMPILATION
from worded_checkpoint import write_worded_checkpoint
from zmq.utils.monitor import recv_monitor_message

from dsjax.hosts.wire import JoinRequest
from dsjax.messaging import Credentials, Endpoint
from dsjax.messaging.cluster_key import VARIABLE, ClusterKey
from dsjax.messaging.curve import ROLES, connect_with_curve
from dsjax.messaging.endpoint import CONNECT_SECONDS, PING
from dsjax.messaging.wire import Kind, decode, encode
from tools.labs.servers import MODEL, SideProcess, complete, url_of

PATIENCE = 20.0
"""Seconds in which a listener must have ended a connection; it gives a handshake 5."""
MOST_GROWTH = 16
"""MiB of a process's memory."""
SERVICES = (
    *("join", "prepared", "ready", "leave", "gather", "log", "look", "pulled", PING),
    *("experts.open", "experts.compile", "experts.stage", "experts.place", "prefill", "pull", "done"),
)
"""What members ask for; a name that a process does not serve is a case too."""
SIZES = "--max-num-seqs 4 --max-num-batched-tokens 16 --prefill-chunk 16 --page-size 4 --max-model-len 96"
_GREETING = 64
_MOST_HEARD = _GREETING + 16  # behind its greeting a PLAIN listener says ERROR
_MOST_HELD, _FLOOD = 24, 200
_NONSENSE = (None, True, -1, 0, 2**63, 0.5, "x", b"x", "x" * 5000, [], {}, [0], [1, 2, 3], ["x", b"x", {"x": [None]}])


@dataclass
class Findings:
    """What was sent to a port, by kind, and what was wrong. answered: requests under way that were answered as before."""

    port: str
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answered: int = 0
    figures: list[str] = field(default_factory=list)


class Figures(NamedTuple):
    """What a process takes at a moment."""

    memory: int
    threads: int
    files: int

    @classmethod
    def at_rest(cls, pid: int, seconds: float = 60.0) -> Figures:
        """Read them once threads and files are the same for 6 s, and memory nearly so: handshakes that were under way have ended then."""
        seen: list[Figures] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            process = psutil.Process(pid)
            seen.append(cls(process.memory_info().rss >> 20, process.num_threads(), process.num_fds()))
            if len(seen) > 12 and len(set(seen[-12:])) == 1:
                break
            time.sleep(0.5)
        return seen[-1]


class Fuzzer:
    """Makes cases for one port.

    Args:
        services: that members ask for. said: what a member may also say there, a service and its body, that changes nothing.
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
        self.address, self._credentials = address, credentials
        self._services, self._said = services, said
        self.mechanism = mechanism_of(address)
        self.findings = Findings(name or self.mechanism)
        self._random = random.Random(f"{seed} {name}")
        self._held: list[socket.socket] = []

    def run(self, cases: int) -> Findings:
        """Send so many cases."""
        with contextlib.closing(Endpoint("127.0.0.1", self._credentials)) as self._endpoint:
            # A log lets in subscribers alone, and a link answers no ping.
            self._kinds = [kind for kind in (zmq.DEALER, zmq.XSUB) if self.mechanism == "CURVE" and self._admits(kind)]
            self._answers = self._kinds == [zmq.DEALER] and self._ping(1)
            if self.mechanism == "CURVE" and not self._kinds:
                self.findings.wrong.append("no member is let in")
            for number in range(cases):
                choice = self._random.random()
                kinds = MEMBERS if choice > 0.7 and self._kinds else STRANGERS
                kind = self._random.choice(list(kinds))
                case = functools.partial(self._say if kinds is MEMBERS else self._send_and_end, kind)
                if choice < 0.1:
                    kind, case = ("flood", self._flood) if choice < 0.005 else ("slow greeting", self._slow_greeting)
                self.findings.kinds[kind] += 1
                try:
                    case()
                except Exception as error:
                    self.findings.wrong.append(f"case {number}, {kind}: {type(error).__name__}: {error}")
            while self._held:
                self._held.pop().close()
            if self._answers and not self._ping(PATIENCE):
                self.findings.wrong.append("a member is not answered at the end")
        return self.findings

    # Strangers.

    def _send_and_end(self, kind: str) -> None:
        heard = 0
        with socket.create_connection(self.address, PATIENCE) as stranger:
            with contextlib.suppress(OSError):  # it may be closed already; what is wrong is seen below
                stranger.sendall(STRANGERS[kind](self._random, self.mechanism))
                stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while said := stranger.recv(1 << 16):
                    heard += len(said)
        assert heard <= _MOST_HEARD, f"a stranger heard {heard} bytes"

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
            assert all(map(self._admits, self._kinds)), "no member is let in beside strangers"
            assert not self._answers or self._ping(CONNECT_SECONDS), "a member is not answered beside strangers"

    # Members.

    @contextlib.contextmanager
    def _as_member(self, kind: int = 0) -> Iterator[zmq.Socket | None]:
        """A socket of a member that is let in; None where it is not."""
        host, port = self.address
        member = self._endpoint.socket(kind or self._kinds[0], host)
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
        with self._as_member() as member:
            number = self._random.randrange(2**40)
            if member is not None:
                member.send_multipart(encode(Kind.REQUEST, PING, number, ["ping", number]))
                while member.poll(seconds * 1000):
                    header, data = decode(member.recv_multipart())
                    if header.number == number:
                        return header.kind is Kind.REPLY and msgspec.msgpack.decode(data) == ["ping", number]
        return False

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


def greeting(mechanism: str) -> bytes:
    """How a connection begins in ZMTP 3.1."""
    return b"\xff" + bytes(7) + b"\1\x7f\3\1" + mechanism.encode().ljust(20, b"\0") + bytes(32)


def frame(body: bytes, is_command: bool = False) -> bytes:
    """A frame of ZMTP, as it goes over the wire."""
    flags = 4 * is_command
    return (bytes([flags, len(body)]) if len(body) < 256 else bytes([flags | 2]) + struct.pack(">Q", len(body))) + body


def _hello(rng: random.Random, mechanism: str) -> bytes:
    """A HELLO of somebody who does not know the key or the ticket."""
    said = [rng.randbytes(rng.randrange(40)) for _ in range(2)]
    plain = b"".join(bytes([len(one)]) + one for one in said)
    return frame(b"\5HELLO" + (plain if mechanism == "PLAIN" else b"\1\0" + bytes(72) + rng.randbytes(120)), True)


def _changed(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(1) + data[at + 1 :]


_EARLY = (
    frame(b"\5READY\x0bSocket-Type\0\0\0\6DEALER", True),
    frame(b"\4PING\0\1", True),
    *(frame(b"\1"), frame(encode(Kind.REQUEST, PING, 1, None)[0])),
)
STRANGERS: dict[str, Callable[[random.Random, str], bytes]] = {
    "random bytes": lambda rng, _: rng.randbytes(int(2 ** rng.uniform(0, 13))),
    "cut greeting": lambda rng, mechanism: (greeting(mechanism) + _hello(rng, mechanism))[: rng.randrange(264)],
    "other version": lambda rng, mechanism: _changed(rng, greeting(mechanism)[:12]) + greeting(mechanism)[12:],
    "other mechanism": lambda rng, mechanism: (
        greeting(rng.choice(["NULL", "PLAIN", "CURVE", "GSSAPI", "curve", "", "X" * 20])) + _hello(rng, mechanism)
    ),
    "wrong hello": lambda rng, mechanism: greeting(mechanism) + _hello(rng, mechanism),
    "misshapen hello": lambda rng, mechanism: (
        greeting(mechanism)
        + frame(
            rng.choice([b"\5HELLO", b"\x08INITIATE", b"\5ERROR", b"\xff", b""]) + rng.randbytes(rng.randrange(300)),
            True,
        )
    ),
    "frame without end": lambda rng, mechanism: (
        greeting(mechanism)
        + rng.choice([b"\2", b"\3", b"\6"])
        + struct.pack(">Q", int(2 ** rng.uniform(8, 63)))
        + rng.randbytes(rng.randrange(1 << 16))
    ),
    "early messages": lambda rng, mechanism: greeting(mechanism) + b"".join(rng.choices(_EARLY, k=4)),
}
"""What somebody says who does not belong to the deployment, by the port's mechanism."""


def _request(rng: random.Random, services: Sequence[str]) -> list[bytes]:
    return encode(rng.choice([Kind.REQUEST, Kind.ONE_WAY]), rng.choice(services), 2**40, rng.choice(_NONSENSE))


MEMBERS: dict[str, Callable[[random.Random, Sequence[str]], list[bytes]]] = {
    "random frames": lambda rng, _: [rng.randbytes(rng.randrange(4096)) for _ in range(rng.randrange(1, 5))],
    "cut message": lambda rng, services: [(head := _request(rng, services)[0])[: rng.randrange(len(head))]],
    "changed message": lambda rng, services: [_changed(rng, _request(rng, services)[0])],
    "wrong number of frames": lambda rng, services: rng.choice(
        [[*_request(rng, services), b"more"], encode(Kind.REQUEST, PING, 1, bytes(2**20 + 1))[:1], [b""] * 3]
    ),
    "deep nesting": lambda rng, _: [b"\x81" * rng.randrange(1, 5000)],
    "nonsense request": _request,
    "nonsense answer": lambda rng, _: encode(
        rng.choice([Kind.REPLY, Kind.REFUSAL, Kind.FAILURE, Kind.GOODBYE]),
        "",
        rng.choice([0, 2**40, -1]),
        rng.choice(_NONSENSE),
    ),
    "frame that is too long": lambda rng, _: [bytes((2 << 20) + 1 if rng.random() < 0.1 else 2 << 20)],
}
"""What a member says that it should not, by the services that it knows."""


def mechanism_of(address: tuple[str, int]) -> str:
    """How a ZeroMQ port wants others to show who they are; empty: it is no such port."""
    with contextlib.suppress(OSError), socket.create_connection(address, 5) as probe:
        probe.settimeout(2)
        probe.sendall(greeting("NULL")[:12])  # with another mechanism behind it some hear nothing
        heard = probe.makefile("rb").read(_GREETING)
        if len(heard) == _GREETING and (heard[0], heard[9]) == (0xFF, 0x7F):
            return heard[12:32].rstrip(b"\0").decode()
    return ""


def ports_of(pid: int) -> list[tuple[str, int]]:
    """The ports of a process that belong to the deployment."""
    addresses = [(host, port) for port, host in sorted(listening_addresses(pid).items())]
    return [address for address in addresses if mechanism_of(address) in ("CURVE", "PLAIN")]


class UnderWay:
    """Requests that are made again and again meanwhile. ask: answers one of so many, in words that can be compared."""

    def __init__(self, ask: Callable[[int], Any], count: int):
        self._ask, self._count = ask, count
        self._expected = [ask(number) for number in range(count)]
        self._ended, self.answered, self.wrong = threading.Event(), 0, []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> UnderWay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)
        if self._thread.is_alive():
            self.wrong.append("a request is not answered")

    def _run(self) -> None:
        while not self._ended.is_set():
            number = self.answered % self._count
            try:
                answer = self._ask(number)
            except Exception as error:
                self.wrong.append(f"request {number}: {type(error).__name__}: {error}")
                return
            if answer != self._expected[number]:
                self.wrong.append(f"request {number} is answered by {answer!r}, expected {self._expected[number]!r}")
            self.answered += 1


@dataclass
class Running:
    """Processes that run, by name.

    Attributes:
        ask: answers one of `count` requests. said: what a member may say to them. warm_requests: after which a process takes what requests
            make it take: an engine that is not warmed up compiles at first use. failures: gives what must not grow meanwhile.
    """

    name: str
    pids: dict[str, int]
    ask: Callable[[int], Any] | None = None
    count: int = 6
    said: Sequence[tuple[str, Any]] = ()
    warm_requests: int = 60
    failures: Callable[[], Any] = lambda: None

    def fuzz(self, cases: int, seed: int, key: Credentials) -> Iterator[Findings]:
        """Fuzz all ports of all processes."""
        for process, pid in self.pids.items():
            ports = ports_of(pid)
            assert ports, f"{process} has no port"
            for number, address in enumerate(ports):
                name = f"{self.name}, {process}, port {number + 1} of {len(ports)} ({mechanism_of(address)})"
                yield self._fuzz(Fuzzer(address, key, said=self.said, seed=seed, name=name), cases)
                self.warm_requests = 1
        for process, pid in self.pids.items():
            assert Path(f"/proc/{pid}/exe").exists(), f"{process} has ended"

    def _fuzz(self, fuzzer: Fuzzer, cases: int) -> Findings:
        """Send cases to a port, and hold what the processes take and answer against what it was before."""
        with self._under_way() as warming:
            fuzzer.run(max(50, cases // 10))  # threads that are made once, memory that a first time takes
            while warming and warming.answered < self.warm_requests and not warming.wrong:
                time.sleep(0.1)
        before = {name: Figures.at_rest(pid) for name, pid in self.pids.items()}
        failures = self.failures()
        with self._under_way() as under_way:
            findings = fuzzer.run(cases)
        if under_way:
            findings.wrong += under_way.wrong or ([] if under_way.answered else ["no request was answered meanwhile"])
            findings.answered = under_way.answered
        if self.failures() != failures:
            findings.wrong.append(f"failures: {failures} before, {self.failures()} after")
        for name, pid in self.pids.items():
            was, now = before[name], Figures.at_rest(pid)
            findings.figures.append(f"{name}: before {was}, after {now} (MiB)")
            if now.memory > was.memory + MOST_GROWTH or now.threads > was.threads or now.files > was.files:
                findings.wrong.append(findings.figures[-1])
        return findings

    def _under_way(self) -> contextlib.AbstractContextManager[UnderWay | None]:
        return UnderWay(self.ask, self.count) if self.ask else contextlib.nullcontext()


def run_group(folder: Path) -> Iterator[Running]:
    """A group of two servers: process 0 while the group forms, then both."""
    said = [("join", JoinRequest(*ids, "fuzz", 1, "127.0.0.1", "fuzz")) for ids in ((1, 99), (7, 2))]
    group = Group(serve_command(folder, "--mesh", "dp=4"), 2, timeout=3600)
    with ending(group, "process 0", "process 1") as pids:
        group.processes[1].send_signal(signal.SIGSTOP)
        while not ports_of(pids["process 0"]):
            assert group.processes[0].poll() is None, "process 0 has ended"
            time.sleep(0.1)
        yield Running("a group that forms", {"process 0": pids["process 0"]}, said=said)
        group.processes[1].send_signal(signal.SIGCONT)
        yield Running("a group", pids, functools.partial(ask_server, url_of(group, 600)), said=said)


def run_stages(folder: Path) -> Iterator[Running]:
    """Two processes with a stage of a model each."""
    group = Group(serve_command(folder, "--mesh", "pp=2,dp=2"), 2, timeout=3600)
    with ending(group, "process 0", "process 1") as pids:
        yield Running("stages", pids, functools.partial(ask_server, url_of(group, 600)))


@contextlib.contextmanager
def ending(processes: Processes, *names: str) -> Iterator[dict[str, int]]:
    """Give the ids of processes by name, and end the processes after the block. Prints their output if the block fails."""
    try:
        yield {name: process.pid for name, process in zip(names, processes.processes, strict=True)}
    except BaseException:
        print(processes.last_words(), file=sys.stderr)
        raise
    finally:
        processes.end()


def serve_command(folder: Path, *options: str) -> list[str]:
    """Python's arguments that serve a tiny model, which is written to a folder."""
    named = ["--model", str(write_worded_checkpoint(folder)), "--served-model-name", MODEL, "--port", "0"]
    return ["-m", "dsjax.serve", *named, *options, "--kernels", "plain", *SIZES.split()]


def ask_server(url: str, number: int) -> str:
    """Have a server of the tiny model answer a prompt, greedily."""
    return complete(url, MODEL, f"{'def the queue ' * (1 + number % 3)}{number}", 8)


def run_sides(folder: Path) -> Iterator[Running]:
    """A prefill engine, and a decode engine that has its prompts computed there."""
    from drafting_checkpoint import write_drafting_checkpoint

    write_drafting_checkpoint(folder)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "max_model_len": 96}
    options = {"model": str(folder), "dtype": "float32", "local_prefill_tokens": 1, "transfer_timeout": 60, **sizes}
    prompts = [
        [2 + (7 * number + token * (3 + number)) % 280 for token in range(30 + 5 * number)] for number in range(6)
    ]
    with contextlib.ExitStack() as stack:
        sides = [
            SideProcess(*QUICK_COMPILATION, mesh="dp=1", disaggregation_mode=mode, **options)
            for mode in ("prefill", "decode")
        ]
        for one in sides:
            stack.callback(one.end)
        for one in sides:
            one.wait()
        prefill, decoder = sides

        def ask(number: int) -> list[int]:
            said = prefill.ask(tokens=prompts[number])
            return decoder.ask(requests=[["0", prompts[number], said]])["token_ids"]["0"]

        yield Running(
            "sides", {"prefill": prefill.pid}, ask, warm_requests=400, failures=lambda: decoder.ask()["given_up"]
        )


def run_experts(folder: Path) -> Iterator[Running]:
    """A process with experts, and a server whose tokens' experts are computed there."""
    meshes = ("--attention-mesh", "dp=2", "--expert-mesh", "ep=4", "--afd-address", f"127.0.0.1:{free_port()}")
    command = [sys.executable, *serve_command(folder, *meshes), "--afd-role"]
    processes = Processes([[*command, role] for role in ("attention", "expert")], stuck=600)
    with ending(processes, "attention", "experts") as pids:
        yield Running("experts", pids, functools.partial(ask_server, url_of(processes, 600)))


def main() -> int:
    """Fuzz all ports, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000, help="of each port")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=RUNS, help="the ports of this alone")
    args = parser.parse_args()
    text = secrets.token_hex(32)
    os.environ[VARIABLE] = text
    key = Credentials(ClusterKey(text, "this tool"))
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, run in RUNS.items():
            if args.only in (None, name):
                (place := Path(folder) / name).mkdir()
                with contextlib.closing(run(place)) as states:
                    for running in states:
                        for findings in running.fuzz(args.cases, args.seed, key):
                            wrong += len(findings.wrong)
                            _print(findings)
    return 1 if wrong else 0


RUNS = {"group": run_group, "stages": run_stages, "sides": run_sides, "experts": run_experts}


def _print(findings: Findings) -> None:
    count = sum(findings.kinds.values())
    print(f"{findings.port}: {count:,} cases, {findings.answered:,} requests answered meanwhile as before")
    kinds = ", ".join(f"{count} {kind}" for kind, count in findings.kinds.most_common())
    print(*findings.figures, kinds, *(f"wrong: {wrong}" for wrong in findings.wrong[:10]), sep="\n  ", flush=True)


if __name__ == "__main__":
    sys.exit(main())
