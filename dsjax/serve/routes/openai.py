"""Endpoints of OpenAI's and Anthropic's APIs."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from starlette.responses import Response

from dsjax.engine.schedule.request import RequestOptions
from dsjax.serve.answers import CompletionAnswer
from dsjax.serve.anthropic_answer import MessagesAnswer
from dsjax.serve.anthropic_request import MessagesRequest, TokenCountRequest
from dsjax.serve.bounds import MAX_NAME_CHARACTERS
from dsjax.serve.chat import ChatAnswer
from dsjax.serve.chat_fields import ChatRequest
from dsjax.serve.chat_prompt import render_prompt
from dsjax.serve.connections import EventStream, JsonResponse, cancel_if_client_leaves
from dsjax.serve.guards import request_id_of
from dsjax.serve.responses_answer import NamedEvents, ResponsesAnswer
from dsjax.serve.responses_request import ResponsesRequest
from dsjax.serve.routing import StrictRoute
from dsjax.serve.sampling_fields import CompletionRequest, warning_headers
from dsjax.serve.schemas import ChatResponse, CompletionResponse, ModelCard, ModelList, errors
from dsjax.serve.serving import Serving

SessionHeader = Annotated[
    str | None,
    Header(
        alias="X-Session-Affinity",
        min_length=1,
        max_length=MAX_NAME_CHARACTERS,
        description="session id: requests with the same id go to the same DP rank",
    ),
]
RankHeader = Annotated[
    int | None,
    Header(alias="X-Data-Parallel-Rank", ge=0, description="DP rank to run the request on, for cache-aware routers"),
]


async def read_request_options(session: SessionHeader = None, dp_rank: RankHeader = None) -> RequestOptions:
    """Read session and DP rank from the headers. A coroutine, because FastAPI would run a plain function in a thread."""
    return RequestOptions(session=session, dp_rank=dp_rank)


Options = Annotated[RequestOptions, Depends(read_request_options)]


def openai_routes(serving: Serving) -> APIRouter:
    """Return the router of the endpoints under `/v1`. All POST endpoints have the same parameters, because `DirectRoutes` calls them."""
    router = APIRouter(prefix="/v1", route_class=StrictRoute)
    stream = {"description": "the response, or a stream of events", "content": {"text/event-stream": {}}}
    answer_or_stream = {200: stream, **errors(429, 500, 503)}

    @router.get("/models", responses=errors())
    async def models() -> ModelList:
        """List the served model names."""
        return {"object": "list", "data": [_card(serving, name) for name in serving.model_names]}

    @router.get("/models/{name:path}", responses=errors())
    async def model(name: str) -> ModelCard:
        """Describe a served model name."""
        return _card(serving, serving.check_model(name))

    @router.post("/completions", response_model=CompletionResponse, responses=answer_or_stream)
    async def completions(body: CompletionRequest, request: Request, options: Options) -> Response:
        """Complete one or more prompts."""
        answer = CompletionAnswer(serving, body, request_id_of(request, body.request_id))
        return await _respond(serving, answer, body.stream, request, options)

    @router.post("/chat/completions", response_model=ChatResponse, responses=answer_or_stream)
    async def chat_completions(body: ChatRequest, request: Request, options: Options) -> Response:
        """Generate the next message of a conversation."""
        answer = ChatAnswer(serving, body, request_id_of(request, body.request_id))
        return await _respond(serving, answer, body.stream, request, options)

    @router.post("/responses", responses=answer_or_stream)
    async def responses(body: ResponsesRequest, request: Request, options: Options) -> Response:
        """Generate a response in the format of OpenAI's Responses API (items, named events). Nothing is stored."""
        answer = ResponsesAnswer(serving, body, request_id_of(request, body.request_id))
        return await _respond(serving, answer, body.stream, request, options, NamedEvents)

    @router.post("/messages", responses=answer_or_stream)
    async def messages(body: MessagesRequest, request: Request, options: Options) -> Response:
        """Generate the next message in the format of Anthropic's Messages API."""
        answer = MessagesAnswer(serving, body, request_id_of(request, None))
        return await _respond(serving, answer, body.stream, request, options, NamedEvents)

    @router.post("/messages/count_tokens", responses=errors())
    async def count_tokens(body: TokenCountRequest, request: Request, options: Options) -> Response:
        """Count the tokens of a prompt, as in Anthropic's API."""
        chat = body.to_chat()
        chat.check()
        serving.check_model(body.model)
        inputs = serving.engine.tokenizer, chat, chat.offered_tools, serving.tool_format
        prompt = await asyncio.to_thread(render_prompt, *inputs)
        return JsonResponse({"input_tokens": len(prompt.token_ids)})

    return router


async def _respond(
    serving: Serving,
    answer: CompletionAnswer | ChatAnswer | ResponsesAnswer | MessagesAnswer,
    stream: bool | None,
    request: Request,
    options: RequestOptions,
    event_stream: type[EventStream] = EventStream,
) -> Response:
    """Start an answer, and return it whole or as a stream of events."""
    outputs = await answer.start(options)
    warnings = warning_headers(answer.without_effect())
    request.scope["state"]["completions"] = outputs.completions
    abortable = serving.followed(answer.id, outputs)
    if stream:
        return event_stream(answer, outputs, abortable, warnings)
    with abortable:
        return JsonResponse(await cancel_if_client_leaves(request, answer.whole(outputs)), headers=warnings)


def _card(serving: Serving, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "dsjax",
        "root": serving.model_root,
        "max_model_len": serving.max_model_len,
    }
