"""Mixes of requests that share an engine, for tests and ``tools/check_mixes.py``: what each gets must be what it gets alone.

A mix is an engine (a mesh and its options) and a batch: requests, when each arrives, and the sizes that the scheduler keeps to meanwhile.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from layouts import CHANGES_NUMBERS, TINY, decide_at_once

from dsjax import LLM, SamplingParams
from dsjax.cli.exact import DISPATCHES, meshes_of
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.schedule.request import RequestOptions
from sharding import MeshSpec

MOST_TOKENS = 24
"""Most tokens that a request asks for."""
STEP_TOKENS = 64
"""Most tokens of a step that an engine is built for."""
ROWS = 8
"""Most running requests of a DP rank."""
FORMS = (*[("CC", "A_CC_ME")] * 3, ("A_CC_ME", "CC"), ("CC", "CC"), ("A_CC_ME", "A_CC_ME"))
"""(prefill, decode) as they are drawn: the default half of the time."""


@dataclass(frozen=True)
class Sizes:
    """What a scheduler keeps to, within what its engine was built for, so that no program is compiled for it.

    chunk: most tokens of a prompt in a step. tokens: most of a step. pages: of a DP rank that requests can have; None: all.
    """

    chunk: int = 32
    tokens: int = STEP_TOKENS
    pages: int | None = None

    @contextlib.contextmanager
    def hold(self, scheduler) -> Iterator[None]:
        """Keep an idle scheduler to them."""
        whole, taken = scheduler.config, []
        config = dataclasses.replace(whole, prefill_chunk=self.chunk, max_num_batched_tokens=self.tokens)
        scheduler.config = config
        for rank in scheduler.ranks:
            rank.config = config
            taken.append(rank.pool.allocate(0 if self.pages is None else max(0, rank.pool.num_free - self.pages)))
        try:
            yield
        finally:
            scheduler.config = whole
            for rank, pages in zip(scheduler.ranks, taken, strict=True):
                rank.config = whole
                rank.pool.release(pages)


@dataclass(frozen=True)
class Given:
    """What a request got. of_cache: how many of the prompt's tokens the prefix cache had; preemptions: how often it began again."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...]
    of_cache: int = dataclasses.field(compare=False)
    preemptions: int = dataclasses.field(default=0, compare=False)


def given_to(output) -> Given:
    """What the only completion of a finished request has."""
    (completion,) = output.outputs

    def logprobs(tokens, entries):
        return tuple(entry[token].logprob for token, entry in zip(tokens, entries, strict=True))

    of_prompt = logprobs(output.prompt_token_ids[1:], output.prompt_logprobs[1:]) if output.prompt_logprobs else ()
    chosen = logprobs(completion.token_ids, completion.logprobs)
    counts = output.num_cached_tokens, output.metrics.num_preemptions
    return Given(tuple(completion.token_ids), chosen, of_prompt, *counts)


@dataclass(frozen=True)
class Request:
    """One request of a batch.

    params: of its sampling, as keyword arguments. arrives: before which step of the batch. aborted: before which step; None: never.
    rank: the DP rank that it asks for; None: the engine chooses.
    """

    prompt: tuple[int, ...]
    params: dict[str, Any]
    arrives: int = 0
    aborted: int | None = None
    rank: int | None = None
    priority: int = 0

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(ignore_eos=True, detokenize=False, logprobs=0, **self.params)


class Batch(NamedTuple):
    """Requests that meet in an engine. flush: whether the prefix cache forgets all before."""

    requests: tuple[Request, ...]
    sizes: Sizes
    flush: bool


@dataclass(frozen=True)
class Engine:
    """What a mix is computed by.

    options: of ``LLM``. reference: of one device's engine that gives each request what it must get. decode, chunk, rows, mixed: the few
    shapes for which programs are compiled (``Buckets``).
    """

    model: str
    layout: str
    options: dict[str, Any]
    reference: tuple[tuple[str, Any], ...]
    decode: tuple[int, ...]
    chunk: int
    rows: int
    mixed: bool

    @property
    def page_size(self) -> int:
        return self.options["page_size"]

    def load(self, directory: Path) -> LLM:
        """The engine.

        Raises:
            UserError, MeshError: its options do not go together.
        """
        llm = _load(directory, self.options | meshes_of(self.layout) | {"prefill_chunk": self.chunk})
        executor = getattr(llm.executor, "inner", llm.executor)
        prefill, speculation = (Rectangle(self.rows, self.chunk),), executor.buckets.speculation
        executor.buckets = Buckets(self.decode, prefill, self.mixed, speculation=speculation)
        decide_at_once(llm)
        return llm


