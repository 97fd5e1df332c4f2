"""`PrefillService`: the engine plugin that computes prompts for decode engines and keeps their pages until they are pulled."""

import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dsjax.engine.contract.commands import Command, DropChunks, SendPages, from_int32s, int32s
from dsjax.engine.contract.executor import Executor
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.page_source import CommandTurn, PageSource, RankPages
from dsjax.engine.schedule.pages import extend_hashes
from dsjax.engine.schedule.request import FinishReason, Request, RequestOptions, Status, StepPlan
from dsjax.engine.schedule.scheduler import Scheduler, Update
from dsjax.engine.schedule.scheduler_config import AdmissionError, SchedulerConfig
from dsjax.engine.transfer.messages import (
    CHUNK_PAGES,
    CancelTransfer,
    ChunkPort,
    ChunkReady,
    FlushPages,
    PrefillRequest,
    ToDecode,
    ToPrefill,
    TransferFailed,
    TransfersUnderWay,
)
from dsjax.engine.transfer.send_buffers import ChunkOwner, PageSend, SendBuffers

_log = logging.getLogger(__name__)

Receive = Callable[[ToDecode], None]
ChunkOwners = Callable[[Executor], Sequence[ChunkOwner]]

_MAX_ENDED = 4096
_CHECK_SECONDS = 0.25
"""Seconds between checks of the buffers, and between reports to decode engines; fewer with a short timeout."""


class _SealedPages(NamedTuple):
    """Consecutive pages of a transfer that wait for a chunk."""

    send: PageSend
    first: int  # index of the first page in its prompt
    pages: list[int]


class PageSends(PageSource):
    """Holds pages from their sealing until a plan copies them into a chunk (KV transfer unit).

    sends: transfers in progress, by their request's id. waiting: for each rank, the sealed pages without a chunk, oldest first.
    """

    def __init__(self, buffers: SendBuffers, sends: Mapping[str, PageSend]):
        self._buffers, self._sends = buffers, sends
        self.waiting: list[deque[_SealedPages]] = []
        self._sent: list[list[tuple[int, int]]] = []  # (chunk, page)

    def bind(self, ranks: Sequence[RankPages]) -> None:
        """Start with these ranks and no waiting pages."""
        self.ranks = ranks
        self.waiting = [deque() for _ in ranks]
        self._sent = [[] for _ in ranks]

    def has_work(self) -> bool:
        """Whether pages wait and their rank has room for a chunk."""
        return any(waiting and self._buffers.room(rank) > 0 for rank, waiting in enumerate(self.waiting))

    def transfers_waiting(self) -> set[str]:
        """Names of the transfers whose pages wait."""
        return {sealed.send.transfer for waiting in self.waiting for sealed in waiting}

    def sealed(self, rank: int, request: Request) -> None:
        """Hold newly sealed pages of a request if its pages go to another engine."""
        send = self._sends.get(request.request_id)
        if send is None:
            return
        if send.cached is None:
            send.cached = request.num_computed_tokens
        end = min(request.num_sealed_pages, send.end)
        if send.next < end:
            pages = request.pages[send.next : end]
            self.ranks[rank].pool.hold(pages)
            waiting = self.waiting[rank]
            if waiting and waiting[-1].send is send:  # pages that wait share a chunk with the pages after them
                waiting[-1].pages.extend(pages)
            else:
                waiting.append(_SealedPages(send, send.next, pages))
            send.next = end
        if send.next == send.end and send.windows:
            page = request.window_pages[send.end - 1 - request.first_window]
            self.ranks[rank].pool.hold([page])
            self.waiting[rank].append(_SealedPages(send, send.end, [page]))
            send.next += 1

    def begin_rank(self, rank: int, now: float) -> None:
        """Assign waiting pages to chunks while there is room. The copy runs before the rest of this plan."""
        waiting, pool = self.waiting[rank], self.ranks[rank].pool
        while waiting and self._buffers.room(rank) > 0:
            send, first, pages = waiting.popleft()
            chunk, rest = pages[:CHUNK_PAGES], pages[CHUNK_PAGES:]
            if rest:
                waiting.appendleft(_SealedPages(send, first + len(chunk), rest))
            number = self._buffers.begin(rank, send, first, len(chunk))
            self._sent[rank] += [(number, page) for page in chunk]
            pool.release(chunk)

    def commands(self) -> Iterable[tuple[CommandTurn, Command]]:
        """Yield the command that copies the assigned pages into chunks."""
        sent, self._sent = self._sent, [[] for _ in self.ranks]
        if any(sent):
            yield CommandTurn.SEND, SendPages([int32s(itertools.chain.from_iterable(pairs)) for pairs in sent])

    def drop(self, send: PageSend) -> None:
        """Release the waiting pages of a transfer."""
        for rank, waiting in enumerate(self.waiting):
            for sealed in waiting:
                if sealed.send is send:
                    self.ranks[rank].pool.release(sealed.pages)
            self.waiting[rank] = deque(sealed for sealed in waiting if sealed.send is not send)


