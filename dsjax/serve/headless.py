"""A server without requests: what `dsjax serve` is in every process but the first of a group."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client.exposition import choose_encoder
from rich.console import Console

from dsjax.background import start_thread
from dsjax.engine.elastic.joining import join_group
from dsjax.engine.setup.args import EngineArgs
from dsjax.hosts import HostOptions
from dsjax.hosts.interfaces import read_interfaces
from dsjax.hosts.link_monitor import LinkState
from dsjax.serve.connections import JsonResponse, affordable_connections, bounded_connections
from dsjax.serve.guards import OPEN_PATHS, Keys
from dsjax.serve.metrics_families import Registry, exposition
from dsjax.serve.metrics_links import add_link_metrics
from dsjax.serve.metrics_parts import add_background_metrics, add_memory_metrics, device_memory
from dsjax.serve.options import ServeOptions


class Headless:
    """One process of a group that follows process 0, with `/health`, `/ready` and `/metrics` of its own.

    Args:
        http: as of the server of process 0; `/metrics` wants one of its keys where it has any.

    Attributes:
        phase: what it is doing: rendezvous, loading, warming up, ready, shutting down.
    """

    def __init__(self, options: HostOptions, http: ServeOptions):
        self.options, self._http = options, http
        self._follower = None
        self.registry = registry = Registry(process=str(options.process_id))
        for name, documentation, count in (
            ("dsjax_follower_commands", "Commands of process 0 that this process has carried out.", "commands"),
            ("dsjax_follower_steps", "Of those, steps and the like whose results have been read.", "steps"),
        ):
            registry.total(name, documentation, lambda count=count: float(getattr(self._follower, count, 0)))
        registry.gauge("dsjax_follower_ready", "1 while this process follows.", lambda: float(self.phase == "ready"))
        add_background_metrics(registry)
        add_link_metrics(registry, self._links, read_interfaces)
        # To ask for devices before the group is there would start JAX alone.
        add_memory_metrics(registry, lambda: device_memory() if self.phase in ("warming up", "ready") else ())

    def _links(self) -> Mapping[int, LinkState]:
        monitor = getattr(getattr(self._follower, "group", None), "monitor", None)
        return {} if monitor is None else monitor.links

    @property
    def phase(self) -> str:
        """What this process does."""
        return "rendezvous" if self._follower is None else self._follower.phase

    def serve(self, args: EngineArgs, listener: socket.socket, console: Console) -> None:
        """Join, load, and follow until process 0 ends.

        Raises:
            UserError, GroupError: there is no group, or it has broken.
        """
        config = uvicorn.Config(
            self.app(),
            log_config=None,
            access_log=False,
            ws="none",
            http=bounded_connections(self._http.request_timeout, affordable_connections(self._http.max_connections)),
        )
        server = uvicorn.Server(config)  # takes no signals in a thread that is not the main one
        start_thread("headless server", server.run, [listener], name="dsjax-headless")
        host, port = listener.getsockname()[:2]
        console.print(
            f"process {self.options.process_id} of {self.options.num_processes}: follows process 0 at "
            f"{self.options.coordinator_text}; /health, /ready and /metrics at http://{host}:{port}",
            highlight=False,
        )
        group = join_group(args, self.options)
        from dsjax.engine.elastic.follower import Follower

        self._follower = Follower(group)
        self._follower.run_with(args)
        how = (
            "the others go on without this process"
            if self._follower.left
            else "process 0 has ended; this process ends too"
        )
        console.print(how, highlight=False)

    def app(self) -> FastAPI:
        """Make the application with the three endpoints."""
        app = FastAPI(title="dsjax follower", docs_url=None, redoc_url=None, openapi_url=None)

        @app.get("/live")  # what Dynamo's operator asks for
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
