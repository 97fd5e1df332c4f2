"""`DsjaxEngine`: dsjax as an `LLMEngine`, Dynamo's backend contract (`dynamo/common/backend`)."""

import asyncio
import dataclasses
import logging
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from dynamo.common.backend import EngineConfig, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.llm.exceptions import Cancelled, EngineShutdown, InvalidArgument, Unknown
from rich.console import Console

from dsjax.background import contained
from dsjax.dynamo.arguments import parse
from dsjax.dynamo.prefill import DsjaxPrefillEngine
from dsjax.dynamo.translation import Chunk, Chunks, CompletionError, ThinkingTokens, translate
from dsjax.dynamo.worker import LoadReports, Options, Worker, registration
from dsjax.engine.engine_thread import AsyncEngine
from dsjax.engine.request_streams import OutputStream
from dsjax.engine.stats import EngineObserver, StepStats
from dsjax.engine.text.outputs import EngineClosingError, EngineDeadError
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.errors import UserError
from dsjax.llm import LLM
from dsjax.serve.command import metrics_of
from dsjax.serve.message_parser import CLOSE, OPEN
from dsjax.serve.server import tune_interpreter
from dsjax.serve.startup_screen import show_facts, warm_up_bar
from dsjax.serve.watchdog import Watchdog

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
"""Seconds between two checks of the running requests during a shutdown."""
_IDLE_SECONDS = 1.0
"""Seconds between two load queries while no step reports loads, until no rank holds pages."""


class DsjaxEngine(Worker):
    """One engine as one Dynamo worker, with all DP ranks of its mesh, in aggregated or decode mode."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Worker, WorkerConfig]:
        """Return the engine for a command line: a `DsjaxEngine`, or a `DsjaxPrefillEngine` in prefill mode. Errors as in `parse`."""
        prepared = parse(argv)
        return make_engine(prepared.options), prepared.worker

    def __init__(self, options: Options):
        super().__init__(options)
        self._engine: AsyncEngine | None = None
        self._llm: LLM | None = None
        self._metrics: Any = None
        self._thinking: ThinkingTokens | None = None
        self._loads: LoadPublisher | None = None
        # Context id → stream → context. A request that returns after a migration has its old id, so an id may have several streams.
        self._streams: dict[str, dict[OutputStream, Any]] = defaultdict(dict)
        self._count = 0

    def _begin(self) -> EngineConfig:
        facts = self._llm.facts
        self._metrics = metrics_of(self._llm, self._options.names[0])
        self._engine = engine = AsyncEngine(self._llm.parts)
        self._loads = LoadPublisher(facts.dp_ranks, engine)
        engine.observers.extend([self._metrics, self._loads])
        engine.on_change.append(
            lambda new: self._metrics.on_change(new.facts.dp_ranks, new.facts.physical_experts_per_device)
        )
        engine.on_death = self._end_process
        tune_interpreter()
        engine.start()
        self._loads.start()
        self._watchdog = Watchdog.over(engine, self._options.step_timeout)
        return registration(self._options, self._llm.executor.limits, self._llm.parts.inputs.config, facts)

    def _load(self) -> None:
        console = Console()
        options = dataclasses.asdict(self._args)
        self._llm = LLM(**options, group=self._group, show_progress=True, event_sink=self._events)
        show_facts(console, self._llm.facts)
        with warm_up_bar(console) as progress:
            self._llm.parts.warm_up(progress)
        self._thinking = thinking_tokens(self._llm.tokenizer)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[Chunk]:
        """Answer one request, chunk by chunk."""
        stream, chunks = await self._submit(request, context)
        streams = self._streams[context.id()]
        streams[stream] = context
        stopped = self._cancel_when_stopped(context, stream)
        try:
            if context.is_stopped():
                raise Cancelled
            while outputs := await stream.ready():
                for _, output in outputs:
                    for chunk in chunks.of(output):
                        yield chunk
        except Cancelled:
            yield chunks.last("cancelled")
        except CompletionError as error:
            raise Unknown(str(error)) from error
        except (EngineDeadError, EngineClosingError) as error:
            raise EngineShutdown(str(error)) from error  # the frontend may go on with another worker
        finally:
            if stopped is not None:
                stopped.cancel()
            stream.close()
            del streams[stream]
            if not streams:
                self._streams.pop(context.id(), None)

    async def _submit(self, request: dict[str, Any], context: Any) -> tuple[OutputStream, Chunks]:
        engine = self._engine
        if engine is None:
            raise EngineShutdown("this worker ends")
        try:
            prompt = translate(request, self._thinking)
            self._count += 1
            stream = await engine.submit(
                f"{context.id()}~{self._count}",
                [{"prompt_token_ids": prompt.token_ids}],
                prompt.params,
                prompt.options,
            )
        except (UserError, TypeError) as error:
            raise InvalidArgument(str(error)) from error
        except (EngineDeadError, EngineClosingError) as error:
            raise EngineShutdown(str(error)) from error
        return stream, Chunks(len(prompt.token_ids))

    def _cancel_when_stopped(self, context: Any, stream: OutputStream) -> asyncio.Future | None:
        """Cancel a decode worker's request as soon as its client has gone.

        On decode workers, Dynamo calls `abort` only after the first token, so that no KV arrives in freed memory. That cannot happen here.
        """
        if self._args.disaggregation_mode != "decode":
            return None

        def cancel(stopped: asyncio.Future) -> None:
            if not stopped.cancelled():  # `generate` cancels the future when the answer has ended
                stream.fail(Cancelled("the request was cancelled"))

        stopped: asyncio.Future = context.async_killed_or_stopped()
        stopped.add_done_callback(cancel)
        return stopped

    async def abort(self, context: Any) -> None:
        """Cancel a request whose client has gone. Its pages are free before the next step.

        If the request has returned after a migration, the new one continues.
        """
        for stream, stream_context in list(self._streams.get(context.id(), {}).items()):
            if stream_context.is_stopped() or stream_context.is_killed():
                stream.fail(Cancelled("the request was cancelled"))

    async def is_quiescent(self) -> bool:
        """Return whether Dynamo has taken the last chunk of every answer. The engine may finish a request earlier."""
        return not self._streams and (self._engine is None or not self._engine.num_unfinished)

    async def cleanup(self) -> None:
        """Let requests finish for `shutdown_timeout` seconds, then shut down the engine. May follow a failed start, and be called twice."""
        engine = self._engine
        if engine is None:
            return
        self._engine = None
        # A change of the mesh would only delay the shutdown: requests do not wait for a larger mesh, and no process may leave the group.
        engine.wait_for_no_mesh()
        if self._group is not None:
            self._group.needs_all = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.shutdown_timeout
        while (engine.num_unfinished or self._streams) and loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        self._loads.stop()
        self._events.close()
        await engine.shutdown()
        if self._watchdog is not None:
            self._watchdog.stop()

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Report each rank's pages to this publisher."""
        self._loads.publisher = publisher

    async def register_prometheus(self, metrics: Any) -> None:
        """Export the metrics of `dsjax serve` along with Dynamo's own."""
        metrics.register_prometheus_expfmt_callback(lambda: self._metrics.render().decode())

    async def health_check_payload(self) -> dict[str, Any]:
        """Return a request for one token after a prompt of one token."""
        tokenizer = self._llm.tokenizer
        return build_health_check_payload((tokenizer and tokenizer.bos_id) or 0)


