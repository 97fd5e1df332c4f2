"""``DispatchConfig``: which way tokens travel to their experts, and how wide the buffers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sharding.errors import MeshError

if TYPE_CHECKING:  # the planner reads this file without JAX
    from sharding.dispatch.group import InMemory

METHODS = ("auto", "gather", "padded", "ragged")
WIRES = ("compute", "fp8")


@dataclass(frozen=True)
class DispatchConfig:
    """How rows are exchanged inside an EP group. Every setting gives the same result; they differ in cost.

    method: ``gather``, ``padded``, ``ragged``, or ``auto`` (``sharding.dispatch.choice`` has the rule).
    capacity: rows that one rank may send to another in one round of ``padded`` or of the emulated ``ragged``;
        None applies ``default_capacity``. Tokens over capacity go in further rounds.
    wire: ``compute`` sends rows in their own dtype; ``fp8`` sends e4m3 with a float32 scale per 128 values. The way
        back is always in the compute dtype.
    chunk_tokens: most tokens of a rank in one exchange; larger inputs go through a ``lax.scan``. None: no bound.
    report: whether ``dispatch`` also returns counts (tokens per expert, rows, rounds).
    overlapped: whether something else is computed while rows travel. ``auto`` then takes no ``ragged``, beside which XLA's scheduler for
        GPUs puts nothing (``docs/dryrun.md``), and the default capacity is rounded up to 4 instead of 8, as each half of a batch has
        its own.
    by_choice: whether what a token's experts give comes back apart, and is added where the token is, in the order of its choices: then a
        token's sum has the same bits whatever the method, the mesh and the placement of experts (``docs/exactness.md``). Otherwise a rank
        adds what its experts give before it answers, which moves fewer rows.
    in_memory: carries rows between devices of one process, in the place of XLA's collectives; with ``by_choice``, and not with
        ``overlapped``, as exchanges then are not one after the other. None: XLA's.
    """

    method: Literal["auto", "gather", "padded", "ragged"] = "auto"
    capacity: int | None = None
    wire: Literal["compute", "fp8"] = "compute"
    chunk_tokens: int | None = None
    report: bool = False
    by_choice: bool = False
    overlapped: bool = False
    in_memory: InMemory | None = None

    def __post_init__(self):
        if self.method not in METHODS:
            raise MeshError(f"dispatch method {self.method!r}; expected one of {METHODS}")
        if self.wire not in WIRES:
            raise MeshError(f"dispatch wire {self.wire!r}; expected one of {WIRES}")
        if self.in_memory is not None and (self.overlapped or not self.by_choice):
            raise MeshError("rows pass in memory where terms come back by choice and exchanges are one after the other")
        for name in ("capacity", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MeshError(f"dispatch {name}={value}; expected at least 1, or None for the default")


def default_capacity(tokens: int, top_k: int, ranks: int, overlapped: bool = False) -> int:
    """Rows that a rank may send to one other rank per round, when none is configured.

    tokens: tokens of the sending rank; ranks: size of the EP group. With even routing a token has an expert on a given
    rank with probability ``p = 1 - (1 - 1/ranks)^top_k``; the rule takes the mean ``tokens * p`` plus four standard
    deviations, so that a further round (two more collectives for the whole group) is rare under even routing, rounds
    it up to a multiple of 8, or 4 where exchanges are ``overlapped``, and never exceeds ``tokens``, at which no second round is possible.
    """
    p = 1.0 - (1.0 - 1.0 / ranks) ** top_k
    wanted = tokens * p + 4.0 * (tokens * p * (1.0 - p)) ** 0.5
    multiple = 4 if overlapped else 8
    return max(1, min(tokens, multiple * -(-int(wanted + 0.999) // multiple)))
