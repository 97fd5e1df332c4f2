"""What changes during training, as functions of the step: learning rate, row length, balancing speed, MTP weight."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Two cycles of warm-up and decay to nothing; the first has a constant rate between them and short rows.

    Nothing in a cycle before its decay depends on its length, and nothing in the first cycle on the second.
    """

    steps: int = 3080
    """In all; the second cycle begins after `first_steps`."""
    first_steps: int = 1080
    batch_tokens: int = 4096
    peak_rate: float = 0.004
    second_rate: float = 0.006
    warmup_steps: int = 50
    decay_steps: int = 580
    """Steps over which the first cycle decays; the second decays from its beginning."""
    short_steps: int = 500
    """Steps at the beginning with rows of `short_length` tokens."""
    long_steps: int = 60
    """Steps at the end of the first cycle with rows of `long_length` tokens."""
    second_middle_steps: int = 500
    """Steps of the second cycle, before its last ones, with rows of `middle_length` tokens."""
    second_long_steps: int = 150
    """Steps at the end of the second cycle with rows of `long_length` tokens."""
    short_length: int = 256
    length: int = 512
    middle_length: int = 1024
    long_length: int = 2048
    capacity_factor: float = 1.3
    """An expert takes at most this many times the mean load; what is over is dropped (in training only)."""

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up, constant, linear decay (Hägele et al., arXiv 2405.18392)."""
        second = step >= self.first_steps
        peak, begun = (self.second_rate, step - self.first_steps) if second else (self.peak_rate, step)
        return peak * min(1.0, (begun + 1) / self.warmup_steps) * self.remaining(step)

    def remaining(self, step: int) -> float:
        """What the decay has left of the cycle's peak rate: 1 before it, 0 at the end."""
        if step < self.first_steps:
            return min(1.0, (self.first_steps - step) / self.decay_steps)
        return (self.steps - step) / (self.steps - self.first_steps)

    def row_length(self, step: int) -> int:
        """Tokens a row."""
        if step >= self.first_steps:
            left = self.steps - step
            if left <= self.second_long_steps:
                return self.long_length
            return self.middle_length if left <= self.second_long_steps + self.second_middle_steps else self.length
        if step >= self.first_steps - self.long_steps:
            return self.long_length
        return self.short_length if step < self.short_steps else self.length

    def bias_speed(self, step: int) -> float:
        """By how much the balancing bias moves in a step. It falls with the learning rate: slower, the router outruns it."""
        return 0.005 * max(0.1, self.remaining(step))

    def mtp_weight(self, step: int) -> float:
        """Weight of the MTP loss: 0.3, and 0.1 from the first decay on (V3 report §4.2)."""
        return 0.1 if step >= self.first_steps or self.remaining(step) < 1 else 0.3
