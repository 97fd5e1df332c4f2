"""What is asked of a deployment: lengths, load, objectives; and the choices that are not layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.plan.compiled import DryRun
from dsjax.plan.drafting import FIRST, check_acceptance, tokens_a_step
from dsjax.plan.engine import PUBLISHED, Engine
from dsjax.plan.host_time import HOST_TIMES
from dsjax.plan.measured import Measured
from dsjax.plan.operator_tables import BUNDLED, OperatorTables
from dsjax.plan.precision import PRECISIONS, Precision
from dsjax.plan.skew import DEFAULT_SKEW, Skew
from sharding.mesh import MeshSpec

DISPATCHES = ("deepep", "auto", "gather", "padded", "ragged", "hierarchical")


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts or outputs: mean, and coefficient of variation (standard deviation ÷ mean).

    even: drawn evenly around the mean, as benchmarks with a range draw them, and not log-normal.
    """

    mean: float
    variation: float = 0.0
    even: bool = False

    def ranged(self, ratio: float) -> Lengths:
        """Lengths from `ratio` to 1 times this mean, evenly, as InferenceX draws them."""
        return Lengths(self.mean * (1 + ratio) / 2).around((1 - ratio) / (1 + ratio))

    def around(self, ratio: float) -> Lengths:
        """Lengths evenly between mean × (1 - ratio) and mean × (1 + ratio), as vLLM's `--random-range-ratio` has them."""
        return Lengths(self.mean, ratio / math.sqrt(3), True)

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """`2000`, or `2000:0.5` with a coefficient of variation.

        Raises:
            UserError: neither.
        """
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

    @property
    def weighted(self) -> float:
        """Mean length as a token sees it: long ones have more tokens."""
        return self.mean * (1 + self.variation**2)


@dataclass(frozen=True)
class RequestClass:
    """Requests of one kind: their share of all, and their lengths."""

    name: str
    share: float
    input: Lengths
    output: Lengths

    @classmethod
    def parse(cls, text: str) -> RequestClass:
        """`short=0.8,512:0.2,256`: name, share of all requests, prompt and output tokens.

        Raises:
            UserError: anything else.
        """
        name, _, rest = text.partition("=")
        numbers = rest.split(",")
        try:
            share = float(numbers[0])
        except ValueError:
            share = 0.0
        if not name or ":" in name or len(numbers) != 3 or not 0 < share <= 1:
            raise UserError(
                f"--class is {text!r}, expected NAME=SHARE,INPUT,OUTPUT with a share above 0 and at most 1: short=0.8,512:0.2,256"
            )
        return cls(name, share, *(Lengths.parse(number, "--class") for number in numbers[1:]))


def mixed(lengths: Sequence[tuple[float, Lengths]]) -> Lengths:
    """Mean and variation of lengths that are mixed by these shares."""
    mean = sum(share * one.mean for share, one in lengths)
    square = sum(share * one.mean**2 * (1 + one.variation**2) for share, one in lengths)
    return Lengths(mean, max(0.0, square / mean**2 - 1) ** 0.5)


@dataclass(frozen=True)
class Workload:
    """Requests. concurrency: in flight at once; rate: requests a second; at most one of them, none asks for the most.

    prefix_hit: share of a prompt's tokens that are found in the cache. classes: of which the lengths are a mixture; mean values
    know its mean and variation, the simulation draws each request from one. decoding_at: cached positions of every request, for decode
    steps alone; None: what input and output make of them.
    """

    input: Lengths
    output: Lengths
    concurrency: float | None = None
    rate: float | None = None
    prefix_hit: float = 0.0
    classes: tuple[RequestClass, ...] = ()
    decoding_at: float | None = None

    @classmethod
    def of_classes(cls, classes: Sequence[RequestClass], **others) -> Workload:
        """A mixture of classes.

        Raises:
            UserError: shares that are not all requests, or a name given twice.
        """
        total = sum(one.share for one in classes)
        if abs(total - 1) > 1e-6 or len({one.name for one in classes}) < len(classes):
            raise UserError(f"--class has shares of {total:g} together; expected 1 in all, and each name once")
        lengths = (mixed([(one.share, getattr(one, side)) for one in classes]) for side in ("input", "output"))
        return cls(*lengths, classes=tuple(classes), **others)

    @property
    def kinds(self) -> tuple[RequestClass, ...]:
        """The classes; one without a name where there are none."""
        return self.classes or (RequestClass("", 1.0, self.input, self.output),)

    def __post_init__(self):
        if self.concurrency is not None and self.rate is not None:
            raise UserError("--max-concurrency and --request-rate are both given; give one: the other follows from it")
        for flag, value in (("--max-concurrency", self.concurrency), ("--request-rate", self.rate)):
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{flag} is {value}, expected a number above 0")
        if not 0 <= self.prefix_hit < 1:
            raise UserError(f"--prefix-hit is {self.prefix_hit}, expected a share from 0 to below 1")

    @property
    def computed(self) -> float:
        """Prompt tokens that are computed for a mean request."""
        return max(1.0, self.input.mean * (1 - self.prefix_hit))

    @property
    def cached(self) -> float:
        """Prompt tokens that are found."""
        return self.input.mean - self.computed if self.prefix_hit else 0.0

    @property
    def context(self) -> float:
        """Mean positions that a decoded token attends to."""
        return self.decoding_at or self.input.mean + self.output.weighted / 2

    @property
    def uneven(self) -> float:
        """Coefficient of variation of the contexts in a batch: requests are at any point of their outputs."""
        if self.decoding_at:
            return 0.0
        spread = (self.input.mean * self.input.variation) ** 2 + self.output.mean**2 / 12
        return spread**0.5 / self.context

    @property
    def held(self) -> float:
        """Tokens that a request's place in the cache must be able to take: its end, not its mean."""
        return self.decoding_at or self.input.mean + self.output.mean


