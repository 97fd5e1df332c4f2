"""`ExpertOptions` and `EplbConfig`: redundant experts, when a rebalance by load happens, and how much is sent between two steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from dsjax.engine.contract.json_option import JsonOption
from dsjax.errors import UserError
from dsjax.options import Group, advanced, option

if TYPE_CHECKING:  # engines that do not balance experts need no NumPy here
    import numpy as np

POLICIES = ("auto", "global", "hierarchical")
MOST_UNREAD = 4096
"""Maximum steps between two reads of the devices' counters, so that the 32-bit counters cannot overflow."""


class RebalanceUnderWayError(UserError):
    """A rebalance was requested while another one is in progress."""


@dataclass(frozen=True, kw_only=True)
class EplbConfig(JsonOption):
    """Online expert balancing (EPLB), with vLLM's field names. Validated when constructed.

    Raises:
        UserError: invalid value; the message has the field's name, the value found and the values allowed.
    """

    flag: ClassVar[str] = "--eplb-config"
    example: ClassVar[str] = '\'{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000}\''

    window_size: int = 1000  # number of recent steps whose load determines a placement
    step_interval: int = 3000  # steps between two decisions
    # physical experts in addition to the logical ones; None: the value of `--redundant-experts`
    num_redundant_experts: int | None = None
    log_balancedness: bool = False  # whether to log the balancedness of each window
    # maximum bytes that a device receives between two steps; at least one expert is always sent
    max_bytes_per_step: int = 128 * 2**20
    # minimum ratio of the predicted gain over `step_interval` steps to the cost for a layer to change; 0: change every layer that gains
    payback: float = 1.0
    # placement algorithm (`sharding.balancing.rebalance`); `auto` means `hierarchical` if the mesh spans several hosts
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
        """Steps between two reads of the loads."""
        return min(self.window_size, self.step_interval, MOST_UNREAD)


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Options for redundant experts and for moving experts."""

    redundant_experts: int = option(0, "Redundant experts per layer.", Group.EXPERTS, least=0)
    enable_eplb: bool = option(False, "Enable expert load balancing (EPLB).", Group.EXPERTS)
    eplb_config: str | dict[str, Any] | None = advanced(
        None,
        """EPLB configuration with vLLM's names. JSON: '{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000, """
        """"log_balancedness": true, "max_bytes_per_step": 134217728, "payback": 1, "policy": "auto"}'.""",
        Group.EXPERTS,
    )
    init_expert_location: str | None = advanced(
        None, "File with expert loads or placement from /dump_expert_distribution_record.", Group.EXPERTS
    )

    @property
    def eplb(self) -> EplbConfig | None:
        """The parsed `eplb_config`, or the defaults; None without `enable_eplb`. Raises like `JsonOption.parse`."""
        if not self.enable_eplb:
            return None
        return EplbConfig() if self.eplb_config is None else EplbConfig.parse(self.eplb_config)

    @property
    def num_redundant(self) -> int:
        """Number of redundant experts, from either of the two options. Raises `UserError` if both are set and differ."""
        balanced = self.eplb.num_redundant_experts if self.eplb else None
        if balanced is not None and self.redundant_experts not in (0, balanced):
            raise UserError(
                f"--redundant-experts is {self.redundant_experts}, and num_redundant_experts in --eplb-config is {balanced}; "
                "give one of them"
            )
        return self.redundant_experts if balanced is None else balanced


@dataclass(frozen=True)
class BalanceStats:
    """Statistics of expert balancing: totals since the start, and the last window."""

    windows: int = 0  # load windows read
    # mean ÷ max over ranks in the last window, as the ratio of sums over layers (as vLLM logs it); 1 is perfect
    balancedness: float = 1.0
    layer_balancedness: float = 1.0  # the same as the mean of the layers' ratios (as SGLang logs it)
    # tokens that each rank of an EP group computed in the last window, summed over all layers
    rank_tokens: tuple[int, ...] = ()
    rebalances: int = 0  # completed ones
    failures: int = 0  # aborted ones
    layers_changed: int = 0
    experts_moved: int = 0
    bytes_moved: int = 0  # bytes of the moved experts, on all devices of an EP group
    exchanges: int = 0  # `StageExperts` and `PlaceExperts` executed
    exchange_seconds: float = 0.0
    rebalance_seconds: float = 0.0  # of completed ones
    layers_left: int = 0  # in the current rebalance


@dataclass(frozen=True, eq=False)
class ExpertSlots:
    """Current placement of the experts, and the cost of moving them."""

    # `[MoE layers, physical slots]`, with the MTP module's layer last; slots are ordered by rank
    physical_to_logical: np.ndarray
    n_logical: int
    ranks: int  # size of an EP group
    hosts: int  # machines with equal runs of ranks
    groups: int  # expert groups, for group-limited routing
    expert_share: float  # share of the routed experts in a token's compute, by activated parameters
    expert_bytes: int  # of one expert on one device
    per_exchange: int  # maximum experts that a rank sends and receives in one `StageExperts`
    # duration of one `StageExperts` and one `PlaceExperts`; initially from warm-up, None without it
    seconds: tuple[float, float] | None = None


class LoadWindow(NamedTuple):
    """Result of `ReadLoads`: token counts of the MoE layers since the last read, with the MTP module's layer last."""

    logical: np.ndarray  # `[layers, logical experts]`, int64
    by_rank: np.ndarray  # `[layers, ranks of an EP group]`, tokens that each rank actually computed

    def and_then(self, after: LoadWindow) -> LoadWindow:
        """Return the sum with a later window. If the ranks have changed since (`/scale`), keep only the later `by_rank`."""
        same = self.by_rank.shape == after.by_rank.shape
        return LoadWindow(self.logical + after.logical, self.by_rank + after.by_rank if same else after.by_rank)


class Exchanged(NamedTuple):
    """Result of `StageExperts` and `PlaceExperts`: duration and error, if any. After an error the layer keeps its old placement."""

    seconds: float
    error: str | None = None


class ExpertMover(Protocol):
    """Extension of executors that can move experts (`Executor.extension`)."""

    @property
    def slots(self) -> ExpertSlots:
        """Current placement of the experts."""
