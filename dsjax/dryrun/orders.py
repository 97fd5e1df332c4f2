"""`OrderReport`: the sums of a step whose order of additions could depend on the layout or the batch, and which of them are explained."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
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
    """One way in which a program makes a sum, at one place of the model, however often.

    program: `step`, or `drafts` of the module's passes after it. place: the model's scopes and the traced operation. sum: one of
    those that are alike. times: of all of them in one run. compared: whether the step was compiled otherwise too;
    otherwise: label of a compilation that makes it otherwise → how, as far as that is not told of another sum of this place.
    known: the entry of the list that explains it; None where none does.
    """

    program: str
    place: str
    sum: Reduction
    times: float
    compared: bool
    otherwise: Mapping[str, tuple[str, ...]]
    known: KnownOrder | None

    @property
    def could_depend(self) -> bool:
        """Whether the order could be another one in another layout or batch, as far as the programs tell."""
        if self.otherwise or set(self.sum.depends) - {COMPILER}:
            return True
        # What the compiler chose for this shape, it has chosen alike for the others.
        return COMPILER in self.sum.depends and not (self.compared and self.sum.told)

    @property
    def unexplained(self) -> bool:
        """Whether it could depend on them and no entry says why that is so."""
        return self.could_depend and self.known is None

    def to_json(self) -> dict[str, Any]:
        """Fields of a sum.

        `program`: `step` or `drafts`. `place`: scopes of the model and the traced operation. `carrier`, `what`: what makes the sum.
        `axes`: mesh axes of a collective. `depth`: terms of an element, null where unknown. `times`: in a step; 0 where only another
        compilation has the sum. `depends`: `mesh`, `rows`, `compiler`, `library`, `timing`, `values`, and `why`. `otherwise`: label of
        another compilation → how it makes the sum, where that differs. `known`: the entry of the list that explains it, or null.
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
            "otherwise": {label: list(ways) for label, ways in self.otherwise.items()},
            "could_depend": self.could_depend,
            "known": self.known.name if self.known else None,
            "name": one.name,
        }


@dataclass(frozen=True)
class OrderReport:
    """The sums of a step's programs. against: labels of what the step was compiled as too."""

    sums: tuple[OrderedSum, ...]
    against: tuple[str, ...]

    @property
    def unexplained(self) -> tuple[OrderedSum, ...]:
        """Those that could depend on the layout or the batch and are not on the list."""
        return tuple(one for one in self.sums if one.unexplained)

    def check(self) -> None:
        """Raise a `UserError` that names the sums that are unexplained."""
        missing = self.unexplained
        if missing:
            named = "; ".join(f"{one.place} of the {one.program} ({one.sum.signature})" for one in missing[:5])
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise UserError(
                f"{len(missing)} sums could be added in an order that depends on the layout or the batch, and are not on the list of known "
                f"ones: {named}{more}. Give each an order that depends on neither, or explain it in dsjax/dryrun/known_orders.py"
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
    """Compare a step with the same one compiled otherwise. others: label → its sums.

    A place that only another compilation has a sum at is reported with that compilation's sum.
    """
    rows = []
    for program, reductions in found.items():
        here = signatures(reductions, place_of)
        differences: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {}
        elsewhere: list[Reduction] = []
        compared = False
        for label, sums in others.items():
            if program not in sums:
                continue
            compared = True
            for way, others_ways in order_differences(here, signatures(sums[program], place_of)).items():
                differences.setdefault(way, {})[label] = others_ways
            for one in sums[program]:
                if place_of(one) not in here:
                    elsewhere.append(one)
                    differences.setdefault((place_of(one), one.signature), {})[label] = (one.signature,)
        grouped: dict[tuple, list[Reduction]] = {}
        for one in (*reductions, *elsewhere):
            grouped.setdefault((place_of(one), one.signature, one.axes, one.depends), []).append(one)
        for (place, way, *_), alike in grouped.items():
            times = sum(one.times for one in alike) if place in here else 0.0
            reason = next((entry for entry in known if entry.explains(place, alike[0])), None)
            otherwise = differences.get((place, way), {})
            rows.append(OrderedSum(program, place, alike[0], times, compared, otherwise, reason))
    return OrderReport(tuple(rows), tuple(others))


def place_of(reduction: Reduction) -> str:
    """The model's scopes and the traced operation: ``mla_project/dense/pallas_call``. Numbers that scopes end in are left out, as the
    module's passes are named by their tokens."""
    if not reduction.op_name:
        return f"({reduction.what})"
    part, operation = model_part(reduction.op_name), reduction.op_name.rpartition("/")[2]
    named = operation if part.startswith("(") else f"{part}/{operation}"
    return re.sub(r"_\d+(?=/)", "", named)


def variant(args: DryRunArgs, text: str) -> DryRunArgs:
    """Change one thing of a dry run: ``batch=1``, ``mesh=dp=4,tp=8``, ``step=prefill`` or ``context=8192``.

    Raises:
        UserError: another word, or a value that cannot be.
    """
    name, _, value = text.partition("=")
    if name == "mesh" and value:
        return dataclasses.replace(args, engine=dataclasses.replace(args.engine, mesh=value))
    if name == "step" and value in STEPS:
        # The rows of one kind of step say nothing of another's.
        return dataclasses.replace(args, step=value, batch=None)
    if name in ("batch", "context") and value.isdecimal():
        return dataclasses.replace(args, **{name: int(value)})
    raise UserError(
        f"--against {text!r}: expected batch=ROWS, context=TOKENS, mesh=SPEC or step={'|'.join(STEPS)}, such as --against batch=1 "
        "--against mesh=dp=4,tp=8"
    )
