"""`PageSource`: where pages of the latent cache are beside the devices, as the scheduler sees it. Plain Python.

Host memory, a disk and another engine that computes prompts are such places. docs/cache-tiers.md shows how to add one.
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
    """When a command about pages is carried out, among those that go before one step."""

    DELETE = 0  # what is stored anew under the same name must not be deleted
    PLACE = 1  # the scheduler's own: what the step before has staged is written to pages
    STAGE = 2  # the scheduler's own: pages are sent to the devices; before the stores, which may take their slots
    REQUEST = 3  # pages are asked for, and land later
    SEND = 4  # pages leave for another engine
    STORE = 5  # pages whose room is needed leave the devices


class Lookup(enum.Enum):
    """What a source says of the pages that a request lacks."""

    ABSENT = "absent"  # it has none of them, or no part of them that would help now
    WAIT = "wait"  # they are on their way: the request is not looked at again before the source wakes it
    LATER = "later"  # it has them, but no room to bring them now: the request is looked at again at the next step
    FULL = "full"  # it would bring them if the rank had room for the request beside those that wait: nothing behind it starts either


class RankPages(NamedTuple):
    """The pages of one DP rank, as a source is given them."""

    pool: PagePool
    landing: LandingArea


class PageSource:
    """A place where pages of the latent cache exist beside the devices. All methods are called in the engine's thread.

    A page has a name (`extend_hashes`): equal names mean equal values. A source may keep pages that are evicted (`evict`), bring pages
    that a request lacks (`lookup`), or take pages as soon as they are computed (`sealed`). What it wants to be done on the devices it
    writes down as commands, which go before the next step (`commands`). A method that it does not define does nothing.

    Attributes:
        slots: places of the source, of each rank, from which `FetchPages` sends pages by their numbers; 0: its pages land first.
        tiers: names of the places whose pages count as cached, the slowest first. slot_tier: the one that has the slots.
        ranks: the pages of each DP rank; set by `bind`.
    """

    slots: int = 0
    tiers: Sequence[str] = ()
    slot_tier: str = ""
    ranks: Sequence[RankPages] = ()

    def bind(self, ranks: Sequence[RankPages]) -> None:
        """Begin with the pages of these ranks. Nothing is left of those that were there before the mesh has changed."""
        self.ranks = ranks

    # Before a step is planned.

    def begin_step(self, now: float) -> None:
        """Another step is about to be planned, for all ranks."""

    def begin_rank(self, rank: int, now: float) -> None:
        """The step of one rank is about to be planned; what was loaded for the step before can be found by now."""

    def has_work(self) -> bool:
        """Whether a step must be planned although no request is unfinished."""
        return False

    # While requests are admitted.

    def has(self, rank: int, name: bytes) -> bool:
        """Whether a page can be had from here, now or after a wait. The router counts it as cached."""
        return self.can_load(rank, name)

    def awaits(self, rank: int, request: Request, name: bytes) -> bool:
        """Whether a page is on its way already; the request then waits for it, too, until the source wakes it."""
        return False

    def can_load(self, rank: int, name: bytes) -> bool:
        """Whether a page lies in one of the source's slots and can be sent to the device now."""
        return False

    def load(self, rank: int, name: bytes) -> PageLoad:
        """The load of a page that `can_load`. The page stays here."""
        raise NotImplementedError(f"{type(self).__name__} has slots and does not say how they are loaded")

    def prefetch(self, rank: int, request: Request, names: Sequence[bytes], ready: bool, now: float) -> Lookup:
        """Begin to bring pages that `has` has, from the first of `names` on. ready: that one can be loaded at once; no other is awaited.

        In a model with window pages, the last name is one's (`pool.num_windows` of `ranks`).
        """
        return Lookup.ABSENT

    def lookup(
        self, rank: int, request: Request, names: Sequence[bytes], cached: Sequence[int], free_slots: int, now: float
    ) -> Lookup:
        """Have pages made elsewhere that nobody has, behind the `cached` ones.

        names: of all pages that the request may read, those cached first, and in a model with window pages that of the last one's window
            page. free_slots: requests that the rank may still start.
        """
        return Lookup.ABSENT

    # When something happens to pages or requests.

    def evict(self, rank: int, page: int, name: bytes) -> None:
        """A cached page's room is needed. Its values are there until the commands that go before the next step are done."""

    def sealed(self, rank: int, request: Request) -> None:
        """A request has started, or further pages of it are full and computed (`Request.num_sealed_pages`)."""

    def landed(self, rank: int, number: int, ok: bool, now: float) -> None:
        """A page that was to land under a number has come, or could not."""

    def loaded(self, rank: int, name: bytes) -> None:
        """A page that the source has landed goes to the device."""

    def load_failed(self, rank: int, name: bytes, number: int) -> None:
        """A page that the source was to land could not be had."""

    def added(self, request: Request) -> None:
        """A request has come."""

    def release(self, rank: int, request: Request) -> None:
        """A request waits no longer: it starts, or it is gone."""

    def preempted(self, request: Request) -> None:
        """A running request waits again."""

    def ended(self, request: Request) -> None:
        """A request has ended: forget it."""

    def num_computed(self, request: Request, loaded: Mapping[str, int]) -> int:
        """How many of a request's loaded pages were computed for it, so that they are no hits of any cache. loaded: pages by tier."""
        return 0

    # When pages are not to be found any more.

    def forget(self, rank: int, names: Sequence[bytes]) -> None:
        """Let pages be found no more."""

    def cancel(self, rank: int) -> None:
        """Let what is on its way to a rank be found by nobody when it has come."""

    def clear(self, rank: int) -> None:
        """Forget every page of a rank, and delete it."""

    def invalidate(self, rank: int) -> None:
        """Forget what may not have happened: a plan was withdrawn, and nobody knows which of its commands were carried out."""

    def withdrawn(self) -> None:
        """What `commands` gave last may not have been carried out. `invalidate` follows for each rank."""

    # For the executor, and for who watches.

    def commands(self) -> Iterable[tuple[CommandTurn, Command]]:
        """What goes before the step that was planned just now; each is given once."""
        return ()

    def counts(self, rank: int) -> Mapping[str, Any]:
        """What the source holds of one rank, and has done for it, by tier."""
        return {}