class LoadPublisher(LoadReports, EngineObserver):
    """Reports to Dynamo how many pages each DP rank's requests hold.

    Each step reports. If steps stop while pages are held, by a request that is then aborted, the publisher queries the engine once a
    second until no pages are held. Otherwise a router would avoid the seemingly full worker forever.
    """

    def __init__(self, num_ranks: int, engine: AsyncEngine):
        super().__init__(num_ranks)
        self._engine = engine
        self._task: asyncio.Task | None = None

    def start(self) -> None:
        """Start to query the loads while no step reports them."""
        self._task = asyncio.get_running_loop().create_task(self._query_loads())

    def stop(self) -> None:
        """Stop reporting."""
        self.publisher = None
        if self._task is not None:
            self._task.cancel()

    def on_step(self, stats: StepStats) -> None:
        """Report the loads after a step."""
        self.publish(stats.ranks)

    async def _query_loads(self) -> None:
        while True:
            await asyncio.sleep(_IDLE_SECONDS)
            if self.holds_pages and not self._engine.num_unfinished:
                with contained("load reports"):
                    try:
                        self.publish(await self._engine.call(lambda core: core.loads()))
                    except (EngineDeadError, EngineClosingError):
                        return


def thinking_tokens(tokenizer: Tokenizer | None) -> ThinkingTokens | None:
    """Return the model's reasoning tokens; None if the end marker is not a single token."""
    end = tokenizer and tokenizer.token_id(CLOSE)
    return None if end is None else ThinkingTokens(tokenizer.token_id(OPEN), end)


def make_engine(options: Options) -> Worker:
    """Return the engine of a worker, not started yet."""
    kind = DsjaxPrefillEngine if options.args.disaggregation_mode == "prefill" else DsjaxEngine
    return kind(options)
