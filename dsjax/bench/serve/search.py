"""`Search`: the largest load that meets the objectives, in few points: doubled until it fails, then halved in between."""

from dataclasses import dataclass

_TOLERANCE = 0.05
"""The search ends where the load that fails is at most so much more than the one that meets."""

_MOST = {"concurrency": 65_536, "rate": 100_000.0}
_LEAST_RATE = 1 / 1024


@dataclass
class Search:
    """Which load to try next, and what is known so far.

    Attributes:
        quantity: `concurrency` (whole numbers) or `rate` (requests a second).
        best: the largest load that met the objectives; None as long as there is none.
        failed: the smallest that did not.
    """

    quantity: str
    best: float | None = None
    failed: float | None = None

    def next(self) -> float | None:
        """The load to try; None when the answer is known."""
        best, failed, whole = self.best, self.failed, self.quantity == "concurrency"
        if best is None and failed is None:
            return 1
        if failed is None:
            return best * 2 if best * 2 <= _MOST[self.quantity] else None
        if best is None:
            return None if whole or failed <= _LEAST_RATE else failed / 2
        if whole:
            between = (int(best) + int(failed)) // 2
            return between if failed - best > max(1, _TOLERANCE * best) else None
        return (best + failed) / 2 if failed - best > _TOLERANCE * best else None

    def enter(self, load: float, share: float | None, wanted: float) -> None:
        """What came of a load: the share of its requests that met every objective; None where none was answered."""
        if share is not None and share >= wanted:
            self.best = load if self.best is None else max(self.best, load)
        else:
            self.failed = load if self.failed is None else min(self.failed, load)

    def sentence(self, wanted: float, objectives: dict[str, float]) -> str:
        """The answer."""
        said = " ".join(f"{name} ≤ {limit:g} ms" for name, limit in objectives.items())
        goal = f"at which {wanted:.0%} of the requests have {said}"
        if self.best is None:
            return f"no {self.quantity} was found {goal}; the least that was tried is {self.failed or 0:g}"
        more = f"{self.failed:g} does not" if self.failed is not None else "none that was tried does not"
        unit = " requests/s" if self.quantity == "rate" else ""
        return f"largest {self.quantity} {goal}: {self.best:.4g}{unit} ({more})"
