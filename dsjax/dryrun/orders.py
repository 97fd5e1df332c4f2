"""`OrderReport`: sums of a step whose order of additions could depend on the layout or the batch, with the explanations that are known."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.dryrun.arguments import STEPS, DryRunArgs
from dsjax.dryrun.known_orders import KNOWN_ORDERS, KnownOrder
from dsjax.dryrun.program.order_differences import order_differences, signatures
from dsjax.dryrun.program.reductions import COMPILER, Reduction
from dsjax.dryrun.timeline import model_part
from dsjax.errors import UserError

Sums = Mapping[str, Sequence[Reduction]]
"""Program of a step (`step`, `drafts`) → its sums."""


@dataclass(frozen=True)
class OrderedSum:
    """Identical sums of one program at one place in the model."""

    program: str  # `step`, or `drafts` for the MTP module's passes after the step
    place: str  # scopes of the model and the traced operation: `place_of`
    sum: Reduction  # one of the identical sums
    times: float  # executions of all of them per run of the program; 0 if only another compilation has them
    compared: bool  # whether another compilation has this program
    # label of a compilation that adds in another order → its signatures at this place that the step's program lacks
    otherwise: Mapping[str, tuple[str, ...]]
    known: KnownOrder | None  # the entry of `KNOWN_ORDERS` that explains the order; None if there is none

    @property
    def could_depend(self) -> bool:
        """Whether the order could differ in another layout or batch, as far as the programs show."""
        if self.otherwise or set(self.sum.depends) - {COMPILER}:
            return True
        # The compiler chose one order for all compilations, if they were compared and the text gives the full order.
        return COMPILER in self.sum.depends and not (self.compared and self.sum.is_complete)

    @property
    def unexplained(self) -> bool:
        """Whether the order could depend on the layout or the batch and no known entry explains why."""
        return self.could_depend and self.known is None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a sum.

        `program`: `step` or `drafts`. `place`: scopes of the model and the traced operation. `carrier`, `what`: what computes the sum.
        `axes`: mesh axes of a collective. `depth`: terms per element, null if unknown. `times`: runs per step; 0 if only another
        compilation has the sum. `depends`: `mesh`, `rows`, `compiler`, `library`, `timing`, `values`, and `why`. `otherwise`: label of
        another compilation → its different order. `known`: name of the entry of `KNOWN_ORDERS` that explains the order, or null.
        """
        one = self.sum
        return {
            "program": self.program,
            "place": self.place,
            "carrier": one.carrier,
            "what": one.what,
            "dtype": one.dtype,
            "axes": None if one.axes is None else list(one.axes),
            "depth": one.depth,
            "order": one.order,
            "times": self.times,
            "depends": list(one.depends),
            "why": one.why,
            "otherwise": {label: list(signatures) for label, signatures in self.otherwise.items()},
            "could_depend": self.could_depend,
            "known": self.known.name if self.known else None,
            "name": one.name,
        }


@dataclass(frozen=True)
class OrderReport:
    """Sums of a step's programs."""

    sums: tuple[OrderedSum, ...]
    against: tuple[str, ...]  # labels of the other compilations

    @property
    def unexplained(self) -> tuple[OrderedSum, ...]:
        """Sums that could depend on the layout or the batch and that no entry of `KNOWN_ORDERS` explains."""
        return tuple(ordered_sum for ordered_sum in self.sums if ordered_sum.unexplained)

    def check(self) -> None:
        """Raise a `UserError` that names the unexplained sums."""
        missing = self.unexplained
        if missing:
            examples = "; ".join(f"{s.place} of the {s.program} ({s.sum.signature})" for s in missing[:5])
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise UserError(
                f"{len(missing)} sums could be added in an order that depends on the layout or the batch, and are not on the list of known "
                f"ones: {examples}{more}. Give each an order that depends on neither, or explain it in dsjax/dryrun/known_orders.py"
            )

    def to_json(self) -> dict[str, Any]:
        """`against`: labels of other compilations; `could_depend`, `unexplained`: numbers of sums; `sums`: `OrderedSum.to_json`."""
        return {
            "against": list(self.against),
            "could_depend": sum(one.could_depend for one in self.sums),
            "unexplained": len(self.unexplained),
            "sums": [one.to_json() for one in self.sums],
        }


