"""How the server is: alive, ready, loaded, and what it has measured."""

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.setup.expert_location import ExpertLocation
from dsjax.engine.text.outputs import EngineDeadError
from dsjax.serve.connections import JsonResponse
from dsjax.serve.errors import ApiError
from dsjax.serve.schemas import ExpertLoad, HistoryBody, Load, RankLoadBody, ServerInfo, State, Version, errors
from dsjax.serve.serving import Phase, Serving
from dsjax.versions import installed_version

_LOADS_SECONDS = 0.5


def status_routes(serving: Serving) -> APIRouter:
    """Make the routes `/health`, `/ready`, `/version`, `/get_load`, `/server_info`."""
    router = APIRouter()

    @router.get("/health", responses=errors(503))
    async def health() -> State:
        """Say whether the server is alive; also before it is ready."""
        if serving.engine.error is not None:
            raise ApiError(503, "the engine has failed", type="server_error")
        return {"status": "ok"}

    @router.get("/ready", responses=errors(503))
    async def ready() -> State:
        """Say whether the server is warmed up and computes. While its mesh is changed it does not; requests wait meanwhile."""
        if serving.engine.error is not None or serving.state != Phase.READY.value:
            state = "failed" if serving.engine.error is not None else serving.state
            raise ApiError(503, f"the server is not ready: {state}", type="server_error", code="not_ready")
        return {"status": "ready"}

    @router.get("/version", responses=errors())
    async def version_of_server() -> Version:
        """Give the version of dsjax."""
        return {"version": package_version()}

    @router.get("/get_load", responses=errors(503))
    async def get_load() -> Load:
        """Say what each DP rank has to do."""
        loads, parts = await serving.ask(lambda core: (core.loads(), core.statistics()))
        disk = parts.get("disk")
        return {"ranks": load_bodies(loads), "disk": None if disk is None else disk._asdict()}

    @router.get("/server_info", response_model=ServerInfo, responses=errors(503))
    async def server_info(request: Request) -> Response:
        """Say what is served, how, and under which load; and whether the request's key opens the admin endpoints."""
        experts = serving.expert_counts
        body: ServerInfo = {
            "version": package_version(),
            "models": list(serving.model_names),
            "phase": serving.state,
            "options": serving.options.to_json(),
            "ranks": load_bodies(await serving.ask(lambda core: core.loads()))
            if serving.state in (Phase.READY.value, Phase.CLOSING.value)
            else [],
            "admin": request.scope["state"].get("admin", False),
            "experts": expert_load(experts, serving.model_root) if experts is not None else None,
        }
        return JsonResponse({**(serving.facts.to_json() if serving.facts else {}), **body})

    return router


def create_metrics_routes(app: FastAPI, serving: Any) -> None:
    """Add `GET /metrics`, the text format or OpenMetrics, whichever the scraper prefers, and `GET /history` for the page.

    `serving.metrics` is a `Metrics`.

    `?name[]=NAME`, as often as wanted, gives the samples of these names alone: the live views read a few of thousands.
    """

    @app.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        _, content_type = choose_encoder(request.headers.get("accept", ""))
        openmetrics = content_type.startswith("application/openmetrics-text")
        await _refresh_loads(serving)
        names = request.query_params.getlist("name[]")
        # Some 8,500 samples with 32 ranks: tens of milliseconds that streams should not wait for.
        body = await asyncio.to_thread(serving.metrics.render, names, openmetrics=openmetrics)
        return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    @app.get("/history", responses=errors())
    async def history() -> HistoryBody:
        """Say what the server did in the last minutes, every two seconds in which it computed."""
        await _refresh_loads(serving)
        return serving.metrics.history.to_json()


async def _refresh_loads(serving: Any) -> None:
    """Steps tell of the ranks' load, but the last request may end by an abort, after which there is no step to tell of it.

    Where the engine does not answer soon, because a step takes long or it is dead, the last known loads stand.
    """
    if getattr(serving, "front_ends", None) is not None:
        await serving.front_ends.gather()
    with contextlib.suppress(EngineDeadError, TimeoutError):
        call = serving.engine.call(lambda core: (core.loads(), core.statistics()))
        async with asyncio.timeout(_LOADS_SECONDS):
            loads, parts = await call
        serving.metrics.show(loads, parts)  # experts may have moved since, without a step


def load_bodies(loads: list[RankLoad]) -> list[RankLoadBody]:
    """Describe what each DP rank has to do, as it is between two steps of the engine."""
    bodies = []
    for load in loads:
        body, host = load._asdict(), load.tiers.get("host")
        del body["tiers"]
        body["host"] = None if host is None else host._asdict()
        body["hits"] = {tier: load.hits.get(tier, 0) for tier in ("device", "host", "disk")}
        bodies.append(body)
    return bodies


def expert_load(counts: ExpertCounts, model: str) -> ExpertLoad:
    """Make recorded counts something that JSON can hold."""
    location = ExpertLocation(model, counts.logical_load, counts.physical_to_logical)
    return {
        **location.to_json(),
        "tokens_per_expert": counts.tokens_per_expert.tolist(),
        "rows_sent": counts.rows_sent.tolist(),
        "rounds": int(counts.rounds),
        "dispatch_bytes": int(counts.dispatch_bytes),
        "padding_share": float(counts.padding_share),
    }


def package_version() -> str:
    """Return the version of dsjax that is installed."""
    return installed_version("dsjax", missing="unknown")
