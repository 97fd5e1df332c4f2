"""What happens to the engines whose commands are recorded: `test_recorded_commands.py` compares them with `tests/goldens/commands`.

Nothing here knows how an engine is made (`recorded_engines.py`). A commit that only moves the engine's code changes neither this file nor
the goldens.
"""

import random
from collections.abc import Callable
from functools import partial

from recorded_engines import VOCABULARY, Engine, Run, ScriptedLink, make_config

from dsjax.engine.contract.commands import Copy, FetchPages, PlacePages, PullPages, ReadPages, Step, StorePages
from dsjax.engine.schedule.request import Request
from dsjax.engine.transfer.messages import PrefillRequest

KINDS = ("greedy", "sampled", "penalised", "biased", "logprobs", "prompt_logprobs", "structured", "open")
MOVING = (Copy, StorePages, FetchPages, PlacePages, ReadPages, PullPages)
Actions = dict[int, list[Callable[[], object]]]


class Crowd:
    """Prompts that begin alike and requests for them, drawn from a seed.

    first_rank: the first DP rank that requests may name; the engine chooses itself where it has no such rank.
    """

    def __init__(self, seed: int, longest: int = 60, beginnings: int = 3, first_rank: int = 0):
        self._draw, self._first_rank = random.Random(seed), first_rank
        self._longest, self._last = longest, []
        self._beginnings = [[self._draw.randrange(VOCABULARY) for _ in range(longest)] for _ in range(beginnings)]

    def prompt(self) -> list[int]:
        draw = self._draw
        if self._last and draw.randrange(5) == 0:  # all of it is cached, to the end of a page
            return self._last[: len(self._last) // 4 * 4] or self._last
        shared = draw.choice(self._beginnings)[: draw.randrange(self._longest)]
        self._last = shared + [draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 1, 1, 4, 9)))] or [1] * 4
        return self._last

    def arrivals(
        self,
        engine: Engine,
        count: int,
        *,
        kinds=KINDS,
        every: float = 1.0,
        aborts: int = 5,
        longest_output: int = 24,
        first: int = 0,
    ) -> Actions:
        """So many requests, one in `every` turns, of all kinds in turn; each `aborts`-th is ended some turns later."""
        draw, actions = self._draw, {}
        for number in range(count):
            turn, name, kind = first + int(number * every), f"{first}-{number}", kinds[number % len(kinds)]
            prompt, seed = self.prompt(), draw.randrange(2**32)
            tokens = 128 - len(prompt) if kind == "open" and number % 16 == 7 else 1 + draw.randrange(longest_output)
            options = {}
            if number % 6 == 1:
                options["cache_salt"] = ("a", "b")[number % 4 // 2]
            if number % 7 == 2:
                options["session"] = f"session {number % 3}"
            if number % 4 == 3:
                options["priority"] = draw.randrange(-2, 3)
            if number % 11 == 4:
                options["dp_rank"] = self._first_rank + number % 2
            for place in range(3 if number % 9 == 5 else 1):  # n: completions of one prompt
                one = f"{name}-{place}" if place else name, prompt, kind, tokens, seed + place
                add = partial(engine.add, *one, **options)
                actions.setdefault(turn, []).append(partial(engine.meanwhile, add) if number % 5 == 2 else add)
            if number % aborts == aborts - 1:
                late, end = turn + 1 + draw.randrange(9), partial(engine.abort, name)
                actions.setdefault(late, []).append(partial(engine.meanwhile, end) if number % 2 else end)
        return actions


def together(*every: Actions) -> Actions:
    found: Actions = {}
    for actions in every:
        for turn, ones in actions.items():
            found.setdefault(turn, []).extend(ones)
    return found


def put(of: object, **values) -> Callable[[], None]:
    return partial(vars(of).update, values)


def sessions(engine: Engine, crowd: Crowd, turns: range) -> Actions:
    """Conversations: each later prompt is the one before, its output and a few tokens more."""
    before: list[Request] = []

    def say(number: int) -> None:
        prompt = [*before[-1].token_ids, 11, 12, 13] if before and len(before[-1].token_ids) < 90 else crowd.prompt()
        before.append(engine.add(f"said-{number}", prompt, "greedy", 7, number, session="a long one"))

    return {turn: [lambda turn=turn: say(turn)] for turn in turns}


def plain(run: Run, *, ranks: int = 3, asynchronous: bool = True, policy: str = "priority", **config) -> None:
    """Requests of all kinds on few pages."""
    executor = run.make_executor("engine", num_ranks=ranks, pages_per_rank=33)
    config = make_config(executor, policy=policy, **config)
    engine = run.make_core(executor, config, events=True, async_scheduling=asynchronous)
    crowd = Crowd(1, first_rank=2 * (policy == "fcfs"))
    run.play(together(
        crowd.arrivals(engine, 24 * ranks, every=1 / ranks, longest_output=40),
        sessions(engine, crowd, range(5, 60, 11)),
        {20: [put(executor, non_finite={4711: 9})], 21: [lambda: engine.add("poisoned", [5] * 7, "greedy", 9, 4711)],
         24: [put(executor, impossible={4712: "no token is allowed"}), lambda: engine.add("impossible", [5] * 30, "biased", 9, 4712)],
         30: [engine.flush]},
    ))  # fmt: skip
    engine.flush()
    run.play(crowd.arrivals(engine, 6, first=1))


def host_tier(run: Run) -> None:
    """Pages that go to host memory and come back."""
    executor = run.make_executor("engine", num_ranks=2, pages_per_rank=25, host_pages_per_rank=16)
    engine = run.make_core(executor, make_config(executor), events=True)
    crowd = Crowd(2, beginnings=5)
    run.play(together(
        crowd.arrivals(engine, 60, every=1.5),
        sessions(engine, crowd, range(7, 80, 9)),
        {50: [engine.flush]},
    ))  # fmt: skip
    run.play(crowd.arrivals(engine, 12, every=3, kinds=("greedy", "sampled"), first=1))


def disk_tier(run: Run, *, host_pages: int = 12) -> None:
    """Pages that go to host memory and the disk, which is slow, fails, and works again; then what only the devices have goes there."""
    sizes = {"host_pages_per_rank": host_pages, "disk_pages": 60, "disk_page_bytes": 4096}
    executor = run.make_executor("engine", num_ranks=2, pages_per_rank=25, **sizes)
    engine = run.make_core(executor, make_config(executor), events=True)
    crowd = Crowd(3, beginnings=5)
    run.play(together(
        crowd.arrivals(engine, 90, every=4),
        sessions(engine, crowd, range(7, 340, 19)),
        {
            50: [put(executor, reads_fail=True)], 80: [put(executor, reads_fail=False)],
            120: [put(executor, writes_fail=True)], 132: [put(executor, writes_fail=False)],
            140: [lambda: run.clock.advance(3.0)],
            180: [put(executor, disk_seconds=9.0)],
            **{turn: [lambda: run.clock.advance(1.5)] for turn in (200, 210, 220)},
            221: [put(executor, disk_seconds=0.02)],
            240: [lambda: run.clock.advance(9.5)],
            300: [engine.flush],
        },
    ))  # fmt: skip
    run.clock.advance(1.0)
    run.play(crowd.arrivals(engine, 20, every=3, kinds=("greedy", "sampled"), first=1))
    kept = executor.disk
    engine.end()
    run.engines.clear()
    again = run.make_executor("restarted", num_ranks=2, pages_per_rank=33, disk_pages=40, disk=dict(kept))
    engine = run.make_core(again, make_config(again), events=True)
    run.play(crowd.arrivals(engine, 24, every=2, kinds=("greedy", "sampled")))


def separated(run: Run, *, lost: bool = True) -> None:
    """Two prefill engines, one of them reached by its address; transfers that are cancelled, lost, late, failed and given up."""
    first_executor = run.make_executor("prefill", num_ranks=2, transfers=True)
    first_executor.keeps_elsewhere = {1}
    second_executor = run.make_executor("other-prefill", transfers=True, pages_per_rank=49)
    first = run.make_prefill(first_executor, make_config(first_executor, policy="priority"), events=True)
    second = run.make_prefill(second_executor, make_config(second_executor))
    executor = run.make_executor("decode", num_ranks=2, transfers=True, pages_per_rank=41)
    links, connect = [ScriptedLink(first)], lambda address: ScriptedLink(second)
    options = {"links": links, "connect": connect, "local_tokens": 9, "timeout": 0.4, "events": True}
    engine = run.make_core(executor, make_config(executor), **options)
    crowd = Crowd(4, longest=100)

    def handed(number: int) -> None:
        prompt = (crowd.prompt() + [number] * 12)[:100]
        if number % 3:
            second.hand(f"handed-{number}", prompt)
        named = {"address": "other:1", "transfer": f"handed-{number}"}
        engine.add(f"handed-{number}", prompt, "greedy", 5, number, prefill=named)

    run.play(together(
        crowd.arrivals(engine, 90, every=3.2, aborts=4, longest_output=12),
        sessions(engine, crowd, range(7, 280, 19)),
        {turn: [lambda turn=turn: handed(turn)] for turn in range(3, 290, 14)},
        {
            40: [put(executor, pulls_fail=True)], 50: [put(executor, pulls_fail=False)],
            80: [put(executor, chunk_seconds=float("inf"))], 98: [put(executor, chunk_seconds=0.03), lambda: run.clock.advance(0.5)],
            120: [put(links[0], lost=(PrefillRequest,))], 136: [put(links[0], lost=()), lambda: run.clock.advance(0.5)],
            160: [put(first_executor, chunk_seconds=float("inf"))],
            178: [put(first_executor, chunk_seconds=0.03), lambda: run.clock.advance(0.5)],
            200: [engine.flush],
            220: [links[0].fail], 222: [lambda: run.clock.advance(70.0)],
            240: [put(first_executor, non_finite={0: 12})], 256: [put(first_executor, non_finite={})],
        },
    ))  # fmt: skip


def two_prefills(run: Run) -> None:
    """A crowd for which two prefill engines compute for long, by priority. Each is left alone for a while, twice."""
    prefills = []
    for number in range(2):
        executor = run.make_executor(f"prefill-{number}", transfers=True, max_rows_prefill=1, max_chunk=4)
        prefills.append(run.make_prefill(executor, make_config(executor, policy="priority", budget=8), timeout=3.0))
    executor = run.make_executor("decode", num_ranks=2, transfers=True, pages_per_rank=29)
    links, config = [ScriptedLink(prefill) for prefill in prefills], make_config(executor, policy="priority")
    engine = run.make_core(executor, config, links=links, local_tokens=9, timeout=1.5)
    crowd = Crowd(10, longest=80, beginnings=6)
    run.play(together(
        crowd.arrivals(engine, 80, every=3, kinds=("greedy", "sampled", "penalised"), longest_output=12),
        {turn: [links[turn // 20 % 2].fail] for turn in (40, 60, 120, 140)},
        {turn: [lambda: run.clock.advance(1.1)] for turn in (64, 144, 146)},
        {180: [put(executor, chunk_seconds=0.2)]},
    ))  # fmt: skip


def drafts(run: Run, *, asynchronous: bool = True) -> None:
    """Drafts by the number of running requests."""
    executor = run.make_executor("engine", num_ranks=2, pages_per_rank=33)
    config = make_config(executor, drafts=((1, 1, 4), (2, 3, 0), (4, 5, 3), (6, 9, 1)), policy="priority")
    engine = run.make_core(executor, config, async_scheduling=asynchronous)
    crowd = Crowd(5)
    run.play(together(
        crowd.arrivals(engine, 60, every=1.4, longest_output=40),
        {turn: [lambda turn=turn: engine.add(f"alone-{turn}", crowd.prompt(), "structured", 20, turn)] for turn in (150, 190)},
    ))  # fmt: skip


def balancing(run: Run) -> None:
    """Experts that move between steps, at times in vain, and once because somebody asked."""
    executor = run.make_executor("engine", num_ranks=2, moves_experts=True)
    executor.failing_exchanges = {9, 31}
    engine = run.make_core(executor, make_config(executor), balancer=run.make_balancer())
    crowd = Crowd(6)
    run.play(crowd.arrivals(engine, 50, every=2, longest_output=16))
    engine.rebalance()
    run.play({})
    run.play(crowd.arrivals(engine, 6, first=1))


def everything(run: Run) -> None:
    """Host memory and disk on both sides, drafts, and experts that move on both sides, while a prefill engine is asked."""
    both = {"host_pages_per_rank": 10, "disk_pages": 50, "transfers": True, "moves_experts": True}
    first = run.make_executor("prefill", num_ranks=2, **both)
    config = make_config(first, drafts=((1, 2, 2), (3, 6, 1)))
    prefill = run.make_prefill(first, config, balancer=run.make_balancer(), events=True)
    second = run.make_executor("decode", num_ranks=2, pages_per_rank=29, **both)
    config = make_config(second, drafts=((1, 2, 3), (3, 4, 0), (5, 6, 2)), policy="priority")
    link, balancer = ScriptedLink(prefill), run.make_balancer(step_interval=9)
    options = {"links": [link], "balancer": balancer, "events": True, "local_tokens": 6, "timeout": 0.6}
    engine = run.make_core(second, config, **options)
    crowd = Crowd(7, longest=80, beginnings=4)
    run.play(together(
        crowd.arrivals(engine, 90, every=3, longest_output=20),
        sessions(engine, crowd, range(7, 260, 19)),
        {
            60: [put(second, reads_fail=True), put(first, writes_fail=True)],
            90: [put(second, reads_fail=False), put(first, writes_fail=False)],
            100: [lambda: run.clock.advance(2.0)],
            120: [put(second, pulls_fail=True)], 130: [put(second, pulls_fail=False, disk_seconds=5.0)],
            150: [lambda: run.clock.advance(2.5)],
            160: [put(second, disk_seconds=0.02), lambda: run.clock.advance(4.0)],
            200: [engine.flush], 220: [link.fail],
        },
    ))  # fmt: skip


def changed_mesh(run: Run) -> None:
    """Steps that are lost, meshes that change, launches that fail, with tiers and a prefill engine whose own mesh is lost too."""
    first = run.make_executor("prefill", num_ranks=2, transfers=True)
    prefill = run.make_prefill(first, make_config(first))
    first.fail_at_step = 45
    later = run.make_executor("prefill", num_ranks=3, transfers=True)
    later.keeps_elsewhere = {0, 1}
    prefill.survive_with(later, make_config(later))

    def sized(ranks: int, pages: int):
        parts = {"host_pages_per_rank": 8, "disk_pages": 40, "transfers": True, "moves_experts": True}
        made = run.make_executor("decode", num_ranks=ranks, pages_per_rank=pages, **parts)
        return made, make_config(made, drafts=((1, 2, 2), (3, 6, 1)))

    executor, config = sized(3, 29)
    options = {"links": [ScriptedLink(prefill)], "balancer": run.make_balancer(), "events": True, "local_tokens": 13}
    engine = run.make_core(executor, config, **options)
    executor.fail_at_step = 70
    engine.survive_with(*sized(2, 21))
    crowd = Crowd(8)
    run.play(together(
        crowd.arrivals(engine, 110, every=1.2, longest_output=30),
        {turn: [lambda kind=kind: engine.executor.failing.append(kind)] for turn, kind in enumerate(MOVING, start=15)},
        {turn: [lambda: engine.executor.failing.append(Step)] for turn in (30, 33, 58, 96)},
        {
            110: [
                *(lambda own=own: engine.add(f"before-{own}", [own] * 30, "greedy", 9, own) for own in range(9)),
                lambda: engine.change(*sized(4, 25)),
                *(lambda own=own: engine.add(f"after-{own}", [40 + own] * 30, "greedy", 9, own) for own in range(9)),
            ],
            125: [lambda: engine.change(*sized(1, 41))],
        },
    ))  # fmt: skip


_NAMED = (plain, host_tier, disk_tier, separated, two_prefills, drafts, balancing, everything, changed_mesh)
SCENARIOS: dict[str, Callable[[Run], None]] = {scenario.__name__: scenario for scenario in _NAMED} | {
    "plain_synchronous": partial(plain, ranks=2, asynchronous=False, policy="fcfs"),  # one step at a time, by arrival
    "plain_uncached": partial(plain, ranks=1, prefix_caching=False),
    "disk_alone": partial(disk_tier, host_pages=0),
    "drafts_synchronous": partial(drafts, asynchronous=False),
}
