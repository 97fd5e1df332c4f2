"""A server with the endpoints that the page and `dsjax top` read, over `Metrics` that a test feeds: no engine, no JAX."""

import asyncio
import json
import threading
import time

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse

from dsjax.engine.contract.executor import ExpertCounts, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.schedule.request import FinishReason
from dsjax.engine.schedule.request import Request as EngineRequest
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import StepStats
from dsjax.engine.text.outputs import EngineDeadError
from dsjax.serve.metrics import Metrics
from dsjax.serve.page.routes import create_page_routes
from dsjax.serve.routes.status import create_metrics_routes, load_bodies

HOST_SECONDS = {"plan": 0.001, "launch": 0.002, "device": 0.006, "enter": 0.001}
_DEVICES = {"num_devices": 4, "device_kind": "cpu", "dp_ranks": 4, "physical_experts_per_device": 2}
INFO = {"model": "tiny", "mesh": "dp=4", **_DEVICES}


def load(rank: int, running: int = 0, waiting: int = 0, used: int = 0, cached: int = 0, usable: int = 100) -> RankLoad:
    """One rank's load; `waiting_tokens` and `cost` follow from the rest."""
    return RankLoad(rank, running, waiting, 10 * waiting, used, cached, usable, 16.0 * (running + waiting))


def step(ranks: list[RankLoad], *, decode: int = 0, prompt: int = 0, padding: int = 0, **others) -> StepStats:
    """A step of 10 ms."""
    tokens = {"num_decode_tokens": decode, "num_prompt_tokens": prompt, "num_padding_tokens": padding}
    counts = {"num_preemptions": 0, "compilations_after_warm_up": 0} | tokens | others
    parts = {name: counts.pop(name) for name in ("balance", "disk", "draft_choice", "transfers") if name in counts}
    return StepStats(time=0.0, duration=0.01, host_seconds=HOST_SECONDS, ranks=ranks, parts=parts, **counts)


def request(id_: str, *, rank=0, prompt=8, arrival=0.0, scheduled: float | None = 0.0, cached=0) -> EngineRequest:
    made = EngineRequest(id_, [1] * prompt, prompt, SamplingParams(), 16, 0, arrival_time=arrival)
    made.rank, made.first_scheduled_time, made.num_cached_tokens = rank, scheduled, cached
    return made


def token(of: EngineRequest, reason: FinishReason | None = None, *, finite: bool = True) -> Update:
    """What a step does to a completion: one token, and perhaps its end."""
    return Update(of, RowResult((3,) if finite else (), finite=finite), reason)


def experts(tokens: list[list[int]]) -> ExpertCounts:
    """Counts of `tokens[layer][physical expert]`."""
    counts = np.array(tokens)
    dispatch = {"rows_sent": np.array([5, 6, 7, 8]), "rounds": 2, "dispatch_bytes": 4096, "padding_share": 0.25}
    places = np.tile(np.arange(counts.shape[1]), (len(counts), 1))
    return ExpertCounts(tokens_per_expert=counts, logical_load=counts, physical_to_logical=places, **dispatch)


class NoEngine:
    """Metrics then show what the test fed them."""

    async def call(self, function):
        raise EngineDeadError("there is none")


class WatchedServer:
    """`answers` is what a chat says: (reasoning, text) pairs, one an event. `api_key` and `status` can be changed."""

    def __init__(self):
        self.metrics = Metrics("tiny", 4, 4096, experts_per_device=2)
        self.engine = NoEngine()
        self.ranks = [load(rank) for rank in range(4)]
        self.disk: dict | None = None
        self.answers: list[tuple[str, str]] = [("", "hello")]
        self.pause = 0.0
        self.asked: list[dict] = []
        self.api_key: str | None = None
        self.status = 200
        app = FastAPI(docs_url=None)
        create_metrics_routes(app, self)
        create_page_routes(app)
        self._add(app)
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", log_config=None))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)

    def _add(self, app: FastAPI) -> None:
        @app.middleware("http")
        async def guard(asked: Request, call_next):
            private = asked.url.path != "/" and not asked.url.path.startswith("/page/")
            known = (f"Bearer {self.api_key}", "Bearer admin")
            if private and self.api_key and asked.headers.get("authorization") not in known:
                return JSONResponse({"error": {"message": "no valid key was given"}}, 401)
            if private and self.status != 200:
                return JSONResponse({"error": {"message": "not now"}}, self.status)
            return await call_next(asked)

        @app.get("/server_info")
        async def server_info(asked: Request):
            admin = asked.headers.get("authorization") == "Bearer admin"
            return {**INFO, "admin": admin, "ranks": load_bodies(self.ranks)}

        @app.get("/get_load")
        async def get_load():
            return {"ranks": load_bodies(self.ranks), "disk": self.disk}

        @app.get("/v1/models")
        async def models():
            return {"object": "list", "data": [{"id": "tiny", "object": "model"}]}

        @app.post("/v1/chat/completions")
        async def chat(asked: Request):
            self.asked.append(await asked.json())
            return StreamingResponse(self._chat_events(), media_type="text/event-stream")

        @app.post("/v1/completions")
        async def completions(asked: Request):
            self.asked.append(await asked.json())
            return StreamingResponse(self._completion_events(), media_type="text/event-stream")

        @app.post("/start_expert_distribution_record")
        async def start():
            return JSONResponse({"error": {"message": "admin endpoints are closed on this server"}}, 403)

    async def _chat_events(self):
        for reasoning, text in self.answers:
            delta = {"content": text or None, "reasoning_content": reasoning or None, "reasoning": reasoning or None}
            yield _event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            await asyncio.sleep(self.pause)
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        yield _event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(self.answers)}})
        yield "data: [DONE]\n\n"

    async def _completion_events(self):
        for _, text in self.answers:
            yield _event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        error = {"message": "the engine has failed", "type": "server_error", "param": None, "code": None}
        yield _event({"error": error})
        yield "data: [DONE]\n\n"


def _event(body: dict) -> str:
    return f"data: {json.dumps(body)}\n\n"