def _load(directory: Path, options: dict[str, Any]) -> LLM:
    llm = LLM(str(directory), dtype="float32", max_num_seqs=ROWS, max_num_batched_tokens=STEP_TOKENS, **options)
    assert llm.executor.model.is_exact
    return llm


class Alone:
    """What requests get alone, of one device without a prefix cache. directories: of each model's checkpoint."""

    MOST_ENGINES = 6

    def __init__(self, directories: dict[str, Path]):
        self._directories = directories
        self._engines: dict[tuple, LLM] = {}

    def answer(self, engine: Engine, request: Request) -> Given:
        """What a request must get of an engine."""
        key = (engine.model, engine.reference)
        if key not in self._engines:
            if len(self._engines) == self.MOST_ENGINES:
                self._engines.pop(next(iter(self._engines))).shutdown()
            options = {"prefill_chunk": 32, "page_size": 4, "enable_prefix_caching": False} | dict(engine.reference)
            made = self._engines[key] = _load(self._directories[engine.model], options)
            made.executor.buckets = Buckets((1,), (Rectangle(1, 32),), mixed=False)
        (output,) = self._engines[key].generate([{"prompt_token_ids": list(request.prompt)}], request.sampling)
        return given_to(output)

    def close(self) -> None:
        for llm in self._engines.values():
            llm.shutdown()
        self._engines.clear()


class Played(NamedTuple):
    """What each request of a batch got, None of one that was aborted; and how many drafts were accepted."""

    given: list[Given | None]
    accepted: int


def play(llm: LLM, batch: Batch) -> Played:
    """Have an engine that has nothing to do compute a batch."""
    engine, found, step, accepted = llm.engine, {}, 0, 0
    if batch.flush:
        engine.flush_prefix_cache()
    coming = dict(enumerate(batch.requests))
    leaving = {number: request.aborted for number, request in coming.items() if request.aborted is not None}
    with batch.sizes.hold(engine.core.scheduler):
        while coming or engine.has_unfinished():
            for number in [number for number, request in coming.items() if request.arrives <= step]:
                request = coming.pop(number)
                options = RequestOptions(dp_rank=request.rank, priority=request.priority)
                prompt = {"prompt_token_ids": list(request.prompt)}
                engine.add_request(str(number), prompt, request.sampling, options)
            for number in [number for number, at in leaving.items() if at <= step]:
                del leaving[number]
                engine.abort(str(number))
            if engine.has_unfinished():
                found |= {int(output.request_id): output for output in engine.step() if output.finished}
                stats = engine.core.stats()
                accepted += stats.drafts.num_accepted_tokens if stats is not None and stats.drafts else 0
            step += 1
    given = [None if one.aborted is not None else given_to(found[at]) for at, one in enumerate(batch.requests)]
    return Played(given, accepted)


