"""Send the internal ports of running engines what strangers, old versions and tampered connections would, and see that nothing comes of it.

    python tools/fuzz_ports.py                           # 5,000 cases a port
    python tools/fuzz_ports.py --cases 200 --seed 7 --only experts

It starts what it needs, with a tiny model and a cluster key of its own, and takes the ports one after the other:

    | what runs                       | ports                                                                                        |
    |---------------------------------|----------------------------------------------------------------------------------------------|
    | a group of two servers          | rendezvous while the group forms and once it has formed; links, for both services there      |
    | a group with a stage a process  | stages, of both                                                                              |
    | a prefill and a decode engine   | transfers, chunks                                                                            |
    | attention, and a process with   | experts: as a member with another model, as another attention side, and as another process   |
    | experts                         | with experts                                                                                 |

The port between the processes of an attention side is open only while a mesh changes, which is too short a time for this:
`tests/tools/test_fuzz_ports.py` fuzzes it in one process.

A case is a connection, or many: random bytes, a greeting that ends somewhere, one of another version, one with a wrong or an old proof, one
that comes byte by byte, a flood; or a member's connection whose frames were changed, cut off, replayed, put into another order, or say that
they are 4 GiB long. Meanwhile requests are answered over HTTP, prompts go from prefill to decode, rows from attention to experts, and
hidden states from stage to stage.

It exits with 1 unless all of this holds: every such connection is closed, and a stranger has heard no more than a listener's nonce. Every
answer is what it was before. Every process lives, with no more threads and open files than before, and at most 16 MiB more memory. One
seed makes the same cases again. Linux.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import errno
import functools
import json
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), *(str(TESTS / part) for part in ("", "dsjax/hosts", "dsjax/engine"))]

import msgspec
import numpy as np
from listening_sockets import listening_addresses
from serve_process import serve_process

from dsjax.messaging.cluster_key import VARIABLE, ClusterKey
from dsjax.messaging.credentials import Credentials
from dsjax.hosts.secure_channel import PROTOCOL, NotAMemberError, RefusedError, connect

PATIENCE = 20.0
"""Seconds in which a listener must have ended a connection; it gives a greeting 5."""
MOST_GROWTH = 16 * 2**20
_NONCE, _PROOF, _HEADER = 32, 32, 4 + 32
_MOST_HELD = 24
_FLOOD = 40


@dataclass
class Findings:
    """What was sent to a port, and what was wrong.

    Attributes:
        service: that the port is for. kinds: cases by kind. answered: requests under way that were answered as before.
        figures: of each process, before and after.
    """

    port: str
    service: str
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answered: int = 0
    seconds: float = 0.0
    figures: dict[str, tuple[Figures, Figures]] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """What a process takes at a moment."""

    memory: int
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Figures:
        """Read them."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))


