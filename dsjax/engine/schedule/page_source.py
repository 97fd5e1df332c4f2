"""`PageSource`: the scheduler's KV connector to KV cache pages outside the devices. Plain Python.

Sources are host memory, a disk and a prefill engine. docs/cache-tiers.md shows how to add one.
"""

from __future__ import annotations

import enum
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from dsjax.engine.contract.commands import Command
from dsjax.engine.schedule.landing_area import LandingArea, PageLoad
from dsjax.errors import UserError

if TYPE_CHECKING:
    from dsjax.engine.schedule.pages import PagePool
    from dsjax.engine.schedule.request import Request


class CommandTurn(enum.IntEnum):
    """Order in which page commands run before a step."""

    DELETE = 0  # first, so that a page stored again under the same name is not deleted
    PLACE = 1  # the scheduler's own: write the data staged in the previous step to pages
    STAGE = 2  # the scheduler's own: send pages to the devices; before the stores, which may reuse their slots
    REQUEST = 3  # request pages, which land later
    SEND = 4  # send pages to another engine
    STORE = 5  # store evicted pages outside the devices


class Lookup(enum.Enum):
    """A source's answer for the pages that a request lacks."""

    ABSENT = "absent"  # it has none of them, or none that would help now
    WAIT = "wait"  # they are being loaded: the request is skipped until the source wakes it
    LATER = "later"  # it has them, but no room to load them now: the request is tried again at the next step
    FULL = "full"  # the rank has no room for the request besides the waiting ones: no request behind it starts either


class RankPages(NamedTuple):
    """The pages of one DP rank, as passed to a source."""

    pool: PagePool
    landing: LandingArea


class PageSource:
    """KV connector: a source of KV cache pages outside the devices. All methods are called in the engine's thread.

    A page has a name (`extend_hashes`): equal names mean equal values. A source may keep evicted pages (`evict`), load pages that a
    request lacks (`lookup`), or take pages as soon as they are computed (`sealed`). It requests work on the devices as commands that run
    before the next step (`commands`). By default a method does nothing.

    Attributes:
        slots: slots per rank, from which `FetchPages` sends pages by number; 0: the source's pages must land first. Slots of window pages
            are numbered from `WINDOW_NUMBERS`.
        keeps_windows: whether window pages may be offered to `evict` and wanted from this source.
        tiers: names of the tiers whose pages count as cached, slowest first. slot_tier: the tier with the slots.
        ranks: the pages of each DP rank; set by `bind`.
    """

    slots: int = 0
    keeps_windows: bool = False
    tiers: Sequence[str] = ()
    slot_tier: str = ""
    ranks: Sequence[RankPages] = ()

    def bind(self, ranks: Sequence[RankPages]) -> None:
        """Start with the pages of these ranks. After a change of the mesh, no earlier page is left."""
        self.ranks = ranks

    # Before a step is planned.

    def begin_step(self, now: float) -> None:
        """Called before a step is planned, for all ranks."""

    def begin_rank(self, rank: int, now: float) -> None:
        """Called before one rank's step is planned. Pages loaded for the previous step are in the cache by now."""

    def has_work(self) -> bool:
        """Whether a step must be planned without unfinished requests."""
        return False

    # While requests are admitted.

    def has(self, rank: int, name: bytes) -> bool:
        """Whether this source can provide a page, now or after a wait. The router counts it as cached."""
        return self.can_load(rank, name)

    def awaits(self, rank: int, request: Request, name: bytes) -> bool:
        """Whether a page is already being loaded. The request then also waits for it until the source wakes it."""
        return False

    def can_load(self, rank: int, name: bytes) -> bool:
        """Whether a page is in one of the source's slots and can be sent to the device now."""
        return False

    def load(self, rank: int, name: bytes) -> PageLoad:
        """Return the load of a page for which `can_load` is true. The source keeps the page."""
        raise NotImplementedError(f"{type(self).__name__} has slots and does not say how they are loaded")

    def prefetch(self, rank: int, request: Request, names: Sequence[bytes], ready: bool, now: float) -> Lookup:
        """Start loading pages for which `has` is true, from the first of `names`. ready: that one can be loaded now; await no other.

        In a model with window pages, the last name is that of a window page (`pool.num_windows` of `ranks`).
        """
        return Lookup.ABSENT

    def lookup(
        self, rank: int, request: Request, names: Sequence[bytes], cached: Sequence[int], free_slots: int, now: float
    ) -> Lookup:
        """Request that missing pages after the `cached` ones are computed elsewhere.

        names: of all pages that the request may read, cached ones first; with window pages, the last page's window page follows.
            free_slots: number of requests that the rank may still start.
        """
        return Lookup.ABSENT

    # When something happens to pages or requests.

    def evict(self, rank: int, page: int, name: bytes) -> None:
        """Called when a cached page is evicted. Its values stay valid until the commands before the next step are done."""

    def sealed(self, rank: int, request: Request) -> None:
        """Called when a request starts or more of its pages are full and computed (`Request.num_sealed_pages`)."""

    def landed(self, rank: int, number: int, ok: bool, now: float) -> None:
        """Called when an expected page has landed (`ok`) or could not be fetched."""

    def loaded(self, rank: int, name: bytes) -> None:
        """Called when a landed page of this source moves to the device."""

    def load_failed(self, rank: int, name: bytes, number: int) -> None:
        """Called when an expected page of this source could not be fetched."""

    def added(self, request: Request) -> None:
        """Called when a request arrives."""

    def release(self, rank: int, request: Request) -> None:
        """Called when a request stops waiting: it starts, or it was removed."""

    def preempted(self, request: Request) -> None:
        """Called when a running request is preempted."""

    def ended(self, request: Request) -> None:
        """Called when a request has ended; drop its state."""

    def num_computed(self, request: Request, loaded: Mapping[str, int]) -> int:
        """Return how many loaded pages were computed for this request and are thus no cache hits. loaded: pages by tier."""
        return 0

    # When pages are invalidated.

    def forget(self, rank: int, names: Sequence[bytes]) -> None:
        """Stop offering these pages."""

    def cancel(self, rank: int) -> None:
        """Cancel the loads for a rank, so that no request finds pages that arrive later."""

    def clear(self, rank: int) -> None:
        """Delete all pages of a rank."""

    def invalidate(self, rank: int) -> None:
        """Drop state that depends on a withdrawn plan, since any of its commands may or may not have run."""

    def withdrawn(self) -> None:
        """Called when the last `commands` may not have run. `invalidate` follows for each rank."""

    # For the executor and the metrics.

    def commands(self) -> Iterable[tuple[CommandTurn, Command]]:
        """Return and clear the commands to run before the step just planned."""
        return ()

    def counts(self, rank: int) -> Mapping[str, Any]:
        """Return the source's counters and sizes for one rank, by tier."""
        return {}


