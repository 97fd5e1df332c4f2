"""Workload, objectives, and the options of a plan that are not part of a layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.plan.cluster import Cluster
from dsjax.plan.compiled import DryRun
from dsjax.plan.engine import PUBLISHED, Engine
from dsjax.plan.figure import assumed, ends
from dsjax.plan.measured import Measured
from dsjax.plan.operator_tables import BUNDLED, OperatorTables
from dsjax.plan.precision import PRECISIONS, Precision
from dsjax.plan.rules import refuse
from dsjax.plan.skew import DEFAULT_SKEW, Skew
from sharding.mesh import MeshSpec

FIRST, _, _ = ends("acceptance of the first draft")
FADING = ends("acceptance of a further draft")
"""Acceptance rate of a draft ÷ that of the draft before it, each given that all earlier ones were accepted: value, low, high."""
_UNSURE = 0.05
"""A given acceptance rate is uncertain by this much in each direction."""
DISPATCHES = ("deepep", "auto", "gather", "padded", "ragged", "hierarchical")


@dataclass(frozen=True)
class Lengths:
    """Distribution of prompt or output lengths in tokens: mean, and coefficient of variation (standard deviation ÷ mean)."""

    mean: float
    variation: float = 0.0
    even: bool = False  # uniform, as benchmarks draw lengths from a range; otherwise log-normal

    def moment(self, order: int) -> float:
        """Mean of the lengths' power ``order``."""
        if self.even and self.variation:
            half_width = math.sqrt(3) * self.variation * self.mean
            ends = (self.mean + half_width) ** (order + 1) - (self.mean - half_width) ** (order + 1)
            return ends / (2 * half_width * (order + 1))
        return self.mean**order * (1 + self.variation**2) ** (order * (order - 1) / 2)

    def around(self, ratio: float) -> Lengths:
        """Uniform lengths from mean × (1 - ratio) to mean × (1 + ratio), as with vLLM's `--random-range-ratio`."""
        return Lengths(self.mean, ratio / math.sqrt(3), even=True)

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """Read `2000`, or `2000:0.5` with a coefficient of variation. Raises `UserError` for anything else."""
        mean, _, variation = text.partition(":")
        try:
            length = cls(float(mean), float(variation or 0))
        except ValueError:
            length = cls(0)
        if not length.mean >= 1 or not 0 <= length.variation <= 10:
            raise UserError(
                f"{option} is {text!r}, expected a mean of at least 1 token, with a coefficient of variation from 0 to 10 "
                "after a colon if lengths vary: 2000 or 2000:0.5"
            )
        return length


@dataclass(frozen=True)
class RequestClass:
    """A class of requests: its share of all requests, and its lengths."""

    name: str
    share: float
    input: Lengths
    output: Lengths

    @classmethod
    def parse(cls, text: str) -> RequestClass:
        """Read `short=0.8,512:0.2,256`: name, share of all requests, prompt and output tokens. Raises `UserError` for anything else."""
        name, _, rest = text.partition("=")
        share, *lengths = rest.split(",")
        try:
            is_valid = bool(name) and ":" not in name and len(lengths) == 2 and 0 < float(share) <= 1
        except ValueError:
            is_valid = False
        if not is_valid:
            raise UserError(
                f"--class is {text!r}, expected NAME=SHARE,INPUT,OUTPUT with a share above 0 and at most 1: short=0.8,512:0.2,256"
            )
        return cls(name, float(share), *(Lengths.parse(length, "--class") for length in lengths))


