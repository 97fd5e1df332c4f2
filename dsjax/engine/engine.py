"""`LLMEngine`: requests in, outputs out, one step at a time, in the caller's thread."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dsjax.engine.contract.executor import Executor, Progress
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.engine_thread import CoreDriver
from dsjax.engine.experts.eplb import EplbConfig
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.page_events import EventSink, EventSinks, SharedSink
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.routing import InstanceRouter
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.text.input_processor import InputProcessor, Prompt
from dsjax.engine.text.output_processor import OutputProcessor
from dsjax.engine.text.outputs import RequestOutput
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.engine.tiers.event_publisher import EventPublisher, KvEventsConfig, PageEventStream
from dsjax.engine.tiers.offload_tiers import OffloadAttachment
from dsjax.engine.transfer.page_transfer import TRANSFER_SECONDS, PrefillLink
from dsjax.engine.transfer.prefill_links import PrefillLinks
from dsjax.errors import UserError

if TYPE_CHECKING:  # it brings JAX in
    from dsjax.engine.elastic.generations import Generations

ENGINE_END = ": "
"""Between an engine's name and the name of what it compiles, where there are several engines."""


class LLMEngine:
    """The engine without threads: `LLM.generate` and the tests drive it; the server drives its parts.

    It has one core, or several decode engines' beside each other, each on devices of its own, which it takes in turn.

    ::

        engine.add_request("a", "def main(", SamplingParams(temperature=0))
        while engine.has_unfinished():
            for output in engine.step():
                ...

    Args:
        eos_token_ids: tokens that end a completion unless it ignores them.
        seed: requests without a seed draw theirs from it, in the order of their coming.
        async_scheduling: plan a step while the one before computes.
        eplb: how experts are moved after their load; None: they stay where they are.
        kv_events: where events of pages are published; None: nowhere.
        prefills, connect_prefill: as of `EngineCore`. local_prefill_tokens, transfer_timeout: as of `EngineArgs`.
        beside: of each further decode engine its executor, of as many DP ranks, and its links to the same prefill engines, in the same
            order.
        event_sink: is given them too, in the engine's thread.
        stream_interval: as of `EngineArgs`.

    Attributes:
        cores: their DP ranks are numbered through.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        scheduler_config: SchedulerConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        async_scheduling: bool = True,
        eplb: EplbConfig | None = None,
        kv_events: KvEventsConfig | None = None,
        prefills: Sequence[PrefillLink] | None = None,
        connect_prefill: Callable[[str], PrefillLink] | None = None,
        local_prefill_tokens: int = 1,
        transfer_timeout: float = TRANSFER_SECONDS,
        event_sink: EventSink | None = None,
        stream_interval: int = 1,
        beside: Sequence[tuple[Executor, Sequence[PrefillLink] | None]] = (),
    ):
        self.tokenizer = tokenizer
        each = executor.limits.num_ranks
        publisher = event_sink
        if kv_events is not None and kv_events.publishes:
            publisher = EventPublisher(kv_events, each * (1 + len(beside)))
            if event_sink is not None:
                publisher = EventSinks((publisher, event_sink))
        if publisher is not None and beside:
            publisher = SharedSink(publisher, 1 + len(beside))
        self.cores = []
        for index, (own, links) in enumerate([(executor, prefills), *beside]):
            config = replace(scheduler_config, pages_per_rank=own.limits.pages_per_rank) if index else scheduler_config
            parts = attachments_of(config, eplb=eplb, sink=publisher)
            if links is not None:
                parts.append(
                    PrefillLinks(links, connect_prefill, local_tokens=local_prefill_tokens, timeout=transfer_timeout)
                )
            core = EngineCore(
                own, config, async_scheduling=async_scheduling, attachments=parts, first_rank=index * each
            )
            self.cores.append(core)
        self._drivers = [CoreDriver(core, self._enter_change) for core in self.cores]
        self._router: InstanceRouter | None = None
        if beside:
            self._router = InstanceRouter([core.scheduler.ranks for core in self.cores])
            scheduler_config = min((core.scheduler.config for core in self.cores), key=lambda own: own.pages_per_rank)
        self.prefills = prefills or ()
        self.inputs = InputProcessor(tokenizer, scheduler_config, executor.limits.vocab_size, eos_token_ids, seed)
        self.outputs = OutputProcessor(tokenizer, stream_interval)
        self._aborted: list[RequestOutput] = []
        self._entered: list[Update] = []  # by some cores, while others are still stepped

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        session: str | None = None,
        dp_rank: int | None = None,
        prefill: Mapping[str, str] | None = None,
    ) -> None:
        """Queue a request.

        priority: lower runs first, with the scheduling policy `priority`. cache_salt: pages are shared only with requests
        of the same salt. session: requests of one session go to one DP rank. dp_rank: the DP rank that it runs on, if the mesh has it.
        prefill: what `PrefillServer.prefill` gave where another process computes the prompt.

        Raises:
            UserError: something in the request cannot be; nothing of it stays behind.
            ValueError: the id is taken by an unfinished request.
        """
        prepared = self.inputs.prepare(
            request_id,
            prompt,
            params or SamplingParams(),
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            session=session,
            dp_rank=dp_rank,
            prefill=prefill,
        )
        self.outputs.add(prepared)
        for request in prepared.completions:  # one by one: each counts where the next one is sent
            [(index, placed)] = self.place([request])
            self.cores[index].add(*placed)

    @property
    def core(self) -> EngineCore:
        """The only core, or of several the first."""
        return self.cores[0]

    @property
    def num_ranks(self) -> int:
        """DP ranks of all cores."""
        return sum(len(core.scheduler.ranks) for core in self.cores)

    def place(self, requests: Sequence[Request]) -> Iterable[tuple[int, Sequence[Request]]]:
        """Which core each of these is for: (core, requests) of those that have any. They must then be given to it, in this order."""
        if self._router is None:
            return [(0, requests)]
        placed: dict[int, list[Request]] = {}
        for request in requests:
            placed.setdefault(self._router.place(request), []).append(request)
        return placed.items()

    def abort(self, request_id: str) -> None:
        """End a request; the next `step` gives its last output. No-op if it has ended."""
        ids = self.outputs.completion_ids(request_id)
        updates = [core.abort(completion_id) for core in self.cores for completion_id in ids]
        outputs, _ = self.outputs.process(update for update in updates if update)
        self._aborted += outputs

    def step(self) -> list[RequestOutput]:
        """Compute one step and give the outputs of the requests it changed, as their `output_kind` says."""
        for driver in self._drivers:  # an interrupt while one waits loses nothing of what others have entered
            self._entered += driver.step()
        updates, self._entered = self._entered, []
        outputs, to_abort = self.outputs.process(updates)
        self._end(to_abort)
        aborted, self._aborted = self._aborted, []
        return aborted + outputs

    def has_unfinished(self) -> bool:
        """Whether any request waits, runs, or has an output to give."""
        return any(core.has_unfinished for core in self.cores) or bool(self._aborted or self._entered)

    def _enter_change(self) -> None:
        self.inputs.change(self.core.scheduler.config)

    def _end(self, completion_ids: Sequence[str]) -> None:
        for core in self.cores:
            for completion_id in completion_ids:
                core.abort(completion_id)

    def scale(self, mesh: str) -> None:
        """Go on on another mesh of the devices that there are, up or down; requests go on too.

        Raises:
            UserError, MeshError: the mesh cannot be; everything is as it was.
        """
        generations = self._generations()
        wanted = generations.ask(mesh)
        outputs, to_abort = self.outputs.process(self._drivers[0].change(lambda: generations.to(wanted)))
        self._end(to_abort)
        self._aborted += outputs
        if generations.failure is not None:
            raise generations.failure

    def _generations(self) -> "Generations":
        if self.prefills:
            raise UserError("the meshes of an engine with --prefill-mesh and --decode-mesh cannot change while it runs")
        if self.core.generations is None:
            raise UserError("this engine was given its executor, and cannot make another one for another mesh")
        return self.core.generations

    @property
    def prefill_engines(self) -> "list[PrefillEngine]":
        """Those of this process that compute prompts for this engine."""
        return [link.engine for link in self.prefills]

    def flush_prefix_cache(self) -> bool:
        """Forget every page that is cached; True, as nothing can prevent it."""
        flushed = [core.flush_prefix_cache() for core in self.cores]
        return all(flushed)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every shape before the first request. Of several engines a label begins with the engine's name, up to `ENGINE_END`."""
        several = len(self.cores) + len(self.prefills) > 1

        def of(kind: str, index: int) -> Progress | None:
            if progress is None or not several:
                return progress
            return lambda done, total, label: progress(done, total, f"{kind} engine {index}{ENGINE_END}{label}")

        for index, core in enumerate(self.cores):
            core.executor.warm_up(of("decode", index))
        for index, link in enumerate(self.prefills):
            link.warm_up(of("prefill", index))
        if self.core.generations is not None:
            self.core.generations.has_warmed_up()

    def shutdown(self) -> None:
        """Give back what the executors hold."""
        for core in self.cores:
            core.shutdown()


def attachments_of(
    config: SchedulerConfig, *, eplb: EplbConfig | None = None, sink: EventSink | None = None
) -> list[Attachment]:
    """The parts of a core that its configuration and these options ask for.

    eplb: how experts are moved after their load; None: they stay where they are. sink: is told of pages; None: nobody wants to know.
    """
    parts: list[Attachment] = []
    if config.host_pages_per_rank or config.disk_pages:
        parts.append(OffloadAttachment(config))
    if sink is not None:
        parts.append(PageEventStream(sink))
    if eplb is not None:
        from dsjax.engine.experts.expert_balancer import ExpertBalancer  # loads NumPy and SciPy

        parts.append(ExpertBalancer(eplb))
    return parts