class PrefillCounts(NamedTuple):
    """Prompt tokens computed since the start, and the seconds spent on them."""

    tokens: int = 0
    seconds: float = 0.0


class PrefillService(Attachment):
    """Computes prompts for decode engines; runs in the engine's thread.

    A transfer begins with a `PrefillRequest`. Its sealed pages go into chunks, each chunk is offered to the decode engine, and the
    transfer ends when all chunks are pulled and released.

    Args:
        timeout: seconds after which an unpulled chunk is dropped together with its transfer.
        owners: returns, for each rank of an executor, the process that keeps its chunks; None: this process keeps all.

    Attributes:
        buffers: the chunks that wait to be pulled.
        counts: replaced after each step, so that any thread can read it.
        flush_core: flushes the core's prefix cache when a decode engine flushes its own.
        reason: sent for the transfers that fail when the engine ends.
    """

    source: PageSends

    def __init__(self, *, timeout: float, owners: ChunkOwners | None = None):
        self._owners = owners or (lambda executor: [ChunkOwner()] * executor.limits.num_ranks)
        self.buffers = SendBuffers(timeout, self._offer)
        self._sends: dict[str, PageSend] = {}
        self.source = PageSends(self.buffers, self._sends)
        self.counts = PrefillCounts()
        self.flush_core: Callable[[], Any] = lambda: None
        self.reason = "the prefill engine has ended"
        self._check_seconds = min(_CHECK_SECONDS, timeout / 4)
        self._executor: Executor | None = None
        # Ended transfers with the names of their last pages: the request for a prompt can arrive after its transfer has ended.
        self._ended: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._reported_at = 0.0  # time of the last report to decode engines

    @property
    def num_jobs(self) -> int:
        """Transfers that have not ended."""
        return len(self._sends)

    @property
    def look_seconds(self) -> float | None:
        """As in `Attachment`: set while there are transfers."""
        return self._check_seconds if self._sends else None

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Start with empty buffers for the chunks of this executor."""
        self._executor = executor
        self.buffers.reset(self._owners(executor))
        executor.extension(ChunkPort).send_chunks(self.buffers.ready)

    def scheduled(self, scheduler: Scheduler) -> None:
        """Fail the transfers of the previous scheduler."""
        super().scheduled(scheduler)
        for name in list(self._sends):
            self._end(name, "the mesh of the prefill side has changed")

    def begin_step(self, now: float) -> None:
        """Drop chunks that were not pulled in time, and tell decode engines which transfers are in progress."""
        for send in self.buffers.expire():
            self._end(send.transfer, "its pages were not pulled in time")
        dropped = self.buffers.take_dropped()
        if dropped:
            self._executor.launch(DropChunks(int32s(dropped)))
        self._report_unfinished(now)

    def after_step(self, seconds: float, plan: StepPlan, updates: list[Update]) -> None:
        """End requests whose pages are all handed over: the decode engine computes the last token."""
        tokens, seconds_before = self.counts
        self.counts = PrefillCounts(tokens + plan.num_prompt_tokens, seconds_before + seconds)
        ended = []
        for update in updates:
            if update.finish_reason is FinishReason.ERROR:
                self._end(update.request.request_id, "its values are not finite")
            elif update.finish_reason is not None:
                ended.append(update.request.request_id)
        for name, send in self._sends.items():
            if send.is_complete and send.request.status is not Status.FINISHED:
                self._abort(send)
                ended.append(name)
        self._end_completed(ended)  # decode may already have released the last chunk

    def close(self, failed: bool) -> None:
        """Fail every transfer."""
        for name in list(self._sends):
            self._end(name, self.reason, aborts=False)

    def enter(self, message: ToPrefill, receive: Receive | None) -> None:
        """Handle a message from a decode engine, or from this process (receive: None)."""
        if isinstance(message, PrefillRequest):
            self._begin(message, receive)
        elif isinstance(message, CancelTransfer):
            self._cancel(message, receive)
        elif isinstance(message, FlushPages):
            self.flush_core()
        else:
            send = self.buffers.transfer_of(message.number)
            if send is not None and _may_act_on(send, receive):
                self.buffers.release([message.number])
                self._end_completed(list(self._sends))

    def leave(self, receive: Receive) -> None:
        """Cancel all transfers of a lost decode engine."""
        for name in [name for name, send in self._sends.items() if send.receive == receive]:
            self._end(name)

    def _offer(self, send: PageSend, offer: ChunkReady) -> None:
        if self._sends.get(send.transfer) is send:
            send.notify(offer)

    def _begin(self, prefill: PrefillRequest, receive: Receive | None) -> None:
        """Start a transfer, or join the transfer of this name."""
        tokens = [] if len(prefill.tokens) % 4 else list(from_int32s(prefill.tokens))
        reason = self._why_invalid(prefill, tokens)
        if reason:
            self._refuse(prefill, receive, reason)
            return
        request = Request(
            prefill.transfer,
            tokens,
            len(tokens),
            SamplingParams(temperature=0, max_tokens=1),
            max_tokens=1,
            seed=0,
            arrival_time=time.monotonic(),
            options=RequestOptions(prefill.priority, prefill.salt, dp_rank=prefill.dp_rank),
        )
        names = extend_hashes(request, self.scheduler.config.page_size)
        if receive is not None and names[prefill.end - 1] != prefill.page:
            self._refuse(prefill, receive, "its tokens and its salt are not those of the pages that it names")
            return
        send = self._sends.get(prefill.transfer)
        if send is not None:
            self._join(send, prefill, names, receive)
            return
        if receive is None and (prefill.transfer, names[prefill.end - 1]) in self._ended:
            return
        windows = int(self.scheduler.config.windows_per_rank > 0)
        pages = prefill.first, prefill.first, prefill.end, windows
        send = self._sends[prefill.transfer] = PageSend(prefill.transfer, request, receive, *pages)
        try:
            self.scheduler.add(request)
        except (AdmissionError, ValueError) as error:
            self._end(prefill.transfer, str(error))

    def _join(self, send: PageSend, prefill: PrefillRequest, names: Sequence[bytes], receive: Receive | None) -> None:
        """Assign the transfer of this name to a decode engine, if no other engine has it and it covers the requested pages."""
        last = min(prefill.end, send.end) - 1
        if send.request.page_hashes[last] != names[last]:
            self._refuse(prefill, receive, "another prompt is under way under this name")
        elif receive is None:
            return  # its decode engine has already asked
        elif send.receive is not None and not _may_act_on(send, receive):
            self._refuse(prefill, receive, "another engine has asked for it under this name")
        elif not send.first <= prefill.first < prefill.end <= send.end or (send.windows and prefill.end < send.end):
            self._refuse(prefill, receive, f"pages {send.first} to {send.end} alone are under way under this name")
        else:
            send.receive = receive
            for buffer in self.buffers.buffers_of(send).values():
                if buffer.is_ready:
                    receive(buffer.offer)

    def _refuse(self, prefill: PrefillRequest, receive: Receive | None, reason: str) -> None:
        """Refuse a request and say why. The decode engine then computes the prompt itself."""
        _log.warning("The prompt of transfer %r is not computed here: %s.", prefill.transfer, reason)
        if receive is not None:
            receive(TransferFailed(prefill.transfer, reason))

    def _cancel(self, message: CancelTransfer, receive: Receive | None) -> None:
        """End a transfer for its owner: this process, its decode engine, or, before it has one, a sender that names its last page."""
        send = self._sends.get(message.transfer)
        if send is None:
            self._remember(message.transfer, message.page)
        elif _may_act_on(send, receive) or (send.receive is None and message.page == _last_page(send)):
            self._end(message.transfer)

    def _why_invalid(self, prefill: PrefillRequest, tokens: list[int]) -> str:
        """Return why a request cannot be computed, or "". Requests from other processes are not trusted."""
        page_size, vocabulary = self.scheduler.config.page_size, self._executor.limits.vocab_size
        if not 0 <= prefill.first < prefill.end or len(tokens) != prefill.end * page_size + 1:
            return (
                f"pages {prefill.first} to {prefill.end} of {page_size} tokens are asked for with {len(tokens)} tokens"
            )
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            return f"a token is outside the vocabulary, 0 to {vocabulary - 1}"
        return ""

    def _report_unfinished(self, now: float) -> None:
        """Tell decode engines which transfers are queued, computed or waiting, so that a long queue does not look like a dead engine."""
        if now - self._reported_at < self._check_seconds:
            return
        self._reported_at = now
        waiting = self.source.transfers_waiting()
        unfinished: dict[Receive, list[str]] = {}
        for name, send in self._sends.items():
            if send.receive is not None and (not send.is_complete or name in waiting):
                unfinished.setdefault(send.receive, []).append(name)
        for receive, names in unfinished.items():
            receive(TransfersUnderWay(names))

    def _end_completed(self, names: Iterable[str]) -> None:
        """Forget the named transfers whose pages are all computed, sent and released."""
        waiting = self.source.transfers_waiting()
        for name in names:
            send = self._sends.get(name)
            is_sent = send is not None and send.request.status is Status.FINISHED and name not in waiting
            if is_sent and not self.buffers.buffers_of(send):
                self._forget(name)

    def _end(self, name: str, reason: str = "", aborts: bool = True) -> None:
        """End a transfer and drop its chunks. reason: why it fails, sent to its decode engine; empty: send nothing."""
        send = self._forget(name)
        if send is None:
            return
        if aborts:
            self._abort(send)
            self.source.drop(send)
        self.buffers.release(self.buffers.buffers_of(send))
        if reason:
            send.notify(TransferFailed(name, reason))

    def _abort(self, send: PageSend) -> None:
        if send.request.status is not Status.FINISHED:
            self.scheduler.abort(send.transfer, time.monotonic())

    def _forget(self, name: str) -> PageSend | None:
        send = self._sends.pop(name, None)
        if send is not None:
            self._remember(name, _last_page(send))
        return send

    def _remember(self, name: str, page: bytes) -> None:
        self._ended[name, page] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)


def _may_act_on(send: PageSend, receive: Receive | None) -> bool:
    """Whether a receiver may act on a transfer: its decode engine, or this process (None)."""
    return receive is None or send.receive == receive


def _last_page(send: PageSend) -> bytes:
    return send.request.page_hashes[send.end - 1]