def order_report(found: Sums, others: Mapping[str, Sums], known: Sequence[KnownOrder] = KNOWN_ORDERS) -> OrderReport:
    """Compare a step's sums with those of other compilations. others: label → sums of that compilation.

    Also report each sum that only another compilation has at some place.
    """
    rows: list[OrderedSum] = []
    for program, reductions in found.items():
        variants = {label: sums[program] for label, sums in others.items() if program in sums}
        rows += _ordered_sums(program, reductions, variants, known)
    return OrderReport(tuple(rows), tuple(others))


def _ordered_sums(
    program: str,
    reductions: Sequence[Reduction],
    variants: Mapping[str, Sequence[Reduction]],
    known: Sequence[KnownOrder],
) -> Iterator[OrderedSum]:
    """Yield the sums of one program. variants: label → sums of the same program in another compilation. known: explanations."""
    own_signatures = signatures(reductions, place_of)
    otherwise: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {}
    only_in_variants: list[Reduction] = []
    for label, sums in variants.items():
        for key, other_signatures in order_differences(own_signatures, signatures(sums, place_of)).items():
            otherwise.setdefault(key, {})[label] = other_signatures
        for reduction in sums:
            if place_of(reduction) not in own_signatures:
                only_in_variants.append(reduction)
                otherwise.setdefault((place_of(reduction), reduction.signature), {})[label] = (reduction.signature,)
    identical_sums: dict[tuple, list[Reduction]] = {}
    for reduction in (*reductions, *only_in_variants):
        key = (place_of(reduction), reduction.signature, reduction.axes, reduction.depends)
        identical_sums.setdefault(key, []).append(reduction)
    for (place, signature, *_), identical in identical_sums.items():
        times = sum(reduction.times for reduction in identical) if place in own_signatures else 0.0
        explained_by = next((entry for entry in known if entry.explains(place, identical[0])), None)
        other_orders = otherwise.get((place, signature), {})
        yield OrderedSum(program, place, identical[0], times, bool(variants), other_orders, explained_by)


def place_of(reduction: Reduction) -> str:
    """Return the model's scopes and the traced operation: ``mla_project/dense/pallas_call``. Drop numeric suffixes of scopes, because
    the scopes of the MTP module's passes end in their number of tokens."""
    if not reduction.op_name:
        return f"({reduction.what})"
    part = model_part(reduction.op_name)
    operation = reduction.op_name.rpartition("/")[2]
    scoped_operation = operation if part.startswith("(") else f"{part}/{operation}"
    return re.sub(r"_\d+(?=/)", "", scoped_operation)


def variant(args: DryRunArgs, text: str) -> DryRunArgs:
    """Return the arguments of a dry run with one option changed: ``batch=1``, ``mesh=dp=4,tp=8``, ``step=prefill`` or ``context=8192``.

    Raises:
        UserError: unknown option or invalid value.
    """
    name, _, value = text.partition("=")
    if name == "mesh" and value:
        return dataclasses.replace(args, engine=dataclasses.replace(args.engine, mesh=value))
    if name == "step" and value in STEPS:
        # A batch size for one kind of step does not apply to another.
        return dataclasses.replace(args, step=value, batch=None)
    if name in ("batch", "context") and value.isdecimal():
        return dataclasses.replace(args, **{name: int(value)})
    raise UserError(
        f"--against {text!r}: expected batch=ROWS, context=TOKENS, mesh=SPEC or step={'|'.join(STEPS)}, such as --against batch=1 "
        "--against mesh=dp=4,tp=8"
    )
