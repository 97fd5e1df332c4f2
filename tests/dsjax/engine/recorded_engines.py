"""Engines whose commands are recorded: how they are made, and the few verbs by which `recorded_scenarios.py` speaks to them.

When a constructor of the engine changes, this file changes; the scenarios and the goldens do not.

Everything is one thread on a virtual clock: time passes by what a step takes and between turns, and the disk, the chunks and the links are
scripted (`recorded_executor.py`).
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import msgspec
import numpy as np
from recorded_executor import Clock, LaunchFailedError, Line, ScriptedExecutor, line_of

from dsjax.engine.contract.commands import int32s
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.core import EngineCore
from dsjax.engine.engine import attachments_of
from dsjax.engine.experts.eplb import EplbConfig
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.schedule.mesh_changer import MeshEpoch
from dsjax.engine.schedule.request import Request, RequestOptions
from dsjax.engine.schedule.scheduler_config import AdmissionError, SchedulerConfig
from dsjax.engine.text.logit_rules import LogitRules
from dsjax.engine.transfer.messages import CHUNK_PAGES, PrefillRequest, TransferFailed
from dsjax.engine.transfer.prefill_links import LocalLink, PrefillLinks
from dsjax.engine.transfer.send_buffers import ChunkOwner

VOCABULARY = 300


def make_config(executor: ScriptedExecutor, *, drafts=None, budget=16, **options) -> SchedulerConfig:
    """A scheduler's sizes. drafts: the table of drafts by running requests."""
    speculation = None if drafts is None else SpeculativeConfig(
        method="mtp", num_speculative_tokens=4, num_speculative_tokens_per_batch_size=drafts
    )  # fmt: skip
    return SchedulerConfig.from_limits(
        executor.limits, max_num_batched_tokens=budget, speculation=speculation, **options
    )


class LinksInTurns(PrefillLinks):
    """Links that wait for nothing: whoever could be waited for has its turn next."""

    def wait(self):
        return bool(self.source.num_under_way)


def make_request(name: str, tokens: list[int], kind: str, max_tokens: int, seed: int, now: float, **options) -> Request:
    """A request of a kind. options: priority, cache_salt, session, dp_rank, prefill."""
    params, stop_ids = SamplingParams(**PARAMETERS[kind]), frozenset({7, 8, 9} if kind in STOPPED else ())
    words = ((7,), (1, 2, 9), (3, 3)) if kind == "biased" else ()
    constraint = Digits() if kind == "structured" else None
    rules = LogitRules(params, VOCABULARY, stop_ids, words, constraint) if kind in RULED else None
    more = {"arrival_time": now, "options": RequestOptions(**options), "rules": rules}
    return Request(name, list(tokens), len(tokens), params, max_tokens, seed, stop_ids, **more)


class Successors:
    """Stands for a `MeshChanger`: gives the executor that is there for when a step fails."""

    needs_change, on_warmed_up = False, staticmethod(lambda: None)

    def __init__(self):
        self.next: MeshEpoch | None = None

    def recover_from(self, error: Exception) -> MeshEpoch:
        """Go on with it; the error itself where there is none."""
        if self.next is None:
            raise error
        return self.next


PARAMETERS: dict[str, dict] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "penalised": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.125},
    "biased": {"logit_bias": {5: 3.0, 9: -100.0}, "min_tokens": 3, "allowed_token_ids": list(range(290))},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 1},
    "structured": {"temperature": 0.5, "min_tokens": 2},
    "open": {"temperature": 0, "max_tokens": None},
}
STOPPED = ("sampled", "biased", "structured", "penalised")
RULED = ("penalised", "biased", "structured")


class Digits:
    """A grammar: tokens in turn from 20 to 39, 40 to 59 and 60 to 79, where the draws of the model never lead to an end."""

    active, complete = True, False

    def __init__(self):
        self._made = 0

    def preview(self, drafts, words):
        """The masks of the next token, and of those behind the drafts that fit."""
        masks = []
        for place, draft in enumerate([*drafts, None]):
            bits = np.zeros(32 * words, bool)
            first = 20 + 20 * ((self._made + place) % 3)
            bits[first : first + 20] = True
            masks.append(np.packbits(bits, bitorder="little").view(np.int32))
            if draft is None or not first <= draft < first + 20:
                break
        return np.array(masks), None

    def take(self, token):
        fits = token // 20 == 1 + self._made % 3
        self._made += 1
        return None if fits else f"token {token} is not allowed at {self._made}"


