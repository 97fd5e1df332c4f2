"""`PrefillEngine`: an engine's core in a thread of its own that computes prompts for others, and hands their pages over."""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dsjax.engine.contract.commands import DropParcels, from_int32s, int32s
from dsjax.engine.contract.executor import Executor
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.schedule.page_events import EventSink
from dsjax.engine.schedule.request import FinishReason, Request, RequestOptions, Status
from dsjax.engine.schedule.scheduler_config import AdmissionError, SchedulerConfig
from dsjax.engine.transfer.leases import Keeper, Leases, Sending
from dsjax.engine.transfer.page_transfer import (
    Ask,
    Cancel,
    Failed,
    Forget,
    Offer,
    ToDecode,
    ToPrefill,
    UnderWay,
)

if TYPE_CHECKING:  # it brings JAX in
    from dsjax.engine.elastic.generations import Generations
    from dsjax.engine.experts.expert_balancer import ExpertBalancer

Receive = Callable[[ToDecode], None]
Keepers = Callable[[Executor], Sequence[Keeper]]

_log = logging.getLogger(__name__)
_MOST_RECENT = 4096
_LOOK_SECONDS = 0.25
"""How often leases are looked at where nothing else happens, and decode is told what is under way; more often with a short timeout."""
_MOST_IDLE = 3
"""The engine waits after so many steps in a row that computed nothing: it can go on only when decode has taken pages. It takes more than
one, because a step may send pages and the next one use their room."""
_LOOK, _LEAVE = Forget(), Forget()
"""Put into the inbox, these very ones: processes have come or gone; who is to be told of transfers is there no more."""


@dataclass(eq=False)
class _Job:
    request: Request
    sending: Sending
    receive: Receive | None

    def tell(self, message: ToDecode) -> None:
        """Say something to who has asked, if anybody has yet."""
        if self.receive is not None:
            self.receive(message)


class PrefillCounts(NamedTuple):
    """What a prefill engine has done since its start: tokens of prompts computed, and seconds in which it computed."""

    tokens: int = 0
    seconds: float = 0.0