def _each(method: str, combine: Callable[[Iterator[Any]], Any] = list) -> Callable[..., Any]:
    """A chain's method that combines what its sources' method of this name gives: they are asked in their order, as far as needed."""

    def call(self: SourceChain, *arguments: Any) -> Any:
        return combine(getattr(source, method)(*arguments) for source in self.sources)

    return call


def _first(answers: Iterator[Lookup]) -> Lookup:
    return next((answer for answer in answers if answer is not Lookup.ABSENT), Lookup.ABSENT)


def _join(lists: Iterator[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


class SourceChain(PageSource):
    """Several sources as one. The first that has a page gives it."""

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
        """Begin each with these ranks."""
        self.ranks = ranks
        for source in self.sources:
            source.bind(ranks)

    @property
    def slots(self) -> int:
        """The slots of the one source that has any; raises where two have: a number would not say whose slot it is."""
        with_slots = [source for source in self.sources if source.slots]
        if len(with_slots) > 1:
            raise ValueError(f"found {len(with_slots)} page sources with slots, expected at most one")
        return with_slots[0].slots if with_slots else 0

    @property
    def slot_tier(self) -> str:
        """The tier of that source."""
        return next((source.slot_tier for source in self.sources if source.slots), "")

    def load(self, rank: int, name: bytes) -> PageLoad:
        """The load of the first that can."""
        return next(source for source in self.sources if source.can_load(rank, name)).load(rank, name)

    def counts(self, rank: int) -> Mapping[str, Any]:
        """The counts of all."""
        return {tier: count for source in self.sources for tier, count in source.counts(rank).items()}


def import_page_source(name: str) -> ModuleType:
    """Import the module of `--page-source`, whose `attachment()` the core gets, and whose `device_part(device, staging)` the executor."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever the module raises
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
