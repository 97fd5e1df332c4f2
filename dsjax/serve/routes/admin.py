"""What only an administrator may do. `Keys` has checked the key before a request comes here."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from dsjax.serve.bodies import StrictModel, StrictRoute
from dsjax.serve.bounds import MAX_REQUEST_ID_CHARACTERS
from dsjax.serve.errors import ApiError
from dsjax.serve.routes.status import expert_load
from dsjax.serve.schemas import Aborted, ExpertLoad, State, errors
from dsjax.serve.serving import Serving

RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_CHARACTERS + 16)]


class AbortRequest(StrictModel):
    """Which requests to end: one id, the answer's or the client's own, or all."""

    request_id: RequestId | None = None
    abort_all: bool = False


def admin_routes(serving: Serving) -> APIRouter:
    """`/flush_cache`, `/abort_request`, profiling, and the record of the experts' load."""
    router = APIRouter(route_class=StrictRoute)
    profiler = Profiler(serving.options.profile_dir)
    documented = errors(403, 503)

    @router.post("/flush_cache", responses=documented)
    async def flush_cache() -> State:
        """Forget all cached prefixes. Running requests keep the pages that they read."""
        await serving.ask(lambda core: core.flush_prefix_cache())
        return {"status": "flushed"}

    @router.post("/abort_request", responses=errors(403, 422))
    async def abort_request(body: AbortRequest) -> Aborted:
        """End requests; their clients get an error."""
        if (body.request_id is None) != body.abort_all:
            raise ApiError(400, "found both or none, expected request_id or abort_all: true", param="request_id")
        return {"aborted": serving.abort(body.request_id)}

    @router.post("/start_profile", responses=documented)
    async def start_profile() -> State:
        """Begin a trace, between two steps."""
        return {"status": await serving.ask(lambda core: profiler.start())}

    @router.post("/stop_profile", responses=documented)
    async def stop_profile() -> State:
        """End the trace and write it."""
        return {"status": await serving.ask(lambda core: profiler.stop())}

    @router.post("/start_expert_distribution_record", responses=documented)
    async def start_record() -> State:
        """Count from zero how tokens reach their experts."""
        await serving.ask(lambda core: core.executor.set_recording(True))
        return {"status": "recording"}

    @router.post("/stop_expert_distribution_record", responses=documented)
    async def stop_record() -> State:
        """Count no more; what was counted can still be dumped."""
        serving.expert_counts = await serving.ask(lambda core: core.executor.expert_counts()) or serving.expert_counts
        await serving.ask(lambda core: core.executor.set_recording(False))
        return {"status": "stopped"}

    @router.post("/dump_expert_distribution_record", responses=documented)
    async def dump_record() -> ExpertLoad:
        """What was counted since the record began."""
        serving.expert_counts = await serving.ask(lambda core: core.executor.expert_counts()) or serving.expert_counts
        if serving.expert_counts is None:
            raise ApiError(
                400, "nothing was recorded; post to /start_expert_distribution_record first", code="no_record"
            )
        return expert_load(serving.expert_counts)

    return router


class Profiler:
    """JAX traces of the running server: at most one at a time, into a directory that no request can name. Called in the engine's thread."""

    def __init__(self, directory: str | None):
        self._directory = directory
        self._running = False

    def start(self) -> str:
        """Begin a trace.

        Raises:
            ApiError: no directory was configured, or a trace is running.
        """
        if self._directory is None:
            raise ApiError(
                400, "this server does not profile; it was started without --profile-dir", code="no_profile_dir"
            )
        if self._running:
            raise ApiError(400, "a profile is running; stop it first", code="profile_running")
        import jax

        jax.profiler.start_trace(self._directory)
        self._running = True
        return "profiling"

    def stop(self) -> str:
        """End the trace and write it.

        Raises:
            ApiError: none is running.
        """
        if not self._running:
            raise ApiError(400, "no profile is running; start one first", code="no_profile")
        import jax

        self._running = False
        jax.profiler.stop_trace()
        return "written"
