"""Dynamo's own frontend with its KV router, and dsjax workers behind it, as processes that find each other through a folder."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
from processes import free_port
from quick_compilation import QUICK_COMPILATION
from waits import until


class Process:
    """port: where its health and metrics are."""

    def __init__(self, folder: Path, name: str, arguments: list[str], **variables: str):
        self.log = folder / f"{name}.log"
        environment = {**os.environ, "DYN_FILE_KV": str(folder / "discovery"), "DYN_LOG": "warn", **variables}
        environment["DYN_DISCOVERY_BACKEND"] = "file"
        command = [sys.executable, "-m", *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=240).raise_for_status()

    @property
    def health(self) -> dict:
        """What it says of its health; nothing while it does not listen or is not well."""
        try:
            return self.get("/health").json()
        except httpx.HTTPError:
            return {}

    def metric(self, name: str, **labels: str) -> list[float]:
        lines = self.get("/metrics").text.splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        matches = [re.fullmatch(rf"{re.escape(name)}(\{{.*\}})? (\S+)", line) for line in lines]
        return [float(one[2]) for one in matches if one and all(pair in (one[1] or "") for pair in wanted)]

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=240)


class Worker(Process):
    """`python -m dsjax.dynamo`, with Dynamo's port for health and metrics."""

    def __init__(self, folder: Path, name: str, *options: str, **variables: str):
        self.port = free_port()
        variables |= {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1", "DYN_SYSTEM_HOST": "127.0.0.1"}
        super().__init__(folder, name, ["dsjax.dynamo", *options], DYN_SYSTEM_PORT=str(self.port), **variables)

    @property
    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        return self.health.get("status") == "ready"


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
        return [one.process.wait(timeout=240) for one in self.processes]

    def last_words(self) -> str:
        return "\n---\n".join(one.log.read_text()[-3000:] for one in self.processes)


class Frontend(Process):
    """`python -m dynamo.frontend`, by default with the KV router; a request whose worker is lost goes on with another."""

    def __init__(self, folder: Path, router: str = "kv"):
        self.port = free_port()
        options = ["--router-mode", router, "--http-port", str(self.port), "--migration-limit", "3"]
        super().__init__(folder, "frontend", ["dynamo.frontend", *options])

    def num_workers(self) -> int:
        return sum(one["endpoint"] == "generate" for one in self.health.get("instances", ()))

    def serves(self, model: str) -> bool:
        """Whether a request is answered: it has heard of a model some time after it knows the workers."""
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        try:
            return httpx.post(f"{self.url}/v1/completions", json=body, timeout=240).status_code == 200
        except httpx.HTTPError:
            return False


wait_until = partial(until, seconds=240, every=0.2)
"""Waits for a start."""
