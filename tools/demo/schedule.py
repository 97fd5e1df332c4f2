"""What changes during training, as functions of the step: learning rate, row length, balancing speed, MTP weight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up, a constant rate, then decay to nothing ("WSD").

    Nothing before the decay depends on `steps`, so a run can be prolonged from a checkpoint taken before it.
    """

    steps: int = 1080
    batch_tokens: int = 4096
    peak_rate: float = 0.004
    warmup_steps: int = 50
    decay_steps: int = 580
    short_steps: int = 500
    """Steps at the beginning with rows of `short_length` tokens."""
    long_steps: int = 60
    """Steps at the end with rows of `long_length` tokens."""
    short_length: int = 256
    length: int = 512
    long_length: int = 2048
    capacity_factor: float = 1.3
    """An expert takes at most this many times the mean load; what is over is dropped (in training only)."""

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up, constant, linear decay (Hägele et al., arXiv 2405.18392)."""
        return self.peak_rate * min(1.0, (step + 1) / self.warmup_steps) * self.remaining(step)

    def remaining(self, step: int) -> float:
        """What the decay has left of the peak rate: 1 before it, 0 at the end."""
        return min(1.0, (self.steps - step) / self.decay_steps)

    def row_length(self, step: int) -> int:
        """Tokens a row."""
        if step >= self.steps - self.long_steps:
            return self.long_length
        return self.short_length if step < self.short_steps else self.length

    def bias_speed(self, step: int) -> float:
        """By how much the balancing bias moves in a step. It falls with the learning rate: slower, the router outruns it."""
        return 0.005 * max(0.1, self.remaining(step))

    def mtp_weight(self, step: int) -> float:
        """Weight of the MTP loss: 0.3, and 0.1 in the decay (V3 report §4.2)."""
        return 0.1 if self.remaining(step) < 1 else 0.3