class EventStream:
    """Writes down what is told of pages, many events a line."""

    def __init__(self, run: "Run", name: str):
        self._lines = run.streams.setdefault(f"{name}-events", [])
        self._events: list[bytes] = []

    def publish(self, rank: int, events) -> None:
        for event in events:
            self._events.append(msgspec.msgpack.encode((rank, event)))
            if len(self._events) == 64:
                self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        self._lines.append(line_of(f"events-{len(self._events)}", b"".join(self._events)))
        self._events = []


class Engine:
    def __init__(self, run: "Run", name: str, core: EngineCore):
        self._run, self._core, self._late = run, core, []
        self._requests: list[Request] = []
        self._outcomes = run.streams.setdefault(f"{name}-requests", [])
        run.engines.append(self)

    @property
    def executor(self) -> ScriptedExecutor:
        return self._core.executor

    @property
    def busy(self) -> bool:
        return self._core.has_unfinished or bool(self._late)

    def add(
        self, name: str, tokens: list[int], kind: str = "greedy", max_tokens: int = 6, seed: int = 0, **options
    ) -> Request:
        request = make_request(name, tokens, kind, max_tokens, seed, self._run.clock(), **options)
        try:
            self._core.add(request)
            self._requests.append(request)
        except AdmissionError as error:  # it was drawn for another mesh
            self._outcomes.append(line_of(f"{name}:refused", str(error).encode()))
        return request

    def abort(self, name: str) -> None:
        self._core.abort(name)

    def meanwhile(self, action: Callable[[], object]) -> None:
        """Do it while the devices compute a step."""
        self._late.append(action)

    def flush(self) -> None:
        self._core.flush_prefix_cache()

    def rebalance(self) -> None:
        self._core.part(ExpertBalancer).rebalance_now()

    def change(self, executor: ScriptedExecutor, config: SchedulerConfig) -> None:
        self._core.change(lambda: MeshEpoch(executor, config))

    def survive_with(self, executor: ScriptedExecutor, config: SchedulerConfig) -> None:
        self._core.mesh_changer.next = MeshEpoch(executor, config)

    def turn(self) -> None:
        ahead = self._core.has_unfinished
        with contextlib.suppress(LaunchFailedError):  # whoever steps goes on after an interrupt
            self._core.step(self._meanwhile, ahead=ahead)
        self._meanwhile()

    def end(self) -> None:
        self._core.finish()
        self._core.shutdown()
        for request in self._requests:
            tokens = int32s(request.token_ids)
            reason = "unfinished" if request.finish_reason is None else request.finish_reason.value
            kind = f"{request.request_id}:{reason}:{request.num_cached_tokens}:{request.num_preemptions}"
            self._outcomes.append(line_of(kind, tokens))

    def _meanwhile(self) -> None:
        self._run.pump()  # others' threads do not wait for this one
        late, self._late = self._late, []
        for function in late:
            function()


class Prefill:
    def __init__(self, engine: PrefillEngine):
        self.engine, self._goes_on = engine, True

    def turn(self) -> None:
        self._goes_on = self._goes_on and self.engine.turn(wait=False)

    def hand(self, transfer: str, tokens: list[int]) -> None:
        """Have a prompt computed that its decode engine will name by this transfer."""
        pages = (len(tokens) - 1) // 4
        self.engine.post(PrefillRequest(transfer, int32s(tokens[: pages * 4 + 1]), 0, pages), None)

    def survive_with(self, executor: ScriptedExecutor, config: SchedulerConfig) -> None:
        self.engine.core.mesh_changer.next = MeshEpoch(executor, config)

    def end(self) -> None:
        """End it, unless its decode engine has."""
        if self._goes_on:
            self.engine.core.finish()
            self.engine.core.shutdown()


class ScriptedLink(LocalLink):
    """A prefill engine of this process as a decode engine sees it.

    Attributes:
        lost: kinds of messages that do not reach the prefill engine.
    """

    def __init__(self, prefill: Prefill):
        super().__init__(prefill.engine)
        self.lost: tuple[type, ...] = ()

    def send(self, message) -> None:
        if not isinstance(message, self.lost):
            super().send(message)

    def pull(self, number, device, address=""):
        """A chunk; what another process keeps is always there."""
        return {"tokens": [[0] * 4] * CHUNK_PAGES} if address else super().pull(number, device)

    def fail(self) -> None:
        """Tell decode that all transfers have failed."""
        self.receive(TransferFailed("", "scripted"))


