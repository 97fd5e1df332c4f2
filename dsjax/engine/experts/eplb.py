"""`ExpertOptions` and `EplbConfig`: how many copies experts have, when they are moved after their load, and how much is sent at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from dsjax.engine.contract.json_option import JsonOption
from dsjax.errors import UserError
from dsjax.options import Group, advanced, option

if TYPE_CHECKING:  # NumPy is not loaded where nothing is balanced
    import numpy as np

POLICIES = ("auto", "global", "hierarchical")
MOST_UNREAD = 4096
"""Steps after which the devices' counters are read in any case, so that they cannot overflow 32 bits."""


class RebalanceUnderWayError(UserError):
    """A rebalance was asked for in the middle of another one."""


@dataclass(frozen=True, kw_only=True)
class EplbConfig(JsonOption):
    """Balancing of experts while serving, with vLLM's names for its fields. Checked when made.

    Attributes:
        window_size: steps whose loads a placement is made for. step_interval: steps between two decisions.
        num_redundant_experts: physical experts beside the logical ones; None: as `--redundant-experts` says.
        log_balancedness: whether each window's balancedness is logged.
        max_bytes_per_step: bytes that a device receives between two steps, at most; at least one expert is sent.
        payback: a layer is changed where its predicted gain in `step_interval` steps is at least so many times its cost; 0: wherever it
            gains.
        policy: how experts are placed (`sharding.balancing.rebalance`): `auto` is `hierarchical` where the mesh has several hosts.

    Raises:
        UserError: a value that cannot be, with the field's name, what was found and what would fit.
    """

    flag: ClassVar[str] = "--eplb-config"
    example: ClassVar[str] = '\'{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000}\''

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int | None = None
    log_balancedness: bool = False
    max_bytes_per_step: int = 128 * 2**20
    payback: float = 1.0
    policy: str = "auto"

    def __post_init__(self):
        self.check_integers("window_size", "step_interval", "max_bytes_per_step", least=1)
        if self.num_redundant_experts is not None:
            self.check_integers("num_redundant_experts", least=0)
        self.check_flags("log_balancedness")
        is_number = isinstance(self.payback, int | float) and not isinstance(self.payback, bool)
        self.check(is_number and 0 <= self.payback < math.inf, "payback", "a number of at least 0")
        self.check(self.policy in POLICIES, "policy", f"one of {', '.join(POLICIES)}")

    @property
    def read_interval(self) -> int:
        """Steps after which loads are read."""
        return min(self.window_size, self.step_interval, MOST_UNREAD)


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Options of an engine that has experts more than once, or moves them."""

    redundant_experts: int = option(0, "Physical experts beside the logical ones.", Group.EXPERTS, least=0)
    enable_eplb: bool = option(False, "Balance experts by their load while serving.", Group.EXPERTS)
    eplb_config: str | dict[str, Any] | None = advanced(
        None,
        'With --enable-eplb, by vLLM\'s names: \'{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000, '
        '"log_balancedness": true, "max_bytes_per_step": 134217728, "payback": 1, "policy": "auto"}\'.',
        Group.EXPERTS,
    )
    init_expert_location: str | None = advanced(
        None, "Experts' loads or places from /dump_expert_distribution_record.", Group.EXPERTS
    )

    @property
    def eplb(self) -> EplbConfig | None:
        """`eplb_config`, read, or its defaults; None without `enable_eplb`. Raises as `JsonOption.parse`."""
        if not self.enable_eplb:
            return None
        return EplbConfig() if self.eplb_config is None else EplbConfig.parse(self.eplb_config)

    @property
    def num_redundant(self) -> int:
        """Physical experts beside the logical ones, from whichever of the two options has them; a `UserError` where they differ."""
        balanced = self.eplb.num_redundant_experts if self.eplb else None
        if balanced is not None and self.redundant_experts not in (0, balanced):
            raise UserError(
                f"--redundant-experts is {self.redundant_experts}, and num_redundant_experts in --eplb-config is {balanced}; "
                "give one of them"
            )
        return self.redundant_experts if balanced is None else balanced


@dataclass(frozen=True)
class BalanceStats:
    """Experts that follow the load: totals since the start, and the last window.

    Attributes:
        windows: of loads that were read. balancedness, layer_balancedness: of the last one, mean ÷ max over ranks as the ratio of sums over
            layers (as vLLM logs it), and as the mean of the layers' ratios (as SGLang does); 1 is perfect.
        rank_tokens: that each rank of an EP group computed in the last window, over all layers.
        rebalances: carried out; failures: given up. bytes_moved: of experts that reached another slot, on all devices of an EP group.
        exchanges: commands that moved something. rebalance_seconds: of those carried out. layers_left: of the one under way.
    """

    windows: int = 0
    balancedness: float = 1.0
    layer_balancedness: float = 1.0
    rank_tokens: tuple[int, ...] = ()
    rebalances: int = 0
    failures: int = 0
    layers_changed: int = 0
    experts_moved: int = 0
    bytes_moved: int = 0
    exchanges: int = 0
    exchange_seconds: float = 0.0
    rebalance_seconds: float = 0.0
    layers_left: int = 0


@dataclass(frozen=True, eq=False)
class ExpertSlots:
    """Where experts are, and what it takes to move them.

    Attributes:
        physical_to_logical: `[MoE layers, physical slots]`, with the MTP module's layer last; slots lie rank by rank.
        ranks: of an EP group; hosts: runs of them that are on one machine. groups: of experts, where routing is limited to some of them.
        expert_share: of a token's arithmetic, the routed experts' part: their parameters among those that act on it.
        expert_bytes: of one expert on one device. per_exchange: experts that a rank sends and receives in one `StageExperts`, at most.
        seconds: that a `StageExperts` and a `PlaceExperts` take: at first what warm-up found, None without it.
    """

    physical_to_logical: np.ndarray
    n_logical: int
    ranks: int
    hosts: int
    groups: int
    expert_share: float
    expert_bytes: int
    per_exchange: int
    seconds: tuple[float, float] | None = None


class LoadWindow(NamedTuple):
    """What `ReadLoads` gives: tokens since the last time, of the MoE layers, with the MTP module's layer last.

    logical: `[layers, logical experts]`, int64. by_rank: `[layers, ranks of an EP group]`, what each really computed.
    """

    logical: np.ndarray
    by_rank: np.ndarray

    def and_then(self, after: LoadWindow) -> LoadWindow:
        """Add what came after. Where experts are on other ranks by then (`/scale`), what each has computed since."""
        same = self.by_rank.shape == after.by_rank.shape
        return LoadWindow(self.logical + after.logical, self.by_rank + after.by_rank if same else after.by_rank)


class Exchanged(NamedTuple):
    """What `StageExperts` and `PlaceExperts` give: how long they took, and what went wrong. A layer is then placed as before."""

    seconds: float
    error: str | None = None


class ExpertMover(Protocol):
    """What an executor offers whose experts can be moved (`Executor.extension`)."""

    @property
    def slots(self) -> ExpertSlots:
        """Where experts are now."""
