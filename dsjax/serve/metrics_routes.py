"""`GET /metrics`: the exposition, as text or as OpenMetrics, whichever the scraper prefers."""

import asyncio
import contextlib
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from dsjax.engine.output_stream import EngineDeadError

_LOADS_SECONDS = 0.5


def create_metrics_routes(app: FastAPI, serving: Any) -> None:
    """Add the route. `serving.metrics` is a `Metrics`.

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


async def _refresh_loads(serving: Any) -> None:
    """Steps tell of the ranks' load, but the last request may end by an abort, after which there is no step to tell of it.

    Where the engine does not answer soon, because a step takes long or it is dead, the last known loads stand.
    """
    with contextlib.suppress(EngineDeadError, TimeoutError):
        loads = await asyncio.wait_for(serving.engine.call(lambda core: core.loads()), _LOADS_SECONDS)
        serving.metrics.show_loads(loads)