@dataclass(frozen=True)
class Workload:
    """Requests and their load: `concurrency` (requests in flight), `rate` (requests per second), or neither for as many as possible."""

    input: Lengths
    output: Lengths
    concurrency: float | None = None
    rate: float | None = None
    prefix_hit: float = 0.0  # share of a prompt's tokens that the prefix cache holds
    # classes of a mixture, whose mean lengths and variations are `input` and `output`; the simulation draws each request from a class
    classes: tuple[RequestClass, ...] = ()
    # cached positions of every request, if only decode steps are planned; None: follows from input and output
    decoding_at: float | None = None

    @classmethod
    def of_classes(cls, classes: Sequence[RequestClass], **others) -> Workload:
        """Make a mixture of classes. Raises `UserError` if the shares do not add up to 1, or two classes have the same name."""
        total = sum(request_class.share for request_class in classes)
        if abs(total - 1) > 1e-6 or len({request_class.name for request_class in classes}) < len(classes):
            raise UserError(f"--class has shares of {total:g} together; expected 1 in all, and each name once")

        def mixed(side: str) -> Lengths:
            weighted_lengths = [(request_class.share, getattr(request_class, side)) for request_class in classes]
            mean = sum(share * length.mean for share, length in weighted_lengths)
            mean_square = sum(share * length.moment(2) for share, length in weighted_lengths)
            return Lengths(mean, max(0.0, mean_square / mean**2 - 1) ** 0.5)

        return cls(mixed("input"), mixed("output"), classes=tuple(classes), **others)

    def __post_init__(self):
        refuse("workload", o=self)

    @property
    def kinds(self) -> tuple[RequestClass, ...]:
        """The classes; for a workload without classes, one without a name."""
        return self.classes or (RequestClass("", 1.0, self.input, self.output),)

    @property
    def computed(self) -> float:
        """Mean prompt tokens of a request that prefill computes."""
        return max(1.0, self.input.mean * (1 - self.prefix_hit))

    @property
    def cached(self) -> float:
        """Mean prompt tokens of a request that the prefix cache holds."""
        return self.input.mean - self.computed if self.prefix_hit else 0.0

    @property
    def context(self) -> float:
        """Mean positions that a decoded token attends to. Long outputs count more, because they have more tokens."""
        return self.decoding_at or self.input.mean + self.output.moment(2) / (2 * self.output.mean)

    @property
    def uneven(self) -> float:
        """Coefficient of variation of the contexts of a decode batch: each request is at a random token of the outputs.

        Over all tokens of all outputs ``L``, the mean square of a token's position is ``E[L³] / 3 E[L]``.
        """
        if self.decoding_at:
            return 0.0
        position = self.context - self.input.mean
        variance = (
            (self.input.mean * self.input.variation) ** 2 + self.output.moment(3) / (3 * self.output.mean) - position**2
        )
        return variance**0.5 / self.context

    @property
    def held(self) -> float:
        """Mean tokens of a request when it ends, for which the KV cache needs room."""
        return self.decoding_at or self.input.mean + self.output.mean


@dataclass(frozen=True)
class Objective:
    """Service-level objectives; None: no bound. Seconds, and output tokens per second of the whole deployment."""

    ttft: float | None = None
    tpot: float | None = None
    throughput: float | None = None

    def __post_init__(self):
        refuse("objective", o=self)


@dataclass(frozen=True)
class Pins:
    """Meshes and numbers of instances that the user fixes: of a disaggregated service, or meshes of AFD."""

    prefill_mesh: MeshSpec | None = None
    decode_mesh: MeshSpec | None = None
    prefill_count: int | None = None
    decode_count: int | None = None
    attention_mesh: MeshSpec | None = None
    expert_mesh: MeshSpec | None = None

    @property
    def separated(self) -> bool:
        """Whether a mesh or a number of instances of a disaggregated service is fixed."""
        options = (self.prefill_mesh, self.decode_mesh, self.prefill_count, self.decode_count)
        return any(value is not None for value in options)