def _each(method: str, combine: Callable[[Iterator[Any]], Any] = list) -> Callable[..., Any]:
    """Return a chain method that combines the results of the sources' method, called lazily and in order."""

    def call(self: SourceChain, *arguments: Any) -> Any:
        return combine(getattr(source, method)(*arguments) for source in self.sources)

    return call


def _first(answers: Iterator[Lookup]) -> Lookup:
    return next((answer for answer in answers if answer is not Lookup.ABSENT), Lookup.ABSENT)


def _join(lists: Iterator[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


class SourceChain(PageSource):
    """Several sources as one. The first source that has a page provides it."""

    def __init__(self, sources: Sequence[PageSource]):
        self.sources = list(sources)
        self.tiers = [tier for source in self.sources for tier in source.tiers]

    begin_step, begin_rank, evict, sealed, landed = map(
        _each, ("begin_step", "begin_rank", "evict", "sealed", "landed")
    )
    added, release, preempted, ended = map(_each, ("added", "release", "preempted", "ended"))
    forget, cancel, clear = map(_each, ("forget", "cancel", "clear"))
    invalidate, withdrawn = _each("invalidate"), _each("withdrawn")
    has_work, has = _each("has_work", any), _each("has", any)
    awaits, can_load = _each("awaits", any), _each("can_load", any)
    prefetch, lookup = _each("prefetch", _first), _each("lookup", _first)
    commands, num_computed = _each("commands", _join), _each("num_computed", sum)

    def bind(self, ranks: Sequence[RankPages]) -> None:
        """Bind every source to these ranks."""
        self.ranks = ranks
        for source in self.sources:
            source.bind(ranks)

    @property
    def slots(self) -> int:
        """Slots of the only source with slots. Raises `ValueError` for two, since a slot number would be ambiguous."""
        with_slots = [source for source in self.sources if source.slots]
        if len(with_slots) > 1:
            raise ValueError(f"found {len(with_slots)} page sources with slots, expected at most one")
        return with_slots[0].slots if with_slots else 0

    @property
    def slot_tier(self) -> str:
        """Tier of the source with slots."""
        return next((source.slot_tier for source in self.sources if source.slots), "")

    def load(self, rank: int, name: bytes) -> PageLoad:
        """Return the load from the first source that has the page."""
        return next(source for source in self.sources if source.can_load(rank, name)).load(rank, name)

    def counts(self, rank: int) -> Mapping[str, Any]:
        """Return the counts of all sources."""
        return {tier: count for source in self.sources for tier, count in source.counts(rank).items()}


def import_page_source(name: str) -> ModuleType:
    """Import the module of `--page-source`: the core uses its `attachment()`, the executor its `device_part(device, staging)`."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # the module may raise anything
        raise UserError(
            f"--page-source {name} cannot be imported ({type(error).__name__}: {error}); give the name of a module on PYTHONPATH"
        ) from error
    missing = [function for function in ("attachment", "device_part") if not callable(getattr(module, function, None))]
    if missing:
        raise UserError(
            f"--page-source {name} has no {' and no '.join(missing)}; it must define attachment() and device_part(device, staging) "
            "(docs/cache-tiers.md)"
        )
    return module
