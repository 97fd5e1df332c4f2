"""OpenAI's endpoints, and the short way to them that usual requests take."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsjax.engine.schedule.request import RequestOptions
from dsjax.errors import UserError
from dsjax.serve.bodies import (
    ClientGoneError,
    EventStream,
    JsonResponse,
    StrictRoute,
    strict_json,
    unless_client_leaves,
)
from dsjax.serve.bounds import MAX_NAME_CHARACTERS
from dsjax.serve.chat import ChatAnswer
from dsjax.serve.chat_fields import ChatRequest
from dsjax.serve.completions import CompletionAnswer, CompletionRequest
from dsjax.serve.guards import beginning_with, request_id_of
from dsjax.serve.responses_answer import ResponsesAnswer, ResponsesEvents
from dsjax.serve.responses_request import ResponsesRequest
from dsjax.serve.sampling_fields import warning_headers
from dsjax.serve.schemas import ChatResponse, CompletionResponse, ModelCard, ModelList, errors
from dsjax.serve.serving import Serving, followed

Session = Annotated[
    str | None,
    Header(
        alias="X-Session-Affinity",
        min_length=1,
        max_length=MAX_NAME_CHARACTERS,
        description="requests of one session go to one DP rank",
    ),
]
Rank = Annotated[
    int | None,
    Header(
        alias="X-Data-Parallel-Rank",
        ge=0,
        description="number of the DP rank that the request is to run on, for a router that knows what is cached where",
    ),
]


async def place_of(session: Session = None, dp_rank: Rank = None) -> RequestOptions:
    """Read from the headers where the request is to run. Not a plain function: FastAPI calls those in another thread."""
    return RequestOptions(session=session, dp_rank=dp_rank)


Wanted = Annotated[RequestOptions, Depends(place_of)]


def openai_routes(serving: Serving) -> APIRouter:
    """The routes under `/v1`."""
    router = APIRouter(prefix="/v1", route_class=StrictRoute)
    stream = {"description": "the answer, or its events", "content": {"text/event-stream": {}}}
    generating = {200: stream, **errors(422, 429, 500, 503)}

    @router.get("/models", responses=errors())
    async def models() -> ModelList:
        """The served names."""
        return {"object": "list", "data": [_card(serving, name) for name in serving.model_names]}

    @router.get("/models/{name:path}", responses=errors(422))
    async def model(name: str) -> ModelCard:
        """One served name."""
        return _card(serving, serving.check_model(name))

    @router.post("/completions", response_model=CompletionResponse, responses=generating)
    async def completions(body: CompletionRequest, request: Request, place: Wanted) -> Response:
        """Continue one or several prompts."""
        answer = CompletionAnswer(serving, body, request_id_of(request, body.request_id))
        return await _answer(serving, answer, body.stream, request, place)

    @router.post("/chat/completions", response_model=ChatResponse, responses=generating)
    async def chat_completions(body: ChatRequest, request: Request, place: Wanted) -> Response:
        """Continue a conversation."""
        answer = ChatAnswer(serving, body, request_id_of(request, body.request_id))
        return await _answer(serving, answer, body.stream, request, place)

    @router.post("/responses", responses=generating)
    async def responses(body: ResponsesRequest, request: Request, place: Wanted) -> Response:
        """Continue a conversation, told as items and named events. Stateless: nothing is stored."""
        answer = ResponsesAnswer(serving, body, request_id_of(request, body.request_id))
        return await _answer(serving, answer, body.stream, request, place, ResponsesEvents)

    return router


async def _answer(
    serving: Serving,
    answer: CompletionAnswer | ChatAnswer | ResponsesAnswer,
    stream: bool | None,
    request: Request,
    place: RequestOptions,
    events: type[EventStream] = EventStream,
) -> Response:
    if place.session is None and answer.session is not None:
        place = RequestOptions(session=answer.session, dp_rank=place.dp_rank)
    outputs = await answer.start(place)
    warnings = warning_headers(answer.without_effect())
    request.scope["state"]["completions"] = outputs.completions
    resources = followed(serving, answer.id, outputs)
    if stream:
        return events(answer, outputs, resources, warnings)
    with resources:
        return JsonResponse(await unless_client_leaves(request, answer.whole(outputs)), headers=warnings)


def _card(serving: Serving, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "dsjax",
        "root": serving.model_root,
        "max_model_len": serving.max_model_len,
    }


class UsualRequests:
    """ASGI middleware, the last before the routes. It calls the endpoint of a usual request itself, without FastAPI.

    FastAPI's router, exit stacks and reading of headers cost more processor time than all that the server itself does for a request
    (docs/performance.md, "Over HTTP"). A request that is unusual, or has a mistake in its headers or body, is passed on to FastAPI. So
    only one place puts mistakes into words.

    Args:
        routes: of `openai_routes`. Only those for POST are used.
        answer_error: makes an answer of what an endpoint raises.
    """

    _ERRORS = (UserError, HTTPException, ClientGoneError)
    """What the application has an answer for; anything else is a defect, and passes on."""
    _SESSION, _RANK = b"x-session-affinity", b"x-data-parallel-rank"
    _READ = frozenset({b"content-type", _SESSION, _RANK})

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[APIRoute],
        answer_error: Callable[[Request, Exception], Awaitable[Response]],
    ):
        self._app, self._answer_error = app, answer_error
        self._endpoints: dict[str, tuple[APIRoute, type[BaseModel]]] = {
            route.path: (route, inspect.signature(route.endpoint).parameters["body"].annotation)
            for route in routes
            if "POST" in route.methods
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a usual request; pass on any other."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._endpoints:
            await self._app(scope, receive, send)
            return
        message = await receive()
        route, schema = self._endpoints[scope["path"]]
        read = self._read(scope, message, schema)
        if read is None:
            await self._app(scope, beginning_with(message, receive), send)
            return
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(read[0], request, read[1])
        except self._ERRORS as error:
            response = await self._answer_error(request, error)
        await response(scope, receive, send)

    def _read(self, scope: Scope, message: Message, schema: type[BaseModel]) -> tuple[BaseModel, RequestOptions] | None:
        """A request's body and place; None unless it is usual and without a mistake. `BodyLimits` has made one message of its body."""
        given = [(name, value) for name, value in scope["headers"] if name in self._READ]
        headers = dict(given)
        session, rank = headers.get(self._SESSION), headers.get(self._RANK)
        if (
            len(headers) < len(given)
            or headers.get(b"content-type", b"").partition(b";")[0] != b"application/json"
            or (session is not None and not 1 <= len(session) <= MAX_NAME_CHARACTERS)
            or (rank is not None and not (rank.isdigit() and len(rank) < 10))
        ):
            return None
        try:
            body = schema.model_validate(strict_json(message.get("body", b"")))
        except ValueError:  # not JSON, or not the schema's
            return None
        place = RequestOptions(
            session=session and session.decode("latin-1"), dp_rank=None if rank is None else int(rank)
        )
        return body, place
