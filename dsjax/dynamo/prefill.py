"""`DsjaxPrefillEngine`: a Dynamo worker that computes prompts for decode workers and generates no text."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from dynamo.common.backend import EngineConfig, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument
from rich.console import Console

from dsjax.addresses import is_loopback, split_address
from dsjax.dynamo.arguments import parse
from dsjax.dynamo.translation import Chunk, Chunks, translate
from dsjax.dynamo.worker import LoadReports, Options, Worker, registration
from dsjax.engine.core import EngineCore
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.request import StepPlan
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.transfer.page_network import PrefillServer
from dsjax.errors import UserError
from dsjax.serve.metrics_families import Registry, exposition
from dsjax.serve.metrics_parts import add_background_metrics, add_prefill_metrics
from dsjax.serve.startup_screen import warm_up_bar
from dsjax.serve.watchdog import Watchdog

_log = logging.getLogger(__name__)


class DsjaxPrefillEngine(Worker):
    """Answers each request at once with the location of its pages, while they are computed. Decode workers fetch each page once ready."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Worker, WorkerConfig]:
        """Create the prefill engine for a command line. Raises the errors of `parse`, and:

        Raises:
            UserError: `--disaggregation-mode` is not `prefill`.
        """
        options, worker = parse(argv)
        if options.args.disaggregation_mode != "prefill":
            raise UserError(
                f"--disaggregation-mode is {options.args.disaggregation_mode}, expected prefill; DsjaxEngine has the others"
            )
        return cls(options), worker

    def __init__(self, options: Options):
        super().__init__(options)
        self._server: PrefillServer | None = None
        self._loads: PrefillLoads | None = None

    def _begin(self) -> EngineConfig:
        engine = self._server.engine
        self._loads = PrefillLoads(engine.core)
        engine.core.attachments.append(self._loads)
        engine.on_death = self._die
        # Decode workers see the connection close; there are no other clients to notify.
        self._watchdog = Watchdog(self._options.step_timeout, {"the engine": engine.core}, notify_clients=lambda: None)
        self._watchdog.start()
        config = registration(self._options, engine.core.executor.limits, engine.core.scheduler.config)
        if self._options.bootstrap:
            config.llm.bootstrap_host, config.llm.bootstrap_port = split_address(self._server.address)
        return config

    def _load(self) -> None:
        from dsjax.engine.device.process import size_memory_pool
        from dsjax.engine.disaggregated import load_prefill

        size_memory_pool(self._args.gpu_memory_utilization)
        self._server = load_prefill(self._args, self._group, event_sink=self._events, show_progress=True)
        console = Console()
        with warm_up_bar(console) as progress:
            self._server.warm_up(progress)
        console.print(_reached_at(self._server.address), highlight=False)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[Chunk]:
        """Start to compute a prompt, and yield the location of its pages."""
        server = self._server
        if server is None:
            raise EngineShutdown("this worker ends")
        if server.engine.error is not None:
            self._die()
            raise EngineShutdown("the engine has failed")
        try:
            prompt = translate(request)
            self._check(prompt.token_ids)
        except (UserError, TypeError) as error:
            raise InvalidArgument(str(error)) from error
        # With another finish reason, the frontend would consider the answer complete and not call a decode worker.
        computed = Chunks(len(prompt.token_ids)).last("length")
        if is_probe(request):
            yield computed
            return
        if context.is_stopped():
            yield {**computed, "finish_reason": "cancelled"}
            return
        options = prompt.options
        params = server.prefill(
            prompt.token_ids,
            salt=options.cache_salt,
            priority=options.priority,
            room=prompt.room,
            dp_rank=options.dp_rank,
        )
        yield {**computed, "disaggregated_params": params}

    def _check(self, token_ids: list[int]) -> None:
        limits = self._server.engine.core.executor.limits
        if not token_ids or len(token_ids) > limits.max_model_len:
            raise UserError(f"the prompt has {len(token_ids)} tokens, expected 1 to {limits.max_model_len}")
        if not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
            raise UserError(f"the prompt has token ids outside the vocabulary, which ends at {limits.vocab_size - 1}")

    async def is_quiescent(self) -> bool:
        """Return whether no prompt is being computed and no page waits to be fetched, or the engine has ended or failed."""
        if self._server is None or self._server.engine.error is not None:
            return True
        return not (self._server.engine.num_jobs or self._server.engine.buffers.num_kept)

    async def cleanup(self) -> None:
        """Shut down, after Dynamo has drained for up to `DYN_PREFILL_DRAIN_TIMEOUT_S`. Can be called after a failed start, and twice."""
        server = self._server
        if server is None:
            return
        self._server = None
        if self._loads is not None:
            self._loads.publisher = None
        self._events.close()
        if self._watchdog is not None:
            self._watchdog.stop()
        await asyncio.to_thread(server.shutdown)

    async def register_prometheus(self, metrics: Any) -> None:
        """Export the prefill engine's metrics with Dynamo's own."""
        registry = Registry(model_name=self._options.names[0])
        add_prefill_metrics(registry, [self._server.engine])
        add_background_metrics(registry)
        metrics.register_prometheus_expfmt_callback(lambda: exposition(registry.families).decode())

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Report each rank's used pages to this publisher."""
        self._loads.publisher = publisher

    async def health_check_payload(self) -> dict[str, Any]:
        """Return a probe with a prompt of one token, which is not computed."""
        return build_health_check_payload(0)

    def _die(self) -> None:
        _log.error("the prefill engine has failed: %s", self._server and self._server.engine.error)
        self._end_process()


class PrefillLoads(LoadReports, Attachment):
    """Reports each DP rank's used pages to Dynamo, before and after each step, and after a message to the engine.

    Pages that did not fit into the send buffers move there without a step once decode workers have fetched other pages. If that were not
    reported, routers would avoid a seemingly full worker forever.
    """

    def __init__(self, core: EngineCore):
        super().__init__(core.executor.limits.num_ranks)
        self.scheduled(core.scheduler)  # the core calls this only for plugins that it was created with

    def begin_step(self, now: float) -> None:
        """Report what changed without a step."""
        self.publish(self.scheduler.loads())

    def after_step(self, seconds: float, plan: StepPlan, updates: list[Update]) -> None:
        """Report what a step changed."""
        self.publish(self.scheduler.loads())


def _reached_at(address: str) -> str:
    """Describe where decode workers reach a prefill worker, with advice if workers on other hosts cannot reach it."""
    text = f"computes prompts for decode workers, which reach it at {address}"
    if not is_loopback(split_address(address)[0]):
        return text
    return f"{text}. Workers on other hosts cannot reach it; give --transfer-host, an address of this host, and a cluster key"
