"""What runs while its ports are fuzzed (`tools/fuzz_ports.py`): deployments of a tiny model, each in a folder of its own."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafting_checkpoint import write_drafting_checkpoint
from processes import Group, Processes, free_port
from quick_compilation import QUICK_COMPILATION
from worded_checkpoint import write_worded_checkpoint

from dsjax.hosts.wire import JoinRequest
from tools.labs.port_cases import ports_of
from tools.labs.servers import MODEL, SIZES, SideProcess, complete, tiny_server, url_of

_SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **SIZES}


@dataclass
class Running:
    """Processes that run, by name, each with its id and the number of its ports.

    Attributes:
        ask: answers one of six requests. said: what a member may say to them. warm_requests: after which a process takes what requests make
            it take: an engine that is not warmed up compiles at first use. failures: gives what must not grow meanwhile.
    """

    name: str
    processes: Mapping[str, tuple[int, int]]
    failures: Callable[[], Any]
    ask: Callable[[int], Any] | None = None
    said: Sequence[tuple[str, Any]] = ()
    warm_requests: int = 60


@contextlib.contextmanager
def started(processes: Processes) -> Iterator[Processes]:
    """End processes; where something fails, show what they have said."""
    try:
        yield processes
    except BaseException:
        print(processes.last_words(), file=sys.stderr)
        raise
    finally:
        processes.end()


def running(name: str, processes: Processes, ports: Mapping[str, int], **more: Any) -> Running:
    """Servers that have started. ports: how many each process has, by its name; where several are given, process 0 answers requests."""
    pids = {one: (process.pid, ports[one]) for one, process in zip(ports, processes.processes, strict=False)}
    ask = functools.partial(ask_server, url_of(processes, 600)) if len(ports) > 1 else None
    failed = "Background work has failed"
    return Running(name, pids, lambda: [text.count(failed) for text in processes.output], ask, **more)


def ask_server(url: str, number: int) -> str:
    """Have a server of the tiny model answer a prompt, greedily."""
    return complete(url, MODEL, f"{'def the queue ' * (1 + number % 3)}{number}", 8)


def serve_command(folder: Path, *options: str) -> list[str]:
    """Python's arguments that serve a tiny model, which is written to a folder."""
    return ["-m", "dsjax.serve", *tiny_server(write_worded_checkpoint(folder), kernels="plain", **_SIZES), *options]


def run_group(folder: Path) -> Iterator[Running]:
    """A group of two servers: process 0 while the group forms, then both."""
    said = [("join", JoinRequest(*ids, "fuzz", 1, "127.0.0.1", "fuzz")) for ids in ((1, 99), (7, 2))]
    with started(Group(serve_command(folder, "--mesh", "dp=4"), 2, timeout=3600)) as group:
        group.processes[1].send_signal(signal.SIGSTOP)
        while len(ports_of(group.processes[0].pid)) < 2:
            assert group.processes[0].poll() is None
            time.sleep(0.1)
        yield running("a group that forms", group, {"process 0": 2}, said=said)
        group.processes[1].send_signal(signal.SIGCONT)
        yield running("a group", group, {"process 0": 3, "process 1": 2}, said=said)


def run_stages(folder: Path) -> Iterator[Running]:
    """Two processes with a stage of a model each."""
    with started(Group(serve_command(folder, "--mesh", "pp=2,dp=2"), 2, timeout=3600)) as group:
        yield running("stages", group, {"process 0": 4, "process 1": 3})


def run_experts(folder: Path) -> Iterator[Running]:
    """A server that has its tokens' experts computed by another process, and that process."""
    options = ["--attention-mesh", "dp=2", "--expert-mesh", "ep=4", "--afd-address", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, *serve_command(folder, *options)]
    with started(Processes([[*command, "--afd-role", role] for role in ("attention", "expert")])) as both:
        yield running("experts", both, {"attention": 2, "experts": 3})


def run_sides(folder: Path) -> Iterator[Running]:
    """A prefill engine, and a decode engine that has its prompts computed there, and publishes its pages' events."""
    write_drafting_checkpoint(folder)
    prompts = [
        [2 + (7 * number + token * (3 + number)) % 280 for token in range(30 + 5 * number)] for number in range(6)
    ]
    events = {f"{name}endpoint": f"tcp://127.0.0.1:{free_port()}" for name in ("", "replay_")}
    events |= {"enable_kv_cache_events": True, "bind": True}
    more = {"prefill": {}, "decode": {"kv_events_config": events, "local_prefill_tokens": 1}}
    options = {"mesh": "dp=1", "model": str(folder), "dtype": "float32", "transfer_timeout": 60, **_SIZES}
    with contextlib.ExitStack() as stack:
        sides = {}
        for mode, own in more.items():
            sides[mode] = SideProcess(*QUICK_COMPILATION, disaggregation_mode=mode, **options, **own)
            stack.callback(sides[mode].end)
        for one in sides.values():
            one.wait()

        def ask(number: int) -> list[int]:
            said = sides["prefill"].ask(tokens=prompts[number])
            return sides["decode"].ask(requests=[["0", prompts[number], said]])["token_ids"]["0"]

        def failures() -> list[Any]:
            return [sides["decode"].ask()["given_up"], *(one.ask()["failures"] for one in sides.values())]

        ports = {"prefill": (sides["prefill"].pid, 1), "decode": (sides["decode"].pid, 3)}
        yield Running("sides", ports, failures, ask, warm_requests=400)


RUNS = {"group": run_group, "stages": run_stages, "sides": run_sides, "experts": run_experts}
