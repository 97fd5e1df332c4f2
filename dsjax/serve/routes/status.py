"""How the server is: alive, ready, loaded."""

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter
from starlette.responses import Response

from dsjax.engine.stats import ExpertCounts, RankLoad
from dsjax.serve.errors import ApiError
from dsjax.serve.json_bodies import JsonResponse
from dsjax.serve.responses import ExpertLoad, Load, RankLoadBody, ServerInfo, State, Version
from dsjax.serve.routes.documented import errors
from dsjax.serve.serving import Phase, Serving


def status_routes(serving: Serving) -> APIRouter:
    """`/health`, `/ready`, `/version`, `/get_load`, `/server_info`."""
    router = APIRouter()

    @router.get("/health", responses=errors(503))
    async def health() -> State:
        """Whether the server is alive; also before it is ready."""
        if serving.engine.error is not None:
            raise ApiError(503, "the engine has failed", type="server_error")
        return {"status": "ok"}

    @router.get("/ready", responses=errors(503))
    async def ready() -> State:
        """Whether the server is warmed up and takes requests."""
        if serving.engine.error is not None or serving.phase is not Phase.READY:
            state = "failed" if serving.engine.error is not None else serving.phase.value
            raise ApiError(503, f"the server is not ready: {state}", type="server_error", code="not_ready")
        return {"status": "ready"}

    @router.get("/version", responses=errors())
    async def package_version() -> Version:
        """The version of dsjax."""
        return {"version": _version()}

    @router.get("/get_load", responses=errors(503))
    async def get_load() -> Load:
        """What each DP rank has to do."""
        return {"ranks": await _loads(serving)}

    @router.get("/server_info", response_model=ServerInfo, responses=errors(503))
    async def server_info() -> Response:
        """What is served, how, and under which load."""
        experts = serving.expert_counts
        body: ServerInfo = {
            "version": _version(),
            "models": list(serving.model_names),
            "phase": serving.phase.value,
            "options": serving.options.to_json(),
            "ranks": await _loads(serving) if serving.phase is not Phase.WARMING_UP else [],
            "experts": expert_load(experts) if experts is not None else None,
        }
        return JsonResponse({**(serving.facts.to_json() if serving.facts else {}), **body})

    return router


async def _loads(serving: Serving) -> list[RankLoadBody]:
    """As they are between two steps."""
    loads: list[RankLoad] = await serving.ask(lambda core: core.loads())
    return [load._asdict() for load in loads]


def expert_load(counts: ExpertCounts) -> ExpertLoad:
    """Recorded counts as JSON can hold them."""
    return {
        "tokens_per_expert": counts.tokens_per_expert.tolist(),
        "rows_sent": counts.rows_sent.tolist(),
        "rounds": int(counts.rounds),
        "dispatch_bytes": int(counts.dispatch_bytes),
        "padding_share": float(counts.padding_share),
    }


def _version() -> str:
    try:
        return version("dsjax")
    except PackageNotFoundError:  # run from the source tree
        return "unknown"
