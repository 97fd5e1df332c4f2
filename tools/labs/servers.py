"""Processes of labs: groups that serve, groups of `LLM` that generate, and a prefill or decode side; and a completion of a server."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from processes import ROOT, Group, Processes

from tools.labs.namespaces import Namespaces

MODEL = "tiny"
"""The name that models are served under."""
SIZES = {"prefill_chunk": 16, "page_size": 4, "max_model_len": 96}
"""Options of an engine of a tiny model."""
_SERVING = re.compile(rf"serving {MODEL} at (http://[\d.:]+)")
_ANSWER = "found "
_WORKER = Path(__file__).with_name("worker.py")
_SIDE = ROOT / "tests" / "dsjax" / "engine" / "transfer" / "side_process.py"


def tiny_server(model: Path | str, **options: object) -> list[str]:
    """Command-line options of a server of a tiny model, with these in place of, or beside, the usual ones."""
    named = {"model": model, "served_model_name": MODEL, "port": 0, **SIZES, "start_timeout": 600, **options}
    return [text for name, value in named.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@contextlib.contextmanager
def serving(start: Callable[[Path], Processes], logs: Path | None = None) -> Iterator[tuple[Processes, str]]:
    """Start processes, wait until process 0 serves, and end them.

    Args:
        start: starts them; is given a folder that lasts as long as they do.
        logs: a folder for what each process has printed since it was started last.

    Yields:
        The processes, and the URL of process 0.
    """
    with tempfile.TemporaryDirectory(prefix="dsjax-lab-") as folder:
        processes = start(Path(folder))
        try:
            yield processes, url_of(processes, 1800)
        except BaseException:
            print(processes.last_words(), file=sys.stderr)
            raise
        finally:
            processes.end()
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for index, text in enumerate(processes.output):
                    (logs / f"process-{index}.log").write_text(text)


def url_of(processes: Processes, seconds: float) -> str:
    """Wait until process 0 serves, and give its URL."""
    processes.wait_for(0, f"serving {MODEL} at", seconds)
    return _SERVING.search(processes.output[0]).group(1)


def complete(url: str, model: str, prompt: str, tokens: int) -> str:
    """The text of at most `tokens` greedy tokens from the server at `url` (without `/v1`)."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


def group_on(network: Namespaces, command: list[str], **settings) -> Group:
    """A group with one process on each host of a network. command, settings: as of `Group`."""
    return Group(command, network.count, address=network.address(0), before=network.inside, **settings)


def group_serving_on(network: Namespaces, options: list[str]) -> Group:
    """A group of servers with these options, each listening on its host's address."""
    open_to_all = [*options, "--allow-unauthenticated", "--host"]
    own = {host: [*open_to_all, network.address(host)] for host in range(network.count)}
    return group_on(network, ["-m", "dsjax.serve"], options=own)


class Workers:
    """Processes that make one `LLM` together, over hosts of a network or on this one.

    Args:
        options: of `LLM`.
        count: processes.
    """

    def __init__(self, options: dict[str, object], count: int, network: Namespaces | None = None):
        command = [str(_WORKER), json.dumps(options)]
        if network is not None:
            self.processes = group_on(network, command, timeout=600, heartbeat=60)
        elif count > 1:
            self.processes = Group(command, count, timeout=600)
        else:
            self.processes = Processes([[sys.executable, *command]])
        self._answers = 0
        self._answer()

    def generate(self, prompts: list[list[int]], tokens: int) -> dict:
        """Generate so many tokens for each prompt, greedy.

        Returns:
            `tokens` of each prompt; `seconds` of each step; `sent`, the bytes that had left process 0's host after each.
        """
        self.processes.write(0, json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        return self._answer()

    def _answer(self) -> dict:
        self._answers += 1
        self.processes.wait_for(0, f"\n{_ANSWER}", 1800, times=self._answers)
        return json.loads(self.processes.output[0].rpartition(f"\n{_ANSWER}")[2].partition("\n")[0])

    def finish(self) -> None:
        """Let them end by themselves.

        Raises:
            RuntimeError: one of them ended with a code that is not 0.
        """
        self.processes.processes[0].stdin.close()
        codes = self.processes.codes(120)
        if any(codes):
            raise RuntimeError(f"the processes ended with {codes}:\n{self.processes.last_words()}")

    def end(self) -> None:
        """End them at once."""
        self.processes.end()


class SideProcess:
    """An engine of `side_process.py`, which is started again after it was killed. Only `wait` waits for a start.

    flags: of XLA; answers are held to the bits of engines that compile with the same ones. options: of `EngineArgs`.

    Attributes:
        starts: times that it was ready.
    """

    def __init__(self, *flags: str, **options: object):
        self._environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
        self._command, self._lock, self.starts = [sys.executable, str(_SIDE), json.dumps(options)], threading.Lock(), 0
        self._start()

    def _start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(self._command, env=os.environ | self._environment, **pipes)
        self._ready = threading.Event()
        threading.Thread(target=self._await_ready, args=(self._process, self._ready), daemon=True).start()

    def _await_ready(self, process: subprocess.Popen, ready: threading.Event) -> None:
        if process.stdout.readline():
            self.starts += 1
            ready.set()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def wait(self) -> None:
        """Until it is ready.

        Raises:
            RuntimeError: it has ended instead.
        """
        while not self._ready.wait(0.1):
            if self._process.poll() is not None:
                raise RuntimeError(f"the process ended with {self._process.returncode} before it was ready")

    def ask(self, **request: object) -> dict | None:
        """The answer; None where it is not there."""
        with self._lock:
            if not self._ready.is_set():
                return None
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                return json.loads(self._process.stdout.readline() or "null")
            except (OSError, ValueError):
                return None

    def kill(self) -> None:
        """Kill it, and start another."""
        self.end()
        self._start()

    def end(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
