"""Endpoints for administrators. `Keys` checks the key before a request arrives here."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from dsjax.engine.core import EngineCore
from dsjax.engine.experts.eplb import RebalanceUnderWayError
from dsjax.engine.text.outputs import EngineDeadError
from dsjax.errors import ChangeUnderWayError
from dsjax.serve.bounds import MAX_REQUEST_ID_CHARACTERS
from dsjax.serve.errors import ApiError
from dsjax.serve.profiler import Profiler, device_time
from dsjax.serve.routes.status import expert_load
from dsjax.serve.routing import StrictRoute
from dsjax.serve.sampling_fields import StrictModel
from dsjax.serve.schemas import Aborted, ExpertLoad, Profiled, Rebalance, Scaled, State, errors
from dsjax.serve.serving import Serving

RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_CHARACTERS + 16)]


class AbortRequest(StrictModel):
    """Requests to abort: all, or those with an id (the response's id or the client's request id)."""

    request_id: RequestId | None = None
    abort_all: bool = False


class ScaleRequest(StrictModel):
    """The new mesh, written as for `--mesh`, or the new expert processes, as for `--expert-mesh` and `--afd-address`."""

    mesh: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    expert_mesh: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    afd_address: Annotated[str, Field(min_length=1, max_length=65536)] | None = None


def admin_routes(serving: Serving) -> APIRouter:
    """Return the router of the admin endpoints."""
    router = APIRouter(route_class=StrictRoute)
    profiler = Profiler(serving.options.profile_dir)
    documented = errors(403, 503)

    async def read_record() -> None:
        counts = await serving.ask(lambda core: core.executor.expert_counts())
        serving.expert_counts = counts or serving.expert_counts

    @router.post("/flush_cache", responses=documented)
    async def flush_cache() -> State:
        """Flush the prefix cache. Running requests keep their pages."""
        await serving.ask(lambda core: core.flush_prefix_cache())
        return {"status": "flushed"}

    @router.post("/abort_request", responses=errors(403))
    async def abort_request(body: AbortRequest) -> Aborted:
        """Abort requests; their clients get an error."""
        if (body.request_id is None) != body.abort_all:
            raise ApiError(400, "found both or none, expected request_id or abort_all: true", param="request_id")
        num_in_front_ends = await serving.front_ends.abort(body.request_id) if serving.front_ends is not None else 0
        return {"aborted": serving.abort(body.request_id) + num_in_front_ends}

    @router.post("/start_profile", responses=documented)
    async def start_profile() -> State:
        """Start a JAX trace of this process's devices before the next step."""
        return {"status": await serving.ask(lambda core: profiler.start())}

    @router.post("/stop_profile", responses=documented)
    async def stop_profile() -> Profiled:
        """Write the trace and return the share of device time spent in collectives, which is also a metric."""
        folder = await serving.ask(lambda core: profiler.stop())
        spent = await asyncio.to_thread(device_time, folder)
        if serving.metrics is not None:
            serving.metrics.set_exchange_share(spent.exchange_share)
        return {"status": "written", "exchange_share": spent.exchange_share}

    @router.post("/start_expert_distribution_record", responses=documented)
    async def start_record() -> State:
        """Start counting tokens per expert, from zero."""
        await serving.ask(lambda core: core.executor.set_recording(True))
        return {"status": "recording"}

    @router.post("/stop_expert_distribution_record", responses=documented)
    async def stop_record() -> State:
        """Stop counting. The counts can still be dumped."""
        await read_record()
        await serving.ask(lambda core: core.executor.set_recording(False))
        return {"status": "stopped"}

    @router.post("/dump_expert_distribution_record", responses=documented)
    async def dump_record() -> ExpertLoad:
        """Return the counts since the record began."""
        await read_record()
        if serving.expert_counts is None:
            reason = "nothing was recorded; post to /start_expert_distribution_record first"
            raise ApiError(400, reason, code="no_record")
        return expert_load(serving.expert_counts, serving.model_root)

    @router.post("/rebalance_experts", responses=errors(403, 409, 503))
    async def rebalance_experts() -> Rebalance:
        """Rebalance experts now, using the load since the last window began, even if the gain does not cover the cost."""
        try:
            moves = await serving.ask(_rebalance)
        except RebalanceUnderWayError as error:
            raise ApiError(409, str(error), code="rebalance_under_way") from error
        if moves is None:
            reason = "this server does not move experts; it was started without --enable-eplb"
            raise ApiError(400, reason, code="no_eplb")
        return moves

    @router.post("/scale", responses=errors(403, 409, 503))
    async def scale(body: ScaleRequest) -> Scaled:
        """Switch to another mesh or other expert processes; return when done. Requests continue and streams stay open."""
        serving.check_running()
        mesh, experts, address = body.mesh, body.expert_mesh, body.afd_address
        if mesh is None and experts is None and address is None:
            raise ApiError(400, "found nothing to change, expected mesh, expert_mesh or afd_address", param="mesh")
        try:
            generations = await serving.engine.scale(mesh, experts, address)
        except ChangeUnderWayError as error:
            raise ApiError(409, str(error), code="change_under_way") from error
        except EngineDeadError as error:
            raise ApiError(503, "the engine has failed", type="server_error") from error
        except ValueError as error:  # a UserError or a MeshError
            raise ApiError(400, str(error), param="mesh", code="mesh_impossible") from error
        if generations.failure is not None:
            options = ", ".join(f"{name} {text}" for name, text in body.model_dump(exclude_none=True).items())
            reason = (
                f"{options}: not possible, and the server continues on {generations.facts.mesh}: {generations.failure}"
            )
            raise ApiError(400, reason, param="mesh", code="mesh_unavailable")
        facts = generations.facts
        return {
            "generation": generations.number,
            "mesh": facts.mesh,
            "expert_mesh": facts.expert_mesh,
            "devices": facts.num_devices,
            "processes": facts.num_processes,
            "cache_tokens": facts.cache_tokens,
            "seconds": generations.counts.last_seconds,
        }

    return router


def _rebalance(core: EngineCore) -> dict[str, Any] | None:
    """Make a core's balancer rebalance now. Return the planned moves; None if the server has no balancer."""
    from dsjax.engine.experts.expert_balancer import ExpertBalancer  # loads NumPy

    balancer = core.part(ExpertBalancer)
    return None if balancer is None else balancer.rebalance_now()
