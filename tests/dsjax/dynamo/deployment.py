"""Dynamo's own frontend with its KV router, and dsjax workers behind it, as processes that find each other through a folder."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

from processes import free_port
from quick_compilation import QUICK_COMPILATION
from waits import until


class Process:
    def __init__(self, folder: Path, name: str, arguments: list[str], **variables: str):
        self.log = folder / f"{name}.log"
        environment = {**os.environ, "DYN_FILE_KV": str(folder / "discovery"), "DYN_LOG": "warn", **variables}
        environment["DYN_DISCOVERY_BACKEND"] = "file"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


class Worker(Process):
    """`python -m dsjax.dynamo`, with Dynamo's port for health and metrics."""

    def __init__(self, folder: Path, name: str, *options: str, **variables: str):
        self.port = free_port()
        variables |= {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1", "DYN_SYSTEM_HOST": "127.0.0.1"}
        super().__init__(folder, name, ["dsjax.dynamo", *options], DYN_SYSTEM_PORT=str(self.port), **variables)

    def metric(self, name: str, **labels: str) -> list[float]:
        return metric(f"http://127.0.0.1:{self.port}", name, **labels)

    @property
    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=60) as answer:
                return json.load(answer)["status"] == "ready"
        except OSError:
            return False


class Group:
    """A worker whose mesh spans two processes of one device each, as on two hosts: the same command in both."""

    def __init__(self, folder: Path, name: str, *options: str, **variables: str):
        shared = (*options, "--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2")
        variables |= {"XLA_FLAGS": " ".join(QUICK_COMPILATION), "PJRT_NPROC": "0"}  # not the 32 devices of a test's
        self.leader, self.follower = self.processes = [
            Worker(folder, f"{name}-{index}", *shared, "--process-id", str(index), **variables) for index in range(2)
        ]

    @property
    def is_ready(self) -> bool:
        """Process 0 speaks to Dynamo when all have loaded and compiled."""
        assert self.follower.process.poll() is None, self.follower.log.read_text()[-4000:]
        return self.leader.is_ready

    def end(self, number: int = signal.SIGTERM) -> list[int]:
        """Both have the signal at once, as when their pods are deleted."""
        for one in self.processes:
            if one.process.poll() is None:
                one.process.send_signal(number)
        return [one.process.wait(timeout=60) for one in self.processes]

    def last_words(self) -> str:
        return "\n---\n".join(one.log.read_text()[-3000:] for one in self.processes)


class Frontend(Process):
    """`python -m dynamo.frontend`, by default with the KV router; a request whose worker is lost goes on with another."""

    def __init__(self, folder: Path, router: str = "kv"):
        self.port = free_port()
        options = ["--router-mode", router, "--http-port", str(self.port), "--migration-limit", "3"]
        super().__init__(folder, "frontend", ["dynamo.frontend", *options])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def num_workers(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as answer:
                health = json.load(answer)
        except OSError:
            return 0
        return sum(one["endpoint"] == "generate" for one in health.get("instances", ()))

    def serves(self, model: str) -> bool:
        """Whether a request is answered: it has heard of a model some time after it knows the workers."""
        body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status == 200
        except OSError:  # an HTTP error is one too
            return False


def metric(url: str, name: str, **labels: str) -> list[float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    matches = [re.fullmatch(rf"{re.escape(name)}(\{{.*\}})? (\S+)", line) for line in lines]
    return [float(one[2]) for one in matches if one and all(pair in (one[1] or "") for pair in wanted)]


wait_until = partial(until, seconds=240, every=0.2)
"""Waits for a start."""
