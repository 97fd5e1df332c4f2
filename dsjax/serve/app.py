"""The FastAPI application: routes, middlewares, and exception handlers that answer in OpenAI's error format."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from dsjax.errors import UserError
from dsjax.serve.connections import ClientGoneError, error_response
from dsjax.serve.errors import ApiError, to_api_error
from dsjax.serve.guards import BodyLimits, Keys, RequestIds, ResponseCounts
from dsjax.serve.page.routes import create_page_routes
from dsjax.serve.routes.admin import admin_routes
from dsjax.serve.routes.openai import openai_routes
from dsjax.serve.routes.status import create_metrics_routes, package_version, status_routes
from dsjax.serve.routes.tokenizer import tokenizer_routes
from dsjax.serve.routing import DirectRoutes, HeadRequests
from dsjax.serve.serving import Serving

logger = logging.getLogger(__name__)


def create_app(serving: Serving, before_routes: Callable[[ASGIApp], ASGIApp] | None = None) -> FastAPI:
    """Create the application. `Server` starts the engine's thread after warm-up; the application's shutdown ends the thread.

    before_routes: adds a middleware that runs after the guards (keys, body limits) and before the routes.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await serving.engine.shutdown()

    # FastAPI's documentation pages load scripts from other sites, so dsjax serves its own /docs.
    app = FastAPI(title="dsjax", version=package_version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    for kind in (ApiError, UserError, RequestValidationError, HTTPException, ClientGoneError, Exception):
        app.add_exception_handler(kind, _answer_error)
    openai = openai_routes(serving)
    app.include_router(openai)
    for make_routes in (tokenizer_routes, status_routes, admin_routes):
        app.include_router(make_routes(serving))
    create_page_routes(app)
    if serving.metrics is not None:
        create_metrics_routes(app, serving)
    # The last middleware added is the outermost.
    app.add_middleware(DirectRoutes, routes=openai.routes, answer_error=_answer_error)
    app.add_middleware(HeadRequests)
    if before_routes is not None:
        app.add_middleware(before_routes)
    app.add_middleware(BodyLimits, options=serving.options)
    app.add_middleware(Keys, options=serving.options)
    if origins := serving.options.origins:
        exposed = ("X-Request-ID", "Retry-After", "Warning")
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    app.add_middleware(RequestIds)
    if serving.metrics is not None:
        app.add_middleware(ResponseCounts, metrics=serving.metrics)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)  # nginx's status for a client that left; only the log shows it
    answer = to_api_error(error)
    if answer.status == 405 and request.method == "OPTIONS":
        methods = answer.headers["Allow"]
        return Response(status_code=204, headers={"Allow": methods + (", HEAD" if methods == "GET" else "")})
    if answer.status == 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(request.scope, answer)