@dataclass
class Run:
    """One run of a scenario.

    Attributes:
        streams: the lines of each stream, by its name.
    """

    clock: Clock = field(default_factory=Clock)
    streams: dict[str, list[Line]] = field(default_factory=dict)
    executors: list[ScriptedExecutor] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)

    def make_executor(self, name: str, **options) -> ScriptedExecutor:
        sizes = {"max_rows_decode": 6, "max_rows_prefill": 3, "max_chunk": 8, "page_size": 4, "pages_per_rank": 33}
        sizes |= {"max_model_len": 128, "vocab_size": VOCABULARY, "max_in_flight": 2, **options}
        self.executors.append(ScriptedExecutor(name, self.streams.setdefault(name, []), self.clock, **sizes))
        return self.executors[-1]

    def make_balancer(self, **options) -> ExpertBalancer:
        """A balancer that decides at once: its thread's work is done where it is asked for."""
        return ExpertBalancer(EplbConfig(**({"window_size": 3, "step_interval": 6} | options)), self.clock)

    def make_core(
        self,
        executor,
        config,
        *,
        links=None,
        connect=None,
        timeout=1.0,
        local_tokens=1,
        balancer=None,
        events=False,
        **options,
    ) -> Engine:
        """An engine that decodes, and computes prompts itself or has them computed behind these links.

        connect: an address to a further link. events: whether a stream has those of its pages.
        """
        own = []
        if links is not None:
            dialer = connect and SimpleNamespace(link_to=connect, close=lambda: None)
            own.append(LinksInTurns(links, dialer, local_tokens=local_tokens, timeout=timeout))
        parts = self._parts(executor, config, balancer, events, own)
        return Engine(
            self, executor.name, EngineCore(executor, config, attachments=parts, mesh_changer=Successors(), **options)
        )

    def make_prefill(self, executor, config, *, timeout=1.0, balancer=None, events=False) -> Prefill:
        """An engine that computes prompts for others."""

        def owners(executor):
            elsewhere, ranks = executor.keeps_elsewhere, range(executor.limits.num_ranks)
            return [ChunkOwner(f"host-{rank}:1", True) if rank in elsewhere else ChunkOwner() for rank in ranks]

        options = {"owners": owners, "mesh_changer": Successors(), "timeout": timeout}
        engine = PrefillEngine(executor, config, attachments=self._parts(executor, config, balancer, events), **options)
        engine.buffers._numbers = itertools.count(1)
        self.prefills.append(Prefill(engine))
        return self.prefills[-1]

    def _parts(self, executor, config, balancer, events, own=()):
        sinks = [EventStream(self, executor.name)] if events else ()
        return [*attachments_of(config, sinks=sinks), *own, *([] if balancer is None else [balancer])]

    def play(self, actions: Mapping[int, list[Callable[[], object]]]) -> None:
        """Turn after turn, with what happens before each, until nothing is left to be done."""
        last = max([0, *actions])
        for turn in range(4000):
            for action in actions.get(turn, ()):
                action()
            self.turn()
            if turn >= last and not any(engine.busy for engine in self.engines):
                return
        raise AssertionError("nothing moves any more")

    def pump(self) -> None:
        for executor in self.executors:
            executor.pump()

    def turn(self) -> None:
        self.pump()
        for prefill in self.prefills:
            prefill.turn()
        for engine in self.engines:
            engine.turn()
        self.clock.advance(0.003)

    def end(self) -> None:
        for engine in self.engines:
            engine.end()
        for _ in range(5):  # what was given up comes to its end
            for prefill in self.prefills:
                prefill.turn()
        for prefill in self.prefills:
            prefill.end()


def _at_once(self, function, /, *arguments, **options) -> Future:
    done: Future = Future()
    done.set_result(function(*arguments, **options))
    return done


def record(scenario: Callable[[Run], None]) -> dict[str, list[Line]]:
    run = Run()
    with mock.patch.object(time, "monotonic", run.clock), mock.patch.object(ThreadPoolExecutor, "submit", _at_once):
        scenario(run)
        run.end()
    return run.streams