class PrefillEngine:
    """Computes what is asked of it, and keeps the parcels until they are pulled.

    `post` may be called from any thread; all else happens in the engine's own thread, which `start` begins.

    Args:
        timeout: seconds after which a parcel that nobody has pulled is dropped, and its transfer with it.
        publisher: is given the events of pages; None: there are none.
        keepers: gives which process keeps the parcels of each of an executor's ranks; None: all is this one's.

    Attributes:
        core: scheduler and executor. leases: of the parcels. error: why the thread has ended.
        step_started: when the step under way began, in seconds of `time.monotonic`; None between steps.
        counts: replaced after each step, so that any thread may read them.
        on_step: called after each step, in the engine's thread. on_death: called when the thread has ended by an error.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        *,
        timeout: float,
        async_scheduling: bool = True,
        publisher: EventSink | None = None,
        balancer: "ExpertBalancer | None" = None,
        keepers: Keepers | None = None,
    ):
        self._keepers = keepers or (lambda executor: [Keeper()] * executor.limits.num_ranks)
        self.leases = Leases(self._keepers(executor), timeout, self._offer, time.monotonic)
        self.core = EngineCore(
            executor,
            config,
            async_scheduling=async_scheduling,
            balancer=balancer,
            leases=self.leases,
            publisher=publisher,
        )
        executor.send_parcels(self.leases.ready)
        self.error: BaseException | None = None
        self.step_started: float | None = None
        self.counts = PrefillCounts()
        self.on_step: Callable[[EngineCore], None] = lambda core: None
        self.on_death: Callable[[], None] = lambda: None
        self._jobs: dict[str, _Job] = {}
        self._recent: OrderedDict[str, None] = (
            OrderedDict()
        )  # ended transfers: who has the prompt may ask after the end
        self._inbox: queue.SimpleQueue[tuple[ToPrefill | None, Receive | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._idle_steps = 0  # since something was computed, or said
        self._look_seconds = min(_LOOK_SECONDS, timeout / 4)
        self._told_at = 0.0  # when decode was told what is under way
        self._thread = threading.Thread(target=self._run, name="dsjax-prefill", daemon=True)

    def start(self) -> None:
        """Begin to take what is posted."""
        self._thread.start()

    def follow(self, generations: "Generations") -> None:
        """Go on on another mesh where a process of this one goes, or comes back. Transfers that are under way then fail."""
        self.core.generations = generations
        generations.wake = lambda: self._inbox.put((_LOOK, None))

    def post(self, message: ToPrefill, receive: Receive | None) -> None:
        """Somebody asks for something; what becomes of it is told to `receive`, from any thread.

        A transfer may be asked for twice: by whoever has its prompt (`receive` is None), and by its decode engine, in either order.
        """
        with self._lock:
            if not self._ended:
                self._inbox.put((message, receive))
                return
        if isinstance(message, Ask) and receive is not None:
            receive(Failed("", self._reason))

    def leave(self, receive: Receive) -> None:
        """Whoever asked with this `receive` is there no more: what it asked for is not wanted."""
        self._inbox.put((_LEAVE, receive))

    def shutdown(self, timeout: float = 10.0) -> None:
        """End the thread, and give back what the executor holds. Transfers that are under way fail."""
        self._inbox.put((None, lambda message: None))
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def num_jobs(self) -> int:
        """Transfers that have not ended."""
        return len(self._jobs)

    def running_requests(self) -> list[list[Request]]:
        """As of `Stepper`."""
        return [list(rank.running) for rank in self.core.scheduler.ranks]

    @property
    def _reason(self) -> str:
        return "the prefill engine has ended" + (f": {self.error}" if self.error else "")

    def _offer(self, offer: Offer) -> None:
        job = self._jobs.get(offer.transfer)
        if job is not None:
            job.tell(offer)

    # In the engine's thread.

    def turn(self, wait: bool = True) -> bool:
        """Take what was posted, and compute a step. False where the engine is to end. wait: for something to do, where there is nothing."""
        stuck = self._idle_steps >= _MOST_IDLE and not self.core.is_exchanging
        if not self._take(wait and (stuck or not self.core.has_unfinished)):
            return False
        for sending in self.leases.expire():
            self._fail(sending.transfer, "its pages were not pulled in time")
        generations = self.core.generations
        if generations is not None and generations.due:
            self._begin_anew(lambda: self.core.change(generations.regroup))
        try:
            gone = self.leases.take_gone()
            if gone:
                self.core.executor.launch(DropParcels(int32s(gone)))
            if self.core.has_unfinished:
                self._step()
            self._tell_under_way()
        except Exception as error:
            failure = error
            self._begin_anew(lambda: self.core.survive(failure))
        return True

    def _begin_anew(self, change: Callable[[], Any]) -> None:
        """Change to another executor. What was computed and kept on the one before is void.

        Raises:
            the error because of which it changes, where nothing goes on.
        """
        change()
        executor = self.core.executor
        self.leases.begin_anew(self._keepers(executor))
        executor.send_parcels(self.leases.ready)
        for name, job in list(self._jobs.items()):
            if job.request.status is Status.FINISHED:
                job.request.rank = -1  # its rank was the mesh's before, and held pages for it no more
            self._fail(name, "the mesh of the prefill side has changed")

    def _run(self) -> None:
        try:
            while self.turn():
                pass
            self.core.finish()
        except BaseException as error:
            self.error = error
            _log.exception("The prefill engine has failed; prompts are computed where they are decoded from now on.")
            self.on_death()
        with self._lock:
            self._ended = True
        for name in list(self._jobs):
            self._fail(name, self._reason, aborts=False)
        while not self._inbox.empty():
            message, receive = self._inbox.get()
            if isinstance(message, Ask) and receive is not None:
                receive(Failed(message.transfer, self._reason))
        if self.error is None:
            self.core.shutdown()

    def _take(self, wait: bool) -> bool:
        """Take what was posted; False where the engine is to end. wait: for the first, or until leases have to be looked at."""
        while True:
            try:
                message, receive = (
                    self._inbox.get(timeout=self._look_seconds if self._jobs or self.core.has_unfinished else None)
                    if wait
                    else self._inbox.get_nowait()
                )
            except queue.Empty:
                return True
            if message is None:
                return False
            self._enter(message, receive)
            self._idle_steps, wait = 0, False

    def _enter(self, message: ToPrefill, receive: Receive | None) -> None:
        if message is _LOOK:
            return
        if message is _LEAVE:
            for name in [name for name, job in self._jobs.items() if job.receive == receive]:
                self._end(name)
        elif isinstance(message, Ask):
            self._begin(message, receive)
        elif isinstance(message, Cancel):
            self._end(message.transfer)
        elif isinstance(message, Forget):
            self.core.flush_prefix_cache()
        else:
            self.leases.release(message.number)
            for name in [name for name, job in self._jobs.items() if self._is_done(job)]:
                self._forget(name)

    def _begin(self, ask: Ask, receive: Receive | None) -> None:
        job = self._jobs.get(ask.transfer)
        if job is not None and receive is not None:
            job.receive = receive
            for offer in self.leases.offers(job.sending):
                receive(offer)
        if job is not None or (receive is None and ask.transfer in self._recent):
            return
        tokens = [] if len(ask.tokens) % 4 else list(from_int32s(ask.tokens))
        objection = self._objection(ask, tokens)
        if objection:
            if receive is not None:
                receive(Failed(ask.transfer, objection))
            return
        sending = Sending(ask.transfer, ask.first, ask.end)
        params = SamplingParams(temperature=0, max_tokens=1)
        options = RequestOptions(ask.priority, ask.salt)
        request = Request(
            ask.transfer,
            tokens,
            len(tokens),
            params,
            max_tokens=1,
            seed=0,
            arrival_time=time.monotonic(),
            options=options,
            sending=sending,
        )
        self._jobs[ask.transfer] = _Job(request, sending, receive)
        try:
            self.core.add(request)
        except (AdmissionError, ValueError) as error:
            self._fail(ask.transfer, str(error))

    def _objection(self, ask: Ask, tokens: list[int]) -> str:
        """Why this cannot be computed: it may come from another process, and a device would take anything."""
        page_size, vocabulary = self.core.scheduler.config.page_size, self.core.executor.limits.vocab_size
        if not 0 <= ask.first < ask.end or len(tokens) != ask.end * page_size + 1:
            return f"pages {ask.first} to {ask.end} of {page_size} tokens are asked for with {len(tokens)} tokens"
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            return f"a token is outside the vocabulary, 0 to {vocabulary - 1}"
        return ""

    def _step(self) -> None:
        self.step_started = began = time.monotonic()
        try:
            updates = self.core.step()
        finally:
            self.step_started = None
        stats = self.core.stats()
        if stats is None:
            self._idle_steps += 1
        else:
            self._idle_steps, (tokens, seconds) = 0, self.counts
            self.counts = PrefillCounts(tokens + stats.num_prompt_tokens, seconds + time.monotonic() - began)
        for update in updates:
            if update.finish_reason is FinishReason.ERROR:
                self._fail(update.request.request_id, "its values are not finite")
        self.on_step(self.core)
        for job in self._jobs.values():
            if job.sending.complete and job.request.status is not Status.FINISHED:
                self.core.abort(job.request.request_id)  # its last token is decode's to compute

    def _tell_under_way(self) -> None:
        """Tell decode which transfers are queued, being computed or waiting to be sent: a long queue is not a dead engine."""
        now = time.monotonic()
        if now - self._told_at < self._look_seconds:
            return
        self._told_at = now
        waiting = {sending.transfer for rank in self.core.scheduler.ranks for sending, _, _ in rank.departures.waiting}
        under_way: dict[Receive, list[str]] = {}
        for name, job in self._jobs.items():
            if job.receive is not None and (not job.sending.complete or name in waiting):
                under_way.setdefault(job.receive, []).append(name)
        for receive, names in under_way.items():
            receive(UnderWay(names))

    def _is_done(self, job: _Job) -> bool:
        return (
            job.request.status is Status.FINISHED
            and not self.core.scheduler.rank_of(job.request).departures.has(job.sending)
            and not self.leases.kept_for(job.sending)
        )

    def _fail(self, name: str, reason: str, aborts: bool = True) -> None:
        job = self._jobs.get(name)
        if job is not None:
            self._end(name, aborts)
            job.tell(Failed(name, reason))

    def _end(self, name: str, aborts: bool = True) -> None:
        """Compute and keep nothing more of a transfer."""
        job = self._forget(name)
        if job is None:
            return
        if aborts:
            if job.request.status is not Status.FINISHED:
                self.core.abort(job.request.request_id)
            if job.request.rank >= 0:
                self.core.scheduler.rank_of(job.request).departures.forget(job.sending)
        self.leases.cancel(job.sending)

    def _forget(self, name: str) -> _Job | None:
        self._recent[name] = None
        if len(self._recent) > _MOST_RECENT:
            self._recent.popitem(last=False)
        return self._jobs.pop(name, None)
