"""Endpoints for the server's state: liveness, readiness, load, metrics."""

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.setup.expert_location import ExpertLocation
from dsjax.engine.text.outputs import EngineClosingError, EngineDeadError
from dsjax.serve.connections import JsonResponse
from dsjax.serve.errors import ApiError
from dsjax.serve.schemas import ExpertLoad, HistoryBody, Load, RankLoadBody, ServerInfo, State, Version, errors
from dsjax.serve.serving import Phase, Serving
from dsjax.versions import installed_version

_LOADS_SECONDS = 0.5  # timeout of the engine's answer before metrics are rendered


def status_routes(serving: Serving) -> APIRouter:
    """Return the router of `/health`, `/ready`, `/version`, `/get_load` and `/server_info`."""
    router = APIRouter()

    @router.get("/health", responses=errors(503))
    async def health() -> State:
        """Return 200 unless the engine has failed, even before the server is ready."""
        if serving.engine.error is not None:
            raise ApiError(503, "the engine has failed", type="server_error")
        return {"status": "ok"}

    @router.get("/ready", responses=errors(503))
    async def ready() -> State:
        """Return 200 when the server is ready; 503 during warm-up, shutdown and mesh changes. Requests wait during mesh changes."""
        if serving.engine.error is not None or serving.state != Phase.READY.value:
            state = "failed" if serving.engine.error is not None else serving.state
            raise ApiError(503, f"the server is not ready: {state}", type="server_error", code="not_ready")
        return {"status": "ready", "compiling": serving.compiling}

    @router.get("/version", responses=errors())
    async def version_of_server() -> Version:
        """Return the version of dsjax."""
        return {"version": package_version()}

    @router.get("/get_load", responses=errors(503))
    async def get_load() -> Load:
        """Return the load of each DP rank."""
        loads, statistics = await serving.ask(lambda core: (core.loads(), core.statistics()))
        disk = statistics.get("disk")
        return {"ranks": load_bodies(loads), "disk": None if disk is None else disk._asdict()}

    @router.get("/server_info", response_model=ServerInfo, responses=errors(503))
    async def server_info(request: Request) -> Response:
        """Return model, mesh, options and load, and whether the request's key grants access to the admin endpoints."""
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
    """Add `GET /metrics` (text format or OpenMetrics, by the `Accept` header) and `GET /history` for the server's web page.

    `?name[]=NAME`, which may be repeated, selects samples by name: live views need only a few. `serving.metrics` must be set.
    """

    @app.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        _, content_type = choose_encoder(request.headers.get("accept", ""))
        openmetrics = content_type.startswith("application/openmetrics-text")
        await _refresh_loads(serving)
        names = request.query_params.getlist("name[]")
        # 32 ranks have about 8,500 samples. Rendering takes tens of milliseconds and must not delay streams.
        body = await asyncio.to_thread(serving.metrics.render, names, openmetrics=openmetrics)
        return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    @app.get("/history", responses=errors())
    async def history() -> HistoryBody:
        """Return token totals and load over the last minutes: one point per two seconds, if a step ran."""
        await _refresh_loads(serving)
        return serving.metrics.history.to_json()


async def _refresh_loads(serving: Any) -> None:
    """Ask the engine for the ranks' loads.

    Each step reports them, but no step follows when the last request is aborted. If the engine does not answer in time, because a step
    takes long or the engine has ended, the last known loads stay. With several front ends, their counts are gathered first.
    """
    if getattr(serving, "front_ends", None) is not None:
        await serving.front_ends.gather()
    with contextlib.suppress(EngineDeadError, EngineClosingError, TimeoutError):
        call = serving.engine.call(lambda core: (core.loads(), core.statistics()))
        async with asyncio.timeout(_LOADS_SECONDS):
            loads, statistics = await call
        serving.metrics.set_loads(loads, statistics)  # experts may have moved since the last step


def load_bodies(loads: list[RankLoad]) -> list[RankLoadBody]:
    """Return the JSON body of each DP rank's load."""
    bodies = []
    for load in loads:
        body = load._asdict()
        host = load.tiers.get("host")
        del body["tiers"]
        body["host"] = None if host is None else host._asdict()
        body["hits"] = {tier: load.hits.get(tier, 0) for tier in ("device", "host", "disk")}
        bodies.append(body)
    return bodies


def expert_load(counts: ExpertCounts, model: str) -> ExpertLoad:
    """Return the JSON body of recorded expert counts."""
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
    """Return the installed version of dsjax."""
    return installed_version("dsjax", missing="unknown")
