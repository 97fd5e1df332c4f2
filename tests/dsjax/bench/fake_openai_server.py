"""A scripted OpenAI-compatible server on a real socket, in a thread of its own, with known gaps between its chunks."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class Script:
    """How requests are answered."""

    first: float = 0.0  # seconds before the first chunk
    gap: float = 0.0  # seconds between chunks
    cached: int | None = None  # prompt tokens that the usage says were cached; None: it says nothing
    refuse: Callable[[dict[str, Any]], tuple[int, str] | None] = lambda body: None  # a status and a message, of a body
    fail_after: int | None = None  # chunks after which an error event comes
    drop_after: int | None = None  # chunks after which the connection is closed
    hang: bool = False  # never answer
    metrics: Callable[[int], str] | None = None  # of the number of answered requests; None: there is no such path
    info: dict[str, Any] | None = None  # what `/server_info` says; None: there is no such path
    posts: dict[str, Callable[[dict[str, Any]], tuple[int, str]]] = field(default_factory=dict)  # a status and a text
    # What the first requests of a path get instead of an answer: status 503, a closed connection, or "compiling".
    starting: dict[str, list[Literal["503", "close", "compiling"]]] = field(default_factory=dict)
    models: Any = None  # the whole answer of `/v1/models`, in place of one model's
    root: str = "tiny"
    max_model_len: int = 4096
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0


class FakeServer:
    def __init__(self, script: Script):
        self.script = script
        self._running = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._start())
        self.url = f"http://127.0.0.1:{self._server.port}"

    def _call(self, work: Coroutine) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._server.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)
            self._loop.close()

    async def _start(self) -> None:
        @web.middleware
        async def start_slowly(request: web.Request, handler: Callable) -> web.StreamResponse:
            first = self.script.starting.get(request.path)
            if not first:
                return await handler(request)
            what = first.pop()
            if what == "compiling":
                return web.json_response({"status": "ready", "compiling": True})
            if what == "close":
                request.transport.close()
            return web.Response(status=503)

        app = web.Application(middlewares=[start_slowly])
        app.add_routes([web.post(path, self._complete) for path in ("/v1/completions", "/v1/chat/completions")])
        app.add_routes([web.post(path, self._post) for path in self.script.posts])
        app.add_routes([web.get(path, self._get) for path in ("/v1/models", "/server_info", "/metrics")])
        self._server = TestServer(app)
        await self._server.start_server(shutdown_timeout=0.1)

    async def _get(self, request: web.Request) -> web.Response:
        script = self.script
        if request.path == "/metrics" and script.metrics is not None:
            return web.Response(text=script.metrics(len(script.bodies)))
        card = {"id": "tiny", "object": "model", "root": script.root, "max_model_len": script.max_model_len}
        models = {"object": "list", "data": [card]} if script.models is None else script.models
        found = {"/v1/models": models, "/server_info": script.info}.get(request.path)
        return web.Response(status=404) if found is None else web.json_response(found)

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        status, text = self.script.posts[request.path]({**body, "authorization": request.headers.get("Authorization")})
        return web.Response(status=status, text=text)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.script.bodies.append(body)
        if refusal := self.script.refuse(body):
            error = {"message": refusal[1], "type": "invalid_request_error", "param": None, "code": None}
            return web.json_response({"error": error}, status=refusal[0])
        self._running += 1
        self.script.most_at_once = max(self.script.most_at_once, self._running)
        try:
            return await self._stream(request, body)
        finally:
            self._running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        script = self.script
        if script.hang:
            await asyncio.sleep(3600)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        if chat:
            await self._write(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        tokens = body["max_completion_tokens"] if chat else body["max_tokens"]
        for index in range(tokens):
            if index == script.fail_after:
                await self._write(response, {"error": {"message": "the engine failed", "type": "server_error"}})
                break
            if index == script.drop_after:
                request.transport.abort()
                return response
            await asyncio.sleep(script.first if index == 0 else script.gap)
            piece = {"delta": {"content": " tok"}} if chat else {"text": " tok"}
            finish = "length" if index == tokens - 1 else None
            await self._write(response, {"choices": [{"index": 0, **piece, "finish_reason": finish}], "usage": None})
        if (body.get("stream_options") or {}).get("include_usage"):
            prompt = 7 if chat or isinstance(body["prompt"], str) else len(body["prompt"])
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
            if script.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": script.cached}
            await self._write(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _write(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