class Asked(Protocol):
    """Fields that a `Question` and an `Instance` share. An instance is one layout of a question."""

    config: ModelConfig
    cluster: Cluster
    workload: Workload
    options: PlanOptions


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan that are not part of a layout. Raises `UserError` for values out of range and options that exclude each other."""

    precision: Precision = PRECISIONS["fp8"]
    drafts: int = 0  # MTP drafts per step
    acceptance: float | tuple[float, ...] = FIRST  # rate of the first draft, or of each position (`tokens_a_step`)
    redundant: int | None = None  # redundant experts; None: search
    skew: Skew = DEFAULT_SKEW
    overlap: str = "auto"  # two-batch overlap: on, off, or auto for the faster; dsjax takes the faster with `on` only
    modes: tuple[str, ...] = ("aggregated", "separated")  # services with one kind of instance, and disaggregated ones
    prefill_tokens: int = 16384  # most prompt tokens of a DP rank in one step
    max_devices: int | None = None  # of the cluster; None: all
    dispatch: str = "deepep"  # or a method of dsjax, priced as XLA's collectives
    compiled: tuple[DryRun, ...] = ()  # dry runs, each used for its layout
    mesh: MeshSpec | None = None  # of every instance; None: search
    measured: Measured | None = None  # module times, used for layouts that they fit
    operators: OperatorTables = BUNDLED
    engine: Engine = PUBLISHED
    pins: Pins = field(default_factory=Pins)
    widest: int | None = None  # most devices of an instance; None: all
    fused: bool = False  # the shared expert is computed as a routed one, with a copy on each device
    afd_stages: int = 2  # most micro-batches with AFD
    stages: tuple[int, ...] = (1,)  # numbers of pipeline stages to search

    def __post_init__(self):
        refuse("options", o=self, engine=self.engine, dispatches=DISPATCHES)

    @property
    def apart(self) -> bool:
        """Whether attention and experts have separate meshes (AFD)."""
        return self.pins.attention_mesh is not None

    @property
    def possible_modes(self) -> tuple[str, ...]:
        """The modes to search that the engine supports."""
        modes = ("separated",) if self.pins.separated else self.modes
        return tuple(mode for mode in modes if mode != "separated" or self.engine.transfers)

    @property
    def tokens_a_step(self) -> float:
        """Tokens of a request that a decode step produces: the next one and the accepted drafts."""
        return tokens_a_step(self.acceptance, self.drafts)

    def check(self, config: ModelConfig, workload: Workload) -> None:
        """Raise `UserError` if the engine or the model lacks an option, or the model has too few positions for the mean request."""
        self.check_launch(config, workload)
        longest = max(kind.input.mean + kind.output.mean for kind in workload.kinds)
        refuse("lengths", longest=longest, config=config)

    def check_launch(self, config: ModelConfig, workload: Workload) -> None:
        """Raise `UserError` if the engine or the model lacks an option, or the model has too few positions for `--context`."""
        name = ("dsjax serve" if self.engine.name == "dsjax" else self.engine.name) + self.engine.of_models
        change = "change that, or give --engine published for engines that can"
        refuse("launch", o=self, engine=self.engine, config=config, work=workload, name=name, change=change)


def tokens_a_step(acceptance: float | Sequence[float], drafts: int) -> float:
    """Return the tokens of a request per decode step: the next one and the accepted drafts.

    acceptance: rate of the first draft, or for each position the share of steps in which its draft was accepted, as vLLM logs it.
    """
    if not drafts:
        return 1.0
    offsets = (0.0, -_UNSURE, _UNSURE)
    if isinstance(acceptance, Sequence):
        tokens = [1 + float(np.clip(np.add(acceptance[:drafts], offset), 0, 1).sum()) for offset in offsets]
        source = f"acceptance of each position as given, ± {_UNSURE:g}"
    else:
        cases = zip(np.clip(np.add(acceptance, offsets), 0, 1), FADING, strict=True)
        tokens = [1 + float(np.cumprod(first * fading ** np.arange(drafts)).sum()) for first, fading in cases]
        further_drafts = f"of each further one {FADING[0]} (0.76 – 0.87) of the one before"
        source = f"MTP acceptance of the first draft as given, ± {_UNSURE:g}; {further_drafts}"
    return assumed(*tokens, "tokens a step", source)


def read_acceptance(text: str) -> float | tuple[float, ...]:
    """Read the rate of the first draft (`0.85`), or of each position (`0.74,0.48,0.26`). Raises `UserError` for anything else."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share <= 1 for share in shares) or any(b > a for a, b in pairwise(shares)):
        raise UserError(
            f"--mtp-acceptance is {text!r}, expected a share from 0 to 1, such as 0.85, or one for each position, none above the one "
            "before, such as 0.74,0.48,0.26"
        )
    return shares[0] if len(shares) == 1 else shares
