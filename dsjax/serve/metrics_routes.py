"""`GET /metrics`: the exposition, as text or as OpenMetrics, whichever the scraper prefers."""

import asyncio
import contextlib
import functools
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from starlette.responses import Response

from dsjax.engine.output_stream import EngineDeadError

_LOADS_SECONDS = 0.5


def create_metrics_routes(app: FastAPI, serving: Any) -> None:
    """Add the route. `serving.metrics` is a `Metrics`.

    `?name[]=NAME`, as often as wanted, gives the samples of these names alone: the live views read a few of thousands.
    """

    @app.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        if isinstance(encode, functools.partial):
            # Escaping "underscores" turns the colon of `vllm:` into `_` in OpenMetrics samples (prometheus_client 0.26). All our
            # names are valid under every scheme as they are, so none is escaped.
            encode = functools.partial(encode, escaping=ALLOWUTF8)
        await _refresh_loads(serving)
        names = request.query_params.getlist("name[]")
        # 32 ranks have some 10,000 samples: writing them takes a tenth of a second that streams should not wait for.
        body = await asyncio.to_thread(serving.metrics.render, names, encode)
        return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})


async def _refresh_loads(serving: Any) -> None:
    """Steps tell of the ranks' load, but the last request may end by an abort, after which there is no step to tell of it.

    Where the engine does not answer soon, because a step takes long or it is dead, the last known loads stand.
    """
    with contextlib.suppress(EngineDeadError, TimeoutError):
        loads = await asyncio.wait_for(serving.engine.call(lambda core: core.loads()), _LOADS_SECONDS)
        serving.metrics.show_loads(loads)