def draw_engine(rng: random.Random) -> Engine:
    """An engine whose options may not go together: ``Engine.load`` says so."""
    model = rng.choice(["v3", "v3", "v3.2"])
    prefill, decode = rng.choice(FORMS)
    options: dict[str, Any] = {"mla_prefill": prefill, "mla_decode": decode, "page_size": rng.choice([4, 4, 8, 16])}
    layout = _draw_layout(rng)
    apart = "+" in layout
    spec = MeshSpec.parse(layout.partition("+")[0])
    ep = int(layout.partition("+ep=")[2]) if apart else spec.ep_size
    maybe = lambda share, **given: options.update(given) if rng.random() < share else None  # noqa: E731
    if not apart:
        options |= {"dispatch": rng.choice(DISPATCHES), "devices_per_host": rng.choice([1, 2, 4])}
    maybe(0.5, speculative_config={"method": "mtp", "num_speculative_tokens": rng.choice([1, 2, 3])})
    maybe(0.4, async_scheduling=False)
    maybe(0.2, enable_prefix_caching=False)
    maybe(0.3, enable_dbo=True, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    maybe(0.2, moe_chunk_tokens=rng.choice([2, 5]))
    maybe(0.2, moe_dense_tp_size=1, enable_dp_lm_head=True)
    maybe(0.2, embedding_location="host")
    maybe(0.3, scheduling_policy="priority")
    maybe(0.3, host_cache_bytes=200_000, cache_tokens=160)
    experts = TINY["n_routed_experts"]
    redundant = -experts % ep + ep * rng.choice([0, 1])
    if ep > 1 and rng.random() < 0.5:
        eplb = {"num_redundant_experts": redundant, "window_size": 4, "step_interval": 4, "payback": 0}
        options |= {"enable_eplb": True, "eplb_config": eplb}
    elif redundant:
        options |= {"redundant_experts": redundant}
    if not apart:
        maybe(0.3, ep_dispatch_algorithm="static")
        maybe(0.2, enable_shared_experts_fusion=True)
    maybe(0.2, kv_cache_dtype="fp8")
    if model == "v3.2":
        maybe(0.3, index_scores="fp8")
    names = ("mla_prefill", "mla_decode", *CHANGES_NUMBERS, "kv_cache_dtype")
    reference = {name: options[name] for name in names if name in options}
    return Engine(
        model,
        layout,
        options,
        tuple(sorted(reference.items())),
        decode=rng.choice([(ROWS,), (ROWS,), (1, ROWS), (3, ROWS)]),
        chunk=rng.choice([8, 16, 16, 32]),
        rows=rng.choice([1, 2, 4]),
        mixed=rng.random() < 0.5,
    )


def _draw_layout(rng: random.Random) -> str:
    if rng.random() < 0.12:
        return rng.choice(["dp=1+ep=2", "dp=2+ep=4", "dp=2,tp=2+ep=3", "dp=3+ep=2", "dp=2+ep=8"])
    while True:
        dp, tp = rng.choice([1, 1, 2, 2, 3, 4, 4, 6, 8]), rng.choice([1, 1, 1, 2, 2, 4, 8])
        pp = rng.choice([1, 1, 1, 1, 2, 3])
        if dp * tp * pp <= 16:
            break
    parts = [f"dp={dp}", f"tp={tp}"] + [f"pp={pp}"] * (pp > 1)
    if rng.random() < 0.4:  # groups of experts, each expert whole or its width shared
        ep = rng.choice([n for n in range(1, dp * tp + 1) if dp * tp % n == 0])
        parts.append(f"ep={ep}")
        if rng.random() < 0.4:
            parts.append(f"etp={rng.choice([n for n in (2, 4, 8) if dp * tp % (n * ep) == 0] or [1])}")
    return ",".join(parts)


def draw_batch(rng: random.Random, engine: Engine, heads: list[list[int]], ranks: int) -> Batch:
    """A batch for an engine with so many DP ranks. heads: what prompts begin with, so that they share pages."""
    token = lambda: rng.randrange(2, TINY["vocab_size"])  # noqa: E731
    requests = []
    for _ in range(rng.randint(1, 9)):
        head = rng.choice(heads)[: rng.choice([0, rng.randint(1, 47), 47])]
        prompt = head + [token() for _ in range(rng.choice([0, 1, rng.randint(1, 30)]))] or [token()]
        params: dict[str, Any] = {"max_tokens": rng.randint(1, MOST_TOKENS), "temperature": 0}
        if rng.random() < 0.5:
            params |= {"temperature": rng.choice([0.5, 0.8, 1.3]), "seed": rng.randrange(1000)}
            params |= rng.choice([{}, {}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}])
        if rng.random() < 0.2:
            params |= rng.choice([{"repetition_penalty": 1.4}, {"presence_penalty": 0.7}, {"frequency_penalty": 0.5}])
        if rng.random() < 0.3:
            params["prompt_logprobs"] = 0
        arrives = rng.choice([0, 0, rng.randint(1, 12)])
        aborted = arrives + rng.randint(1, 8) if rng.random() < 0.1 else None
        rank = rng.randrange(ranks) if rng.random() < 0.4 else None
        requests.append(Request(tuple(prompt), params, arrives, aborted, rank, rng.randrange(3)))
    longest = max(len(request.prompt) + request.params["max_tokens"] for request in requests)
    pages = -(-longest // engine.page_size)
    sizes = Sizes(
        chunk=rng.choice([engine.chunk, rng.randint(1, engine.chunk)]),
        tokens=rng.choice([STEP_TOKENS, rng.randint(ROWS, STEP_TOKENS)]),
        pages=rng.choice([None, rng.randint(pages + 1, 2 * pages + 1)]),
    )
    return Batch(tuple(requests), sizes, flush=rng.random() < 0.3)


def differences(
    batch: Batch, found: list[Given | None], alone: Callable[[Request], Given]
) -> list[tuple[int, Given, Given]]:
    """The requests that got other than what they get alone: number, what it got, and what it had to get."""
    pairs = enumerate(zip(batch.requests, found, strict=True))
    return [(at, got, due) for at, (request, got) in pairs if got is not None and got != (due := alone(request))]


def reads_an_answer(request: Request, given: Given, others: list[tuple[Request, Given]]) -> bool:
    """Whether the request may have shared cached pages whose tokens are its prompt and another's answer, or the other way round.

    With two MLA forms its numbers may then differ. So it is where two requests have equal tokens up to and including the first that is
    prompt in one and answer in the other.
    """
    for other, got in others:
        ends = {len(request.prompt), len(other.prompt)}
        through = slice(min(ends) + 1)
        if len(ends) == 2 and (request.prompt + given.tokens)[through] == (other.prompt + got.tokens)[through]:
            return True
    return False
