"""A real server on a real port, over the fake executor of the engine's tests."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
from fake_executor import FakeExecutor
from prometheus_client.parser import text_string_to_metric_families
from tiny_tokenizer import tiny_tokenizer
from waits import until as wait_until

from dsjax.engine.engine import EngineParts
from dsjax.engine.engine_thread import AsyncEngine
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.serve.front_ends.engine_server import EngineServer
from dsjax.serve.front_ends.shared_engine import SharedEngine
from dsjax.serve.options import ServeOptions
from dsjax.serve.server import Server, bind, bind_shared
from dsjax.serve.serving import Phase, Serving


class LiveServer:
    """A server in a thread; `executor` is the fake device under it. front_ends: processes before it; 0: it speaks HTTP itself.

    Its limits of time are those of a machine that is busy with something else: what they bound ends by itself long before.
    """

    def __init__(
        self,
        *,
        shutdown_timeout: float = 60.0,
        tokenizer=None,
        eos=(),
        options=None,
        warm_up=None,
        executor=None,
        metrics=None,
        front_ends=0,
        stream_interval=1,
        **sizes,
    ):
        self.executor = executor or FakeExecutor(**sizes)
        config = SchedulerConfig.from_limits(self.executor.limits, max_num_batched_tokens=32)
        args, tokenizer = EngineArgs(stream_interval=stream_interval), tokenizer or tiny_tokenizer()
        self.parts = EngineParts(self.executor, tokenizer, config, args, eos_token_ids=eos)
        self.engine = (SharedEngine if front_ends else AsyncEngine)(self.parts)
        self.serving = Serving(
            self.engine, ("tiny", "alias"), "tiny", config.max_model_len, options or ServeOptions(), metrics=metrics
        )
        how = {"shutdown_timeout": shutdown_timeout, "log_level": "error", "warm_up": warm_up}
        if front_ends:
            listener, *_ = listeners = bind_shared("127.0.0.1", 0, front_ends)
            self.server = EngineServer.create(self.serving, self.parts, listeners, **how)
        else:
            listener = bind("127.0.0.1", 0)
            self.server = Server(self.serving, **how)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.exit_code: int | None = None
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started and (warm_up or self.serving.phase is Phase.READY))

    @property
    def pages_in_use(self) -> int:
        return sum(rank.pool.num_used for rank in self.parts.core.scheduler.ranks)

    def post(self, path: str, body=None, **options) -> httpx.Response:
        return httpx.post(self.url + path, **({"json": body} if body is not None else {}), timeout=240, **options)

    def post_later(self, path: str, body=None, **options) -> Future:
        pool = ThreadPoolExecutor(1)
        answer = pool.submit(self.post, path, body, **options)
        pool.shutdown(wait=False)
        return answer

    def get(self, path: str, **options) -> httpx.Response:
        return httpx.get(self.url + path, timeout=240, **options)

    def stream(self, path: str, body) -> contextlib.AbstractContextManager[httpx.Response]:
        return httpx.stream("POST", self.url + path, json=body, timeout=240)

    def openai_client(self) -> "openai.OpenAI":
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240)

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=240)
        connection.sendall(sent)
        return connection

    def exchange(self, sent: bytes) -> bytes:
        """What comes back on a connection until the server closes it."""
        with self.connect(sent) as connection:
            return read_all(connection)

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        families = text_string_to_metric_families(self.get("/metrics").text)
        return [(each.labels, each.value) for family in families for each in family.samples if each.name == name]

    def total(self, name: str, **labels: str) -> float:
        return sum(value for found, value in self.samples(name) if labels.items() <= found.items())

    def __enter__(self) -> "LiveServer":
        return self

    def __exit__(self, *failed: object) -> None:
        """End the server in order, without a page in use."""
        if not failed[0]:
            wait_until(lambda: self.pages_in_use == 0 and self.engine.num_unfinished == 0)
        self.signal()
        assert self.join() == 0

    def signal(self) -> None:
        self.server.handle_exit(15, None)

    def join(self, seconds: float = 240.0) -> int | None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server hangs"
        return self.exit_code

    def _serve(self, listener) -> None:
        try:
            behind = isinstance(self.server, EngineServer)
            self.exit_code = self.server.serve_privately() if behind else self.server.serve_on(listener)
        except Exception as error:
            self.failure = error


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


@contextlib.contextmanager
def started(script: str, *arguments: object) -> Iterator[subprocess.Popen]:
    """A Python process that runs a script, which finds the modules of these tests; at the end it is killed."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "engine"), *map(str, here.parents[1:3])])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def events(text: str) -> list[dict]:
    """What a stream that came to its end has sent."""
    *lines, end = (line.removeprefix("data: ") for line in text.split("\n\n") if line)
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]


def named_events(text: str) -> list[dict]:
    """What a stream has sent whose events are named by their type."""
    sent = []
    for event in filter(None, text.split("\n\n")):
        name, data = event.split("\n")
        sent.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {sent[-1]['type']}"
    return sent


def serve_alone(engine: AsyncEngine, shutdown_timeout: float = 60, options: ServeOptions | None = None) -> None:
    """Serve in a process that `started` has begun, and print the port when it is ready."""
    listener = bind("127.0.0.1", 0)
    ready = lambda: print(listener.getsockname()[1], flush=True)  # noqa: E731
    serving = Serving(engine, ("tiny",), "tiny", 128, options or ServeOptions())
    sys.exit(Server(serving, shutdown_timeout=shutdown_timeout, log_level="error", on_ready=ready).serve_on(listener))


def serve_by_command(executor: FakeExecutor, listener, shutdown_timeout: float, front_end_listeners=()) -> None:
    """Like `serve_alone`, but through the command's `serve_model`, and without printing anything."""
    from rich.console import Console
    from test_command_line import FACTS

    from dsjax.serve.command import serve_model
    from dsjax.serve.logs import configure_logging

    configure_logging("warning")
    model, console = SimpleNamespace(parts=executor.parts(), facts=FACTS), Console(file=io.StringIO())
    more = {"front_end_listeners": front_end_listeners}
    sys.exit(serve_model(model, console, listener, ("tiny",), shutdown_timeout, "warning", **more))
