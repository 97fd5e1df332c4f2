"""`Worker`: base class of dsjax's Dynamo workers, and their registration and load reports."""

import asyncio
import os
import signal
import sys
import threading
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.llm.exceptions import InvalidArgument

from dsjax.background import contained
from dsjax.dynamo.kv_events import KvEvents
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.elastic.joining import host_options, join_group
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.facts import EngineFacts
from dsjax.hosts.group import HostGroup
from dsjax.serve.watchdog import Watchdog

_FLUSH_SECONDS = 1.0
"""Time for answers to report an engine failure before the process ends."""


@dataclass(frozen=True)
class Options:
    """Options of a worker."""

    args: EngineArgs  # the engine's options
    names: tuple[str, ...]  # model names for clients; the first is the main one
    model: str  # directory or Hugging Face repository from which frontends load the tokenizer and the template
    step_timeout: float  # seconds after which a step counts as hung and the process ends; 0: never
    shutdown_timeout: float  # seconds for running requests to finish when the worker ends
    bootstrap: bool = False  # for a prefill worker: whether frontends send a request to both sides at once


def registration(
    options: Options, limits: ExecutorLimits, config: SchedulerConfig, facts: EngineFacts | None = None
) -> EngineConfig:
    """Return an engine's registration with Dynamo. All its DP ranks belong to one worker; page 0 of each is never allocated.

    facts: of the loaded model; they name the mesh that generates tokens even if another mesh computes prompts.
    """
    return EngineConfig(
        model=options.model,
        served_model_name=options.names[0],
        model_aliases=list(options.names[1:]),
        runtime_data={"engine": "dsjax", "mesh": options.args.mesh if facts is None else facts.mesh},
        llm=LlmRegistration(
            context_length=config.max_request_len,
            kv_cache_block_size=limits.page_size,
            total_kv_blocks=config.pages_per_rank - 1,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            data_parallel_size=limits.num_ranks,
            data_parallel_start_rank=0,
        ),
    )


class Worker(LLMEngine):
    """Base class of workers. A subclass loads its engine in `_load`, in a thread, and then starts to serve in `_begin`.

    Attributes:
        mistake: the user error that made the start fail, if any.
    """

    def __init__(self, options: Options):
        self._options = options
        self._args = options.args
        self._events = KvEvents()
        self._group: HostGroup | None = None
        self._watchdog: Watchdog | None = None
        self._num_ranks = 0
        self._starting, self._signalled = True, False
        self.mistake: ValueError | None = None

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model, compile every shape, and return this worker's registration. Report a user error in one line."""
        try:
            await asyncio.to_thread(self._join_and_load)
            config = self._begin()
            self._num_ranks = config.llm.data_parallel_size
            return config
        except ValueError as error:  # a `UserError` or a `MeshError`: Dynamo would print a traceback
            self.mistake = error
            raise InvalidArgument(str(error)) from error
        finally:
            self._starting = False

    def handle_signals(self) -> None:
        """End the process at SIGTERM or SIGINT during startup. Call in the main thread, before Dynamo sets its own handlers.

        Dynamo would wait for the start, and after `DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT` call C's `exit`, which destroys objects that
        XLA's threads use, so a running compilation could end in a segmentation fault. Dynamo's handlers call the previous handlers, so
        both receive each signal; after startup, only Dynamo's act.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._starting:
            return
        if self._signalled:  # a second signal does not wait for the other processes
            os._exit(0)
        self._signalled = True
        try:
            if sys.stdout.isatty():
                os.write(1, b"\x1b[?25h")  # a progress bar has hidden the cursor
            name = signal.Signals(number).name
            os.write(2, f"{name} before this worker was ready: it ends now, and has served nothing\n".encode())
            if self._group is not None:
                self._group.leave()
        finally:  # whatever the interrupted thread was doing
            os._exit(0)

    def _join_and_load(self) -> None:
        self._group = join_group(self._args, host_options(self._args))
        self._load()

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return a source of page events for each DP rank; none without prefix caching."""
        if not self._args.enable_prefix_caching:
            return []
        return [
            PushSource(on_ready=lambda publisher, rank=rank: self._events.connect(rank, publisher), dp_rank=rank)
            for rank in self.component_metrics_dp_ranks()
        ]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return all ranks of the initial mesh."""
        return list(range(self._num_ranks))

    @abstractmethod
    def _load(self) -> None:
        """Load the model and compile every shape. Runs in a thread."""

    @abstractmethod
    def _begin(self) -> EngineConfig:
        """Start to serve, and return this worker's registration."""

    def _end_process(self) -> None:
        """End the process after an engine failure, so that the frontend drops this worker and Kubernetes starts another."""
        if self._group is not None:
            self._group.leave("its engine has failed")
        timer = threading.Timer(_FLUSH_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()


_GONE = (0,)
"""Last report of a removed rank in `LoadReports`; the rank counts as holding no pages."""


class LoadReports:
    """Reports each DP rank's used pages to Dynamo when they have changed.

    Attributes:
        publisher: Dynamo's `SnapshotPublisher`; None: no reports.
    """

    def __init__(self, num_ranks: int):
        self.publisher: Any = None
        self._published: list[tuple | None] = [None] * num_ranks

    @property
    def holds_pages(self) -> bool:
        """Whether any rank held pages in its last report."""
        return any(published and published[0] for published in self._published)

    def publish(self, loads: Sequence[RankLoad]) -> None:
        """Report the changes of the registered ranks.

        loads: of all ranks of the mesh. Ranks that a smaller mesh no longer has are reported as full, so that routers choose others.
        """
        publisher = self.publisher
        if publisher is None:
            return
        for rank in range(len(loads), len(self._published) if loads else 0):
            if self._published[rank] != _GONE:
                with contained("load reports", "Dynamo's router goes by the load that it was told last."):
                    publisher.publish(rank, full_snapshot(rank, loads[0].usable_pages))
                    self._published[rank] = _GONE
        for load in loads[: len(self._published)]:
            published = (load.used_pages, load.usable_pages, load.queried)
            if published != self._published[load.rank]:
                with contained("load reports", "Dynamo's router goes by the load that it was told last."):
                    publisher.publish(load.rank, snapshot(load))
                    self._published[load.rank] = published


def full_snapshot(rank: int, pages: int) -> ComponentSnapshot:
    """Return Dynamo's snapshot of a rank without free pages."""
    return ComponentSnapshot(kv_used_blocks=pages, kv_total_blocks=pages, gpu_cache_usage=1.0, dp_rank=rank)


def snapshot(load: RankLoad) -> ComponentSnapshot:
    """Return Dynamo's snapshot of a rank's load. The hit rate is over the tokens of all prompts so far; None before the first."""
    return ComponentSnapshot(
        kv_used_blocks=load.used_pages,
        kv_total_blocks=load.usable_pages,
        gpu_cache_usage=load.used_pages / load.usable_pages if load.usable_pages else 0.0,
        dp_rank=load.rank,
        kv_cache_hit_rate=sum(load.hits.values()) / load.queried if load.queried else None,
    )
