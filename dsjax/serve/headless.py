"""`dsjax serve` processes that take no requests: all but process 0 of a group, and processes with only routed experts."""

import signal
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client.exposition import choose_encoder
from rich.console import Console

from dsjax.background import start_thread
from dsjax.engine.afd.messages import ExpertLinks
from dsjax.engine.afd.options import expert_share
from dsjax.engine.elastic.joining import join_group
from dsjax.engine.setup.args import EngineArgs
from dsjax.hosts import HostOptions
from dsjax.hosts.interfaces import read_interfaces
from dsjax.hosts.links import LinkState
from dsjax.serve.connections import JsonResponse, affordable_connections, bounded_connections
from dsjax.serve.guards import OPEN_PATHS, Keys
from dsjax.serve.metrics_families import Registry, exposition
from dsjax.serve.metrics_links import add_expert_link_metrics, add_link_metrics
from dsjax.serve.metrics_parts import add_background_metrics, add_memory_metrics
from dsjax.serve.options import ServeOptions


class Probes:
    """`/health`, `/live`, `/ready` and `/metrics` of a process that takes no requests.

    Args:
        http: options of the HTTP server; `/metrics` needs one of its API keys if there are any.

    Attributes:
        phase: the current phase; `/ready` answers 200 in phase `ready`.
        work: the follower or the expert worker, once it exists.
    """

    title: str
    phase: str
    work: Any = None

    def __init__(self, http: ServeOptions, registry: Registry):
        self._http, self.registry = http, registry
        add_background_metrics(registry)
        add_memory_metrics(registry, self._device_memory)

    def _device_memory(self) -> Iterable[tuple[str, int, int]]:
        if self.phase not in ("warming up", "ready"):
            return ()  # querying devices before their setup would initialise JAX without them
        from dsjax.engine.device.process import device_memory

        return device_memory()

    def of_work(self, name: str) -> Callable[[], float]:
        """Return a function that reads a numeric attribute of `work`; 0 before `work` exists."""
        return lambda: 0.0 if self.work is None else float(getattr(self.work, name))

    def listen(self, listener: socket.socket) -> str:
        """Start the HTTP server in a thread; return its URL."""
        config = uvicorn.Config(
            self.app(),
            log_config=None,
            access_log=False,
            ws="none",
            http=bounded_connections(self._http.request_timeout, affordable_connections(self._http.max_connections)),
            **self._http.tls,
        )
        server = uvicorn.Server(config)  # handles no signals outside the main thread
        start_thread("headless server", server.run, [listener], name="dsjax-headless")
        host, port = listener.getsockname()[:2]
        return self._http.url(host, port)

    def app(self) -> FastAPI:
        """Return the application with the endpoints."""
        app = FastAPI(title=self.title, docs_url=None, redoc_url=None, openapi_url=None)

        @app.get("/live")  # for Dynamo's operator
        @app.get("/health")
        async def health() -> Response:
            return JsonResponse({"status": "ok"})

        @app.get("/ready")
        async def ready() -> Response:
            return JsonResponse({"status": self.phase}, 200 if self.phase == "ready" else 503)

        @app.get("/metrics")
        def metrics(request: Request) -> Response:
            _, content_type = choose_encoder(request.headers.get("accept", ""))
            openmetrics = content_type.startswith("application/openmetrics-text")
            return Response(exposition(self.registry.families, openmetrics=openmetrics), media_type=content_type)

        app.add_middleware(Keys, options=self._http, open_paths=OPEN_PATHS | {"/live"})
        return app


class Headless(Probes):
    """One process of a group that follows process 0.

    Attributes:
        phase: rendezvous, loading, warming up, ready or shutting down.
    """

    title = "dsjax follower"

    def __init__(self, options: HostOptions, http: ServeOptions):
        self.options = options
        registry = Registry(process=str(options.process_id))
        super().__init__(http, registry)
        for count, documentation in (
            ("commands", "Commands of process 0 that this process has carried out."),
            ("steps", "Commands of process 0 whose results, such as those of steps, have been read."),
        ):
            registry.total(f"dsjax_follower_{count}", documentation, self.of_work(count))
        registry.gauge("dsjax_follower_ready", "1 while this process follows.", lambda: float(self.phase == "ready"))
        add_link_metrics(registry, self._links, read_interfaces)
        add_expert_link_metrics(registry, self._expert_links)

    def _expert_links(self) -> ExpertLinks | None:
        """Return this process's links to the processes with experts, for the rows of its own devices."""
        executor = getattr(self.work, "executor", None)
        return None if executor is None else executor.extension(ExpertLinks)

    def _links(self) -> Mapping[int, LinkState]:
        group = getattr(self.work, "group", None)
        return {} if group is None else group.links.states

    @property
    def phase(self) -> str:
        """See the class."""
        return "rendezvous" if self.work is None else self.work.phase

    def serve(self, args: EngineArgs, listener: socket.socket, console: Console) -> None:
        """Join the group, load the model, and follow process 0 until it ends.

        Raises:
            UserError, GroupError: the group cannot be joined, or it has failed.
        """
        url = self.listen(listener)
        console.print(
            f"process {self.options.process_id} of {self.options.num_processes}: follows process 0 at "
            f"{self.options.coordinator_text}; /health, /ready and /metrics at {url}",
            highlight=False,
        )
        group = join_group(args, self.options)
        from dsjax.engine.elastic.follower import Follower

        self.work = Follower(group)
        self.work.run_with(args)
        how = (
            "the others go on without this process" if self.work.left else "process 0 has ended; this process ends too"
        )
        console.print(how, highlight=False)


class HeadlessExperts(Probes):
    """A process that has only routed experts and answers the attention side's calls (`--afd-role expert`).

    Args:
        rank: index in `--afd-address`, and label `expert_process` of the metrics.

    Attributes:
        phase: loading, ready or shutting down.
    """

    title = "dsjax experts"

    def __init__(self, http: ServeOptions, rank: int = 0):
        self.phase = "loading"
        registry = Registry(expert_process=str(rank))
        super().__init__(http, registry)
        for name, documentation, field in (
            ("calls", "Calls for the experts of a layer that were answered.", "num_calls"),
            ("rows", "Rows of tokens that came with them, without empty cells.", "num_rows"),
        ):
            registry.total(f"dsjax_experts_{name}", documentation, self.of_work(field))
        connections = self.of_work("num_connections")
        registry.gauge("dsjax_experts_connections", "Open connections of attention sides.", connections)
        registry.gauge("dsjax_experts_ready", "1 while this process answers.", lambda: float(self.phase == "ready"))

    def serve(self, args: EngineArgs, listener: socket.socket, console: Console) -> None:
        """Load the experts and answer calls until the process is stopped.

        Raises:
            UserError, MeshError: see `load_experts`.
        """
        url = self.listen(listener)
        console.print(f"/health, /ready and /metrics at {url}", highlight=False)
        join_group(args, None)  # sets up emulated devices
        from dsjax.engine.expert_process import load_experts

        self.work = load_experts(args, show_progress=True)
        self.phase = "ready"
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        signal.signal(signal.SIGINT, lambda *_: ended.set())
        console.print(
            f"routed experts of {args.model} on {args.expert_mesh} answer at {expert_share(args).address}",
            highlight=False,
        )
        ended.wait()
        self.phase = "shutting down"
        self.work.close()
