"""`Backoff`: how long a disk or another process that failed is left alone. Plain Python."""

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0
"""How long it is left alone the first time, and at most."""


class Backoff:
    """Says how long something that failed is left alone: twice as long each time, until it does its work again."""

    def __init__(self):
        self._seconds = FIRST_SECONDS
        self._until = float("-inf")

    def begin(self, now: float) -> None:
        """Leave it alone, since it failed. What fails while it is left alone was begun before, and changes nothing."""
        if not self.holds(now):
            self._until = now + self._seconds
            self._seconds = min(2 * self._seconds, LONGEST_SECONDS)

    def holds(self, now: float) -> bool:
        """Whether it is left alone now."""
        return now < self._until

    def end(self) -> None:
        """Begin anew with the shortest time, since it has done its work."""
        self._seconds = FIRST_SECONDS
