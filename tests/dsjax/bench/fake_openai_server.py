"""A scripted OpenAI-compatible server on a real socket, in a thread of its own, with known gaps between its chunks."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web


@dataclass
class Script:
    """How requests are answered.

    Attributes:
        first, gap: seconds before the first chunk, and between chunks.
        usage: whether the stream ends with the usage.
        cached: prompt tokens that the usage says were cached; None: it says nothing.
        refuse: for a body, a status and message to refuse it with, or None.
        fail_after: chunks after which an error event comes.
        drop_after: chunks after which the connection is closed.
        hang: never answer.
        posts: path to what a JSON body posted there is answered with, a status and a text.
        starting: path to what its first requests get instead of an answer: status 503, a closed connection, or "compiling".
        models: the whole answer of `/v1/models`, in place of one model's.
        metrics: what `/metrics` says, given the number of answered requests; None: there is no such path.
        info: what `/server_info` says; None: there is no such path.
    """

    first: float = 0.0
    gap: float = 0.0
    usage: bool = True
    cached: int | None = None
    refuse: Callable[[dict[str, Any]], tuple[int, str] | None] = lambda body: None
    fail_after: int | None = None
    drop_after: int | None = None
    hang: bool = False
    metrics: Callable[[int], str] | None = None
    info: dict[str, Any] | None = None
    posts: dict[str, Callable[[dict[str, Any]], tuple[int, str]]] = field(default_factory=dict)
    starting: dict[str, list[Literal["503", "close", "compiling"]]] = field(default_factory=dict)
    models: Any = None
    root: str = "tiny"
    max_model_len: int = 4096
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0


class FakeServer:
    def __init__(self, script: Script):
        self.script = script
        self._running = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.call_soon(self._ready.set)
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
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
        app.router.add_get("/v1/models", self._models)
        if self.script.info is not None:
            app.router.add_get("/server_info", self._info)
        if self.script.metrics is not None:
            app.router.add_get("/metrics", self._metrics)
        for path in self.script.posts:
            app.router.add_post(path, self._post)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _models(self, request: web.Request) -> web.Response:
        if self.script.models is not None:
            return web.json_response(self.script.models)
        card = {"id": "tiny", "object": "model", "root": self.script.root, "max_model_len": self.script.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(self.script.info)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.script.metrics(len(self.script.bodies)))

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        status, text = self.script.posts[request.path]({**body, "authorization": request.headers.get("Authorization")})
        return web.Response(status=status, text=text)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.script.bodies.append(body)
        refusal = self.script.refuse(body)
        if refusal is not None:
            error = {"error": {"message": refusal[1], "type": "invalid_request_error", "param": None, "code": None}}
            return web.json_response(error, status=refusal[0])
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
        if script.usage and (body.get("stream_options") or {}).get("include_usage"):
            prompt = 7 if chat or isinstance(body["prompt"], str) else len(body["prompt"])
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
            if script.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": script.cached}
            await self._write(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _write(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
