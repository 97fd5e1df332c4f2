"""The FastAPI application: routes, and every exception as an error in OpenAI's shape."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dsjax.errors import UserError
from dsjax.serve.chat import ChatAnswer, ChatRequest
from dsjax.serve.completions import CompletionAnswer, CompletionRequest
from dsjax.serve.errors import ApiError, to_api_error
from dsjax.serve.event_stream import ClientGoneError, EventStream, JsonResponse, unless_client_leaves
from dsjax.serve.responses import ChatResponse, CompletionResponse, ErrorBody, Health, ModelCard, ModelList
from dsjax.serve.serving import Serving

logger = logging.getLogger(__name__)

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "not JSON, or a value that cannot be"},
    404: {"model": ErrorBody, "description": "no such model"},
    422: {"model": ErrorBody, "description": "fields that are not those of the schema"},
    500: {"model": ErrorBody, "description": "the engine failed"},
    503: {"model": ErrorBody, "description": "shutting down"},
}


def create_app(serving: Serving) -> FastAPI:
    """The application; its lifespan is the engine's thread's."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        serving.engine.start()
        yield
        await serving.engine.shutdown()

    # The documentation pages of FastAPI load scripts from elsewhere, so there are none; the schema is at /openapi.json.
    app = FastAPI(title="dsjax", lifespan=lifespan, docs_url=None, redoc_url=None)
    for kind in (ApiError, UserError, RequestValidationError, HTTPException, ClientGoneError, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_routes(app, serving)
    return app


def _add_routes(app: FastAPI, serving: Serving) -> None:
    @app.get("/health", responses={503: {"model": ErrorBody, "description": "the engine failed"}})
    async def health() -> Health:
        """Whether the server is alive."""
        if serving.engine.error is not None:
            raise ApiError(503, "the engine has failed", type="server_error")
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> ModelList:
        """The served names."""
        return {"object": "list", "data": [_card(serving, name) for name in serving.model_names]}

    @app.get("/v1/models/{name:path}", responses={404: _ERRORS[404]})
    async def model(name: str) -> ModelCard:
        """One served name."""
        return _card(serving, serving.check_model(name))

    @app.post("/v1/completions", response_model=CompletionResponse, responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        return await _answer(CompletionAnswer(serving, body), body.stream, request)

    @app.post("/v1/chat/completions", response_model=ChatResponse, responses=_ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation."""
        return await _answer(ChatAnswer(serving, body), body.stream, request)


async def _answer(answer: CompletionAnswer | ChatAnswer, stream: bool | None, request: Request) -> Response:
    outputs = await answer.start()
    if stream:
        return EventStream(outputs, answer.chunks(outputs))
    with closing(outputs):
        return JsonResponse(await unless_client_leaves(request, answer.whole(outputs)))


def _card(serving: Serving, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "dsjax",
        "root": serving.model_root,
        "max_model_len": serving.max_model_len,
    }


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)  # nobody reads it; nginx's number for the access log
    answer = to_api_error(error)
    if answer.status == 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JsonResponse(answer.body(), status_code=answer.status)
