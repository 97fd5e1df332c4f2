"""A server of our own in a process of its own, for the tools that measure one, and a completion of any server of ours."""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class ServeProcess:
    """A server that is ready."""

    url: str
    pid: int


@contextlib.contextmanager
def serve_process(options: Sequence[str], ready_seconds: float = 600.0) -> Iterator[ServeProcess]:
    """Start `python -m dsjax.serve` with these options on a free port; end it with SIGTERM.

    Its output goes to standard error.

    Raises:
        RuntimeError: it ended, or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "dsjax.serve", "--port", str(port), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + ready_seconds
        while not _is_ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with code {process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server was not ready within {ready_seconds:g} s")
            time.sleep(0.2)
        yield ServeProcess(url, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def complete(url: str, model: str, prompt: str, tokens: int) -> str:
    """The text of at most so many greedy tokens that the server at `url` (without `/v1`) answers."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