@dataclass(frozen=True)
class Objective:
    """Service-level objectives; None: no bound. Seconds, and output tokens a second of the whole deployment."""

    ttft: float | None = None
    tpot: float | None = None
    throughput: float | None = None

    def __post_init__(self):
        for name, flag in (("ttft", "--ttft-ms"), ("tpot", "--tpot-ms"), ("throughput", "--throughput")):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                given = value if name == "throughput" else value * 1e3
                raise UserError(f"{flag} is {given:g}, expected a number above 0")


@dataclass(frozen=True)
class Pins:
    """What is given of a separated service: the mesh of its prefill and decode instances, and how many there are of each; and of attention
    and experts apart both meshes."""

    prefill_mesh: MeshSpec | None = None
    decode_mesh: MeshSpec | None = None
    prefill_count: int | None = None
    decode_count: int | None = None
    attention_mesh: MeshSpec | None = None
    expert_mesh: MeshSpec | None = None

    def __bool__(self) -> bool:
        """Whether anything of a separated service is given."""
        return any(
            value is not None for value in (self.prefill_mesh, self.decode_mesh, self.prefill_count, self.decode_count)
        )


@dataclass(frozen=True)
class PlanOptions:
    """Choices: precision; MTP drafts; the chance that the first is accepted, or each position's; redundant experts (None: tried); skew.

    overlap: two-batch overlap `on`, `off`, or `auto`: whichever is faster; of dsjax `on` is that, and `auto` is `off`.
    modes: `aggregated`, `separated`. prefill_tokens: most prompt tokens of a DP rank in one step. max_devices: of the cluster's,
    None for all. dispatch: `deepep`, or one of dsjax's own methods, priced as XLA's collectives. compiled: dry runs, taken where they
    are of a layout. mesh: of every instance; None searches. measured: times of modules, taken where they are of a layout. operators:
    tables of operations. host: `overlapped` with the device's work, or `serial`. engine: what the program that serves can do. pins: of
    separated services. widest: most devices of an instance, None for all. fused: the shared expert is a routed one, with a copy on
    each device. afd: attention and experts on devices of their own are looked at beside the other layouts (`auto`), alone (`on`), or not.
    afd_stages: micro-batches that dsjax has in turn then, where that is faster. stages: numbers of pipeline stages that are looked at.
    """

    precision: Precision = field(default_factory=lambda: PRECISIONS["fp8"])
    drafts: int = 0
    acceptance: float | tuple[float, ...] = FIRST
    redundant: int | None = None
    skew: Skew = DEFAULT_SKEW
    overlap: str = "auto"
    modes: tuple[str, ...] = ("aggregated", "separated")
    prefill_tokens: int = 16384
    max_devices: int | None = None
    dispatch: str = "deepep"
    compiled: tuple[DryRun, ...] = ()
    mesh: MeshSpec | None = None
    measured: Measured | None = None
    operators: OperatorTables = BUNDLED
    host: str = "overlapped"
    engine: Engine = PUBLISHED
    pins: Pins = field(default_factory=lambda: Pins())
    widest: int | None = None
    fused: bool = False
    afd: str = "off"
    afd_stages: int = 2
    stages: tuple[int, ...] = (1,)

    def __post_init__(self):
        self._check_apart()
        if self.host not in HOST_TIMES:
            raise UserError(f"--host-scheduling is {self.host!r}, expected one of {', '.join(HOST_TIMES)}")
        if self.fused and self.measured:
            raise UserError(
                "--enable-shared-experts-fusion is given with --measured, whose experts were timed without the shared one; leave one of "
                "them out"
            )
        if self.dispatch not in DISPATCHES:
            raise UserError(f"--dispatch is {self.dispatch!r}, expected one of {', '.join(DISPATCHES)}")
        if self.overlap not in ("auto", "on", "off"):
            raise UserError(f"--two-batch-overlap is {self.overlap!r}, expected auto, on or off")
        check_acceptance(self.acceptance, self.drafts)
        if not self.modes or any(mode not in ("aggregated", "separated") for mode in self.modes):
            raise UserError(f"--mode is {self.modes}, expected aggregated, separated or both")
        for flag, value, least in (
            ("--prefill-instances", self.pins.prefill_count, 1),
            ("--decode-instances", self.pins.decode_count, 1),
            ("--mtp", self.drafts, 0),
            ("--prefill-tokens", self.prefill_tokens, 1),
            ("--max-devices", self.max_devices, 1),
            ("--max-devices-per-instance", self.widest, 1),
            ("--redundant-experts", self.redundant, 0),
            ("--stages", min(self.stages), 1),
        ):
            if value is not None and value < least:
                raise UserError(f"{flag} is {value}, expected at least {least}")

        if self.pins and "separated" not in self.modes:
            raise UserError(
                "--prefill-mesh, --decode-mesh, --prefill-instances and --decode-instances are of prefill and decode on instances of "
                "their own, which --mode aggregated leaves out; give --mode separated, or --mesh for an aggregated service"
            )

    def _check_apart(self) -> None:
        if self.afd not in ("off", "auto", "on"):
            raise UserError(f"--afd is {self.afd!r}, expected off, auto or on")
        if self.afd == "off":
            return
        if not self.engine.apart:
            raise UserError(
                f"--afd {self.afd} is attention and experts on devices of their own, for which {self.engine.name} has no released option; "
                "give --engine dsjax, or --engine published for moves as papers have them"
            )
        for flag, given in (
            ("--measured", self.measured),
            ("--enable-shared-experts-fusion", self.fused),
            ("--mesh", self.mesh and self.afd == "on"),
        ):
            if given:
                raise UserError(f"{flag} is of one mesh, and --afd {self.afd} looks at two; leave one of the two out")

    @property
    def possible_modes(self) -> tuple[str, ...]:
        """Those of `modes` that the engine has."""
        modes = ("separated",) if self.pins else self.modes
        return tuple(mode for mode in modes if mode != "separated" or self.engine.transfers)

    def check(self, config: ModelConfig, workload: Workload) -> None:
        """Raise `UserError` where the model has no MTP module for drafts, no positions for the mean request, or the engine lacks it."""
        self.check_launch(config, workload)
        longest = max(one.input.mean + one.output.mean for one in workload.kinds)
        if longest > config.max_position_embeddings:
            raise UserError(
                f"--input and --output are {longest:g} tokens together, but the model has positions for "
                f"{config.max_position_embeddings}; give shorter ones"
            )

    def check_launch(self, config: ModelConfig, workload: Workload) -> None:
        """Raise `UserError` where the engine lacks it, or the model has no MTP module for drafts, or no positions for `--context`."""
        self.engine.check(
            separated=self.modes == ("separated",) or bool(self.pins),
            overlap=self.overlap == "on",
            drafts=self.drafts,
            fp4=self.precision.expert < 1,
            fp8_cache=self.precision.cache < 2,
            dispatch=self.dispatch,
            int8=self.precision.name == "int8",
            mxfp4=self.precision.name.startswith("mxfp4"),
        )
        if self.fused and self.engine.widens_fp4 and self.precision.expert < 1:
            raise UserError(
                f"--enable-shared-experts-fusion makes the shared expert a routed one, which --precision {self.precision.name} packs into "
                "four bits, and dsjax serve keeps shared experts in more; leave one of the two out"
            )
        if (workload.decoding_at or 0) > config.max_position_embeddings:
            raise UserError(
                f"--context is {workload.decoding_at:g}, but the model has positions for {config.max_position_embeddings}; give fewer"
            )
        if self.drafts and not config.num_nextn_predict_layers:
            raise UserError(
                "--mtp is given, but the model has no MTP module (num_nextn_predict_layers is 0); leave it out"
            )

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a decode step yields for a request: the next one, and drafts while all before were accepted."""
        return tokens_a_step(self.acceptance, self.drafts)