class Fuzzer:
    """Makes cases for one port.

    Args:
        service: that the port is for. messages: what a member may say there that changes nothing, the first ones first.
    """

    def __init__(
        self,
        address: tuple[str, int],
        service: str,
        credentials: Credentials,
        messages: Sequence[bytes] = (),
        seed: int = 0,
        name: str = "",
    ):
        self.address, self.service, self._credentials = address, service, credentials
        self._messages = [*messages, b"\xc0", b"a message that nobody knows"]
        self._random = random.Random(f"{seed} {name or service}")
        self._held: list[socket.socket] = []
        self._old_greeting = b""
        self.findings = Findings(name or service, service)
        self._strangers: list[Callable[[], None]] = [
            self._random_bytes,
            self._truncated_greeting,
            self._other_version,
            self._wrong_proof,
            self._old_proof,
            self._own_proof,
            self._endless_name,
            self._slow_greeting,
        ]
        self._changes: list[Callable[[list[bytes]], list[bytes]]] = [
            self._flipped,
            self._replayed,
            self._reordered,
            self._dropped,
            self._oversized,
            self._truncated,
            self._random_frame,
        ]

    def run(self, cases: int) -> Findings:
        """Send so many cases."""
        begun = time.monotonic()
        for number in range(cases):
            choice = self._random.random()
            if choice < 0.005:
                case, arguments = self._flood, ()
            elif choice < 0.55:
                case, arguments = self._random.choice(self._strangers), ()
            elif choice < 0.6:
                case, arguments = self._nonsense, ()
            else:
                case, arguments = self._tampered, (self._random.choice(self._changes),)
            kind = (arguments[0] if arguments else case).__name__.strip("_").replace("_", " ")
            self.findings.kinds[kind] += 1
            try:
                case(*arguments)
            except Exception as error:
                self.findings.wrong.append(f"case {number}, {kind}: {type(error).__name__}: {error}")
        for held in self._held:
            held.close()
        self._held.clear()
        self.findings.seconds += time.monotonic() - begun
        return self.findings

    # Strangers.

    def _random_bytes(self) -> None:
        self._send_and_end(self._random.randbytes(int(2 ** self._random.uniform(0, 13))))

    def _truncated_greeting(self) -> None:
        greeting = self._greeting(self._random.randbytes(_PROOF))
        self._send_and_end(greeting[: self._random.randrange(len(greeting))])

    def _other_version(self) -> None:
        version = PROTOCOL[:-1] + bytes([self._random.choice([b for b in range(256) if b != PROTOCOL[-1]])])
        self._send_and_end(self._greeting(self._random.randbytes(_PROOF), version))

    def _wrong_proof(self) -> None:
        self._send_and_end(self._greeting(self._random.randbytes(_PROOF)))

    def _old_proof(self) -> None:
        """A greeting that a member has sent before, with its frames."""
        if not self._old_greeting:
            with self._as_member() as wire:
                self._old_greeting = b"".join(wire.sent)
        self._send_and_end(self._old_greeting)

    def _own_proof(self) -> None:
        """The listener's own bytes come back to it."""
        with socket.create_connection(self.address, PATIENCE) as stranger:
            heard = stranger.recv(len(PROTOCOL) + _NONCE, socket.MSG_WAITALL)
            stranger.sendall(heard + bytes([len(self.service)]) + self.service.encode() + heard[-_PROOF:])
            self._expect_silence(stranger, len(heard))

    def _endless_name(self) -> None:
        head = PROTOCOL + self._random.randbytes(_NONCE) + b"\xff"
        self._send_and_end(head + self._random.randbytes(self._random.randrange(1 << 18)))

    def _slow_greeting(self) -> None:
        """Connections that say a byte now and then, and are left open."""
        if len(self._held) >= _MOST_HELD:
            self._held.pop(0).close()
        self._held.append(socket.create_connection(self.address, PATIENCE))
        for held in self._held:
            with contextlib.suppress(OSError):
                held.send(PROTOCOL[:1])

    def _flood(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(_FLOOD):
                stack.enter_context(socket.create_connection(self.address, PATIENCE))

    def _greeting(self, proof: bytes, version: bytes = PROTOCOL) -> bytes:
        return version + self._random.randbytes(_NONCE) + bytes([len(self.service)]) + self.service.encode() + proof

    def _send_and_end(self, data: bytes) -> None:
        with socket.create_connection(self.address, PATIENCE) as stranger:
            with _may_be_closed():
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
            self._expect_silence(stranger)

    def _expect_silence(self, stranger: socket.socket, heard: int = 0) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := stranger.recv(1 << 16):
                heard += len(data)
        assert heard <= len(PROTOCOL) + _NONCE, f"a stranger heard {heard} bytes"

    # Members, whose frames somebody changes.

    @contextlib.contextmanager
    def _as_member(self) -> Iterator[_Wire]:
        with connect(self.address, self.service, self._credentials, PATIENCE) as channel:
            channel.settimeout(PATIENCE)
            wire = channel._stream = _Wire(channel._stream)
            for message in self._messages[: self._random.randrange(1, len(self._messages) + 1)]:
                channel.send(message)
            while len(wire.sent) < 2:
                channel.send(self._random.choice(self._messages))
            yield wire

    def _tampered(self, change: Callable[[list[bytes]], list[bytes]]) -> None:
        with self._as_member() as wire:
            wire.send_and_end(change(wire.sent))

    def _nonsense(self) -> None:
        """A member that says what nobody understands."""
        with self._as_member() as wire:
            wire.send_and_end(wire.sent)

    def _flipped(self, frames: list[bytes]) -> list[bytes]:
        which = self._random.randrange(len(frames))
        frame = bytearray(frames[which])
        frame[self._random.randrange(4, len(frame))] ^= 1 << self._random.randrange(8)
        return [*frames[:which], bytes(frame), *frames[which + 1 :]]

    def _replayed(self, frames: list[bytes]) -> list[bytes]:
        return [*frames, self._random.choice(frames)]

    def _reordered(self, frames: list[bytes]) -> list[bytes]:
        return frames[::-1]

    def _dropped(self, frames: list[bytes]) -> list[bytes]:
        return frames[1:]

    def _oversized(self, frames: list[bytes]) -> list[bytes]:
        return [*frames[:-1], b"\xff\xff\xff\xff" + frames[-1][4:]]

    def _truncated(self, frames: list[bytes]) -> list[bytes]:
        return [*frames[:-1], frames[-1][: self._random.randrange(1, len(frames[-1]))]]

    def _random_frame(self, frames: list[bytes]) -> list[bytes]:
        return [self._random.randbytes(self._random.randrange(1, 4096))]


@contextlib.contextmanager
def _may_be_closed() -> Iterator[None]:
    """The other side may have ended the connection before this one."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
            raise


class _Wire:
    """What a member's frames go to: they are kept instead of sent."""

    def __init__(self, stream: socket.socket):
        self._stream, self.sent = stream, []

    def sendall(self, data: bytes) -> None:
        """Keep a frame."""
        self.sent.append(bytes(data))

    def recv_into(self, view: memoryview) -> int:
        """Receive."""
        return self._stream.recv_into(view)

    def send_and_end(self, frames: list[bytes]) -> None:
        """Send frames as they are, and wait until the listener has ended the connection."""
        with _may_be_closed():
            self._stream.sendall(b"".join(frames))
            self._stream.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while self._stream.recv(1 << 16):
                pass


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


def fuzz(
    fuzzer: Fuzzer,
    cases: int,
    pids: dict[str, int],
    ask: Callable[[int], Any] | None = None,
    count: int = 1,
    warm_requests: int = 60,
) -> Findings:
    """Send cases to a port, and hold what the processes take and answer against what it was before.

    warm_requests: after which a process takes what requests make it take: an engine that is not warmed up compiles at first use.
    """
    with UnderWay(ask, count) if ask else contextlib.nullcontext() as warming:
        warm = fuzzer.run(max(50, cases // 10))  # threads that are made once, memory that a first time takes
        while warming and warming.answered < warm_requests and not warming.wrong:
            time.sleep(0.1)
    under_way = UnderWay(ask, count) if ask else None
    before = {name: _settled(pid) for name, pid in pids.items()}
    with under_way or contextlib.nullcontext():
        findings = fuzzer.run(cases)
    assert findings is warm
    if under_way:
        findings.wrong += under_way.wrong
        findings.answered = under_way.answered
        if not under_way.answered:
            findings.wrong.append("no request was answered meanwhile")
    for name, pid in pids.items():
        after = _settled(pid, before[name])
        findings.figures[name] = before[name], after
        if after.memory > before[name].memory + MOST_GROWTH:
            findings.wrong.append(f"{name} has grown by {(after.memory - before[name].memory) / 2**20:.1f} MiB")
        if after.threads > before[name].threads or after.files > before[name].files:
            findings.wrong.append(f"{name} had {before[name]} and has {after}")
    return findings


def _settled(pid: int, before: Figures | None = None, seconds: float = 60.0) -> Figures:
    """What a process takes once it has come to rest, and greetings that were under way have ended.

    before: what it took when it was at rest before; it is at rest again when it has no more threads and files.
    """
    deadline, seen = time.monotonic() + seconds, [Figures.of(pid)]
    while time.monotonic() < deadline:
        time.sleep(0.5)
        seen.append(Figures.of(pid))
        now, recent = seen[-1], seen[-12:]
        if before is not None and now.threads <= before.threads and now.files <= before.files:
            break
        memory = [figures.memory for figures in recent]
        if before is None and len(recent) == 12 and max(memory) - min(memory) < 2**20:
            break
    return seen[-1]


def port_for(service: str, pid: int, credentials: Credentials) -> tuple[str, int]:
    """Where a process listens for a service."""
    for port, host in listening_addresses(pid).items():
        try:
            with socket.create_connection((host, port), 5) as probe:
                probe.settimeout(2)
                if probe.recv(len(PROTOCOL)) != PROTOCOL:
                    continue
            connect((host, port), service, credentials).close()
            return host, port
        except (OSError, RefusedError, NotAMemberError):
            continue
    raise RuntimeError(f"process {pid} has no port for {service}")


def join_request(process_id: int, num_processes: int) -> bytes:
    """What a process says that no group takes in."""
    from dsjax.hosts.wire import JoinRequest

    return msgspec.msgpack.encode(JoinRequest(process_id, num_processes, "fuzz", 1, "127.0.0.1", "fuzz"))


def fuzz_group(cases: int, seed: int, key: Credentials, folder: Path) -> Iterator[Findings]:
    """Fuzz the rendezvous, before and after a group of two servers has formed, and the links of both."""
    from processes import Group
    from worded_checkpoint import write_worded_checkpoint

    class Late(Group):
        """Process 1 is started when it is asked for."""

        def _start(self, index: int) -> subprocess.Popen | None:
            return super()._start(index) if index == 0 or len(self.processes) == 2 else None

        def _reader(self, index: int) -> threading.Thread | None:
            return super()._reader(index) if self.processes[index] is not None else None

    group = Late(serve_command(write_worded_checkpoint(folder), "dp=4"), 2, timeout=3600)
    try:
        at = group._arguments[0].index("--coordinator-address") + 1
        host, port = group._arguments[0][at].rsplit(":", 1)
        rendezvous = host, int(port)
        _until(lambda: _listens(rendezvous))
        pids = {"process 0": group.processes[0].pid}
        messages = [join_request(1, 99), join_request(7, 2)]
        yield fuzz(Fuzzer(rendezvous, "rendezvous", key, messages, seed, "rendezvous, forming"), cases, pids)

        group.processes[1] = Group._start(group, 1)
        group._threads[1] = Group._reader(group, 1)
        ask = functools.partial(ask_server, url_of(group))
        pids["process 1"] = group.processes[1].pid
        messages = [join_request(1, 2), join_request(1, 99)]
        yield fuzz(Fuzzer(rendezvous, "rendezvous", key, messages, seed, "rendezvous, formed"), cases, pids, ask, 6)
        for name, pid in pids.items():
            links = port_for("links", pid, key)
            yield fuzz(Fuzzer(links, "links", key, [], seed, f"links of {name}"), cases, pids, ask, 6)
        probes = port_for("probes", pids["process 1"], key)
        yield fuzz(Fuzzer(probes, "probes", key, [bytes(64), b""], seed), cases, pids, ask, 6)
        assert group.processes[0].poll() is None, group.last_words()
        assert group.processes[1].poll() is None, group.last_words()
    except Exception:
        print(group.last_words(), file=sys.stderr)
        raise
    finally:
        group.processes = [process for process in group.processes if process is not None]
        group.end()


def fuzz_stages(cases: int, seed: int, key: Credentials, folder: Path) -> Iterator[Findings]:
    """Fuzz the ports at which two processes, with a stage of a model each, wait for each other's hidden states and results."""
    from processes import Group
    from worded_checkpoint import write_worded_checkpoint

    group = Group(serve_command(write_worded_checkpoint(folder), "pp=2,dp=2"), 2, timeout=3600)
    try:
        ask = functools.partial(ask_server, url_of(group))
        pids = {f"process {index}": process.pid for index, process in enumerate(group.processes)}
        for name, pid in pids.items():
            stages = port_for("stages", pid, key)
            for role, messages in stage_messages().items():
                fuzzer = Fuzzer(stages, "stages", key, messages, seed, f"stages of {name}, {role}")
                yield fuzz(fuzzer, cases, pids, ask, 6)
        assert all(process.poll() is None for process in group.processes), group.last_words()
    except Exception:
        print(group.last_words(), file=sys.stderr)
        raise
    finally:
        group.end()


def stage_messages() -> dict[str, list[bytes]]:
    """What a member says at a port for stages, by role. It has none of the tickets that the stages of a generation have."""
    from dsjax.engine.pipeline.process_links import FOUND, HIDDEN, RESULTS, Opening, Results

    encode = msgspec.msgpack.encode
    results = [encode(Results([], [([2**40], "float32")])), encode(Results([["no row"]], []))]
    said = {
        HIDDEN: [encode(([2**40, 2**40], "float32")), encode(([1], "no dtype"))],
        RESULTS: results,
        FOUND.format(1): results,
    }
    return {role: [encode(Opening(role, secrets.token_bytes(16))), *messages] for role, messages in said.items()}


def serve_command(model: Path, mesh: str) -> list[str]:
    """Python's arguments that serve a tiny model on a mesh."""
    sizes = "--max-num-seqs 4 --max-num-batched-tokens 16 --prefill-chunk 16 --page-size 4 --max-model-len 96 --kernels plain"
    named = ["--model", str(model), "--served-model-name", "tiny", "--port", "0"]
    return ["-m", "dsjax.serve", *named, "--mesh", mesh, *sizes.split()]


def url_of(group: Any) -> str:
    """Wait until a group of servers answers requests, and say where."""
    group.wait_for(0, "serving tiny at", 600)
    return re.search(r"serving tiny at (http://[\d.:]+)", group.output[0]).group(1)


def ask_server(url: str, number: int) -> str:
    """Have a server of the tiny model answer a prompt, greedily."""
    body = {
        "model": "tiny",
        "prompt": f"{'def the queue ' * (1 + number % 3)}{number}",
        "max_tokens": 8,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


class Side:
    """An engine of `side_process.py`, and its first line."""

    def __init__(self, **options: Any):
        from quick_compilation import QUICK_COMPILATION

        script = TESTS / "dsjax" / "engine" / "transfer" / "side_process.py"
        environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(QUICK_COMPILATION)}
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.first = json.loads(self.process.stdout.readline())

    def ask(self, **request: Any) -> dict[str, Any]:
        """Ask something, and wait for the answer."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.wait()


def fuzz_sides(cases: int, seed: int, key: Credentials, folder: Path) -> Iterator[Findings]:
    """Fuzz the ports of a prefill engine, while a decode engine has its prompts computed there."""
    from drafting_checkpoint import write_drafting_checkpoint

    from dsjax.engine.transfer.messages import CancelTransfer, PullRequest, ReleaseChunk
    from dsjax.engine.transfer.page_channel import VERSION, Greeting

    write_drafting_checkpoint(folder)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "max_model_len": 96}
    options = {"model": str(folder), "dtype": "float32", "local_prefill_tokens": 1, "transfer_timeout": 60, **sizes}
    with contextlib.ExitStack() as stack:
        prefill = Side(mesh="dp=1", disaggregation_mode="prefill", **options)
        stack.callback(prefill.end)
        decode = Side(mesh="dp=1", disaggregation_mode="decode", **options)
        stack.callback(decode.end)
        pids = {"prefill": prefill.process.pid, "decode": decode.process.pid}
        prompts = [
            [2 + (7 * number + token * (3 + number)) % 280 for token in range(30 + 5 * number)] for number in range(6)
        ]

        def ask(number: int) -> list[int]:
            said = prefill.ask(tokens=prompts[number])
            return decode.ask(requests=[["0", prompts[number], said]])["token_ids"]["0"]

        host, port = prefill.first["address"].rsplit(":", 1)
        ask(0)
        encode = msgspec.msgpack.encode
        greeting = encode(Greeting(VERSION, prefill.first["space"]))
        # Names and numbers of nobody's: what a member may do with its own is not what is tried here.
        said = [
            encode(CancelTransfer("nobody's")),
            encode(ReleaseChunk(2**40)),
            encode(PullRequest(2**40, "no ticket")),
        ]
        for service in ("pages", "chunks"):
            address = (host, int(port)) if service == "pages" else port_for("chunks", pids["prefill"], key)
            fuzzer = Fuzzer(address, service, key, [greeting, *said], seed)
            before = decode.ask()
            findings = fuzz(fuzzer, cases, pids, ask, len(prompts), warm_requests=400)
            after = decode.ask()
            if after["given_up"] != before["given_up"] or after["completed"] - before["completed"] < findings.answered:
                findings.wrong.append(f"transfers were given up: before {before}, after {after}")
            yield findings


def fuzz_experts(cases: int, seed: int, key: Credentials, folder: Path) -> Iterator[Findings]:
    """Fuzz the port of a process with experts, while a server has its tokens' experts computed there."""
    from layouts import TINY
    from processes import free_port
    from worded_checkpoint import write_worded_checkpoint

    from dsjax.engine.afd.messages import VERSION, Call, Hello, Place, Stage

    experts_of_layer, layers, devices = TINY["n_routed_experts"], 2, 4
    address = "127.0.0.1", free_port()
    sizes = "--max-num-seqs 4 --max-num-batched-tokens 16 --prefill-chunk 16 --page-size 4 --max-model-len 96"
    options = ["--model", str(write_worded_checkpoint(folder)), "--served-model-name", "tiny", *sizes.split()]
    options += ["--attention-mesh", "dp=2", "--expert-mesh", "ep=4", "--afd-address", "{}:{}".format(*address)]
    command = [sys.executable, "-m", "dsjax.serve", *options, "--afd-role", "expert", "--port", "0"]
    experts = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
    try:
        _until(lambda: _listens(address), 300)
        with serve_process([*options, "--afd-role", "attention"]) as server:
            space, row = expert_space(address, key), np.arange(experts_of_layer, dtype="<i4")
            calls = [Call("moe_layers", 0, 8, 8, bytes(4 * devices)), Call("nothing", -1, 8, 8, b"")]
            calls += [
                Call("moe_layers", 0, 2**40, 2**40, bytes(4)),
                Call("moe_layers", layers, 8, 8, bytes(4 * devices)),
            ]
            # Nobody may move experts while another attention side is connected.
            moves = [Stage(0, np.array([0, 9], "<i4").tobytes()), Place(0, row[::-1].tobytes()), Place(10**6, bytes(4))]
            placement = np.tile(row, layers).tobytes()
            members = {
                "with another model": [Hello(VERSION, {}, b"", b"somebody"), *calls, *moves],
                "as an attention side": [Hello(VERSION, space, placement, b"somebody"), *calls, *moves],
                "without a name": [Hello(VERSION, space), *calls, Hello(VERSION, space, b"no places", b"me")],
            }
            pids = {"attention": server.pid, "experts": experts.pid}
            ask = functools.partial(ask_server, server.url)
            for name, messages in members.items():
                said = list(map(msgspec.msgpack.encode, messages))
                yield fuzz(Fuzzer(address, "experts", key, said, seed, f"experts, {name}"), cases, pids, ask, 6)
        assert experts.poll() is None, f"the process with experts ended with {experts.returncode}"
    finally:
        experts.kill()
        experts.wait()


def expert_space(address: tuple[str, int], key: Credentials) -> dict[str, Any]:
    """What a process with experts wants an attention side to have alike: it says so where it refuses one, and welcomes one that has it."""
    from dsjax.engine.afd.messages import VERSION, Hello, Welcome, receive, send

    def greeted(space: dict[str, Any]) -> str:
        with connect(address, "experts", key) as channel:
            send(channel, Hello(VERSION, space))
            return receive(channel, Welcome).error

    told = re.findall(r"([A-Za-z_ ]+) ('[^']*'|[\w.]+) here and None there", greeted({}).partition("differ in ")[2])
    space = {name.strip(): ast.literal_eval(value) for name, value in told}
    if refusal := greeted(space):
        raise RuntimeError(f"the process with experts refuses what it asks for: {refusal}")
    return space


def _listens(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(address, 1).close()
        return True
    return False


def _until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"it has not come to be within {seconds:g} s")
        time.sleep(0.1)


def main() -> int:
    """Fuzz all ports, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000, help="of each port")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        choices=FUZZES,
        help="the ports of a group, of stages, of a prefill engine, or of a process with experts, alone",
    )
    args = parser.parse_args()
    text = secrets.token_hex(32)
    os.environ[VARIABLE] = text
    key = Credentials(ClusterKey(text, "this tool"))
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, (services, run) in FUZZES.items():
            if args.only not in (None, name):
                continue
            (place := Path(folder) / name).mkdir()
            fuzzed = set()
            for findings in run(args.cases, args.seed, key, place):
                fuzzed.add(findings.service)
                wrong += len(findings.wrong)
                _print(findings)
            if fuzzed != services:
                raise RuntimeError(f"{name} has fuzzed the ports for {sorted(fuzzed)}, expected {sorted(services)}")
    return 1 if wrong else 0


FUZZES = {
    "group": ({"rendezvous", "links", "probes"}, fuzz_group),
    "stages": ({"stages"}, fuzz_stages),
    "sides": ({"pages", "chunks"}, fuzz_sides),
    "experts": ({"experts"}, fuzz_experts),
}
"""For what runs, the services whose ports it has, and what fuzzes them."""
OPEN_BRIEFLY = {"attention"}
"""Services whose ports `tests/tools/test_fuzz_ports.py` alone fuzzes."""


def _print(findings: Findings) -> None:
    count = sum(findings.kinds.values())
    print(
        f"{findings.port}: {count:,} cases in {findings.seconds:.0f} s, {len(findings.wrong)} wrong; "
        f"{findings.answered:,} requests answered meanwhile as before"
    )
    for name, (before, after) in findings.figures.items():
        print(
            f"  {name}: memory {before.memory / 2**20:.1f} → {after.memory / 2**20:.1f} MiB, threads {before.threads} → {after.threads}, "
            f"open files {before.files} → {after.files}"
        )
    print(f"  {', '.join(f'{count} {kind}' for kind, count in findings.kinds.most_common())}")
    for wrong in findings.wrong[:10]:
        print(f"  wrong: {wrong}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
