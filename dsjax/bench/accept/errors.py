"""`NotTestedError`: what a measurement raises where it cannot be made."""


class NotTestedError(Exception):
    """A measurement, or some of its values, cannot be had here; the message says why, and what would make it testable."""
