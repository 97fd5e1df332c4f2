"""`SpeculativeConfig`: how many tokens the MTP module drafts ahead of the model, and at which load."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dsjax.engine.contract.json_option import JsonOption, is_integer

METHODS = ("mtp", "deepseek_mtp")
"""Accepted names; the second is vLLM's older name of the first."""
MOST_DRAFTS = 4
"""The module is trained to predict one token. Each further draft applies it to its own prediction and is accepted less often."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(JsonOption):
    """Speculative decoding options, with vLLM's field names. The constructor checks them.

    Raises:
        UserError: a wrong value, with the field's name, the value found and the values allowed.
    """

    flag: ClassVar[str] = "--speculative-config"
    example: ClassVar[str] = '\'{"method": "mtp", "num_speculative_tokens": 2}\''
    required: ClassVar[tuple[str, ...]] = ("method",)

    method: str  # `mtp`, the model's own MTP module drafts
    num_speculative_tokens: int = 1  # maximum number of drafts per row, 1 to 4
    # ranges `(low, high, n)`: while `low` to `high` requests are running on a DP rank, each row drafts `n` tokens, 0 for none. Ranges begin
    # at 1 without gaps; the last range also applies above its `high`. "auto": the engine measures which number is fastest
    # (`schedule/draft_choice.py`). None: `num_speculative_tokens` at any load
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | Literal["auto"] | None = None

    def __post_init__(self):
        self.check(self.method in METHODS, "method", '"mtp"')
        object.__setattr__(self, "method", "mtp")
        most = self.num_speculative_tokens
        is_right = is_integer(most) and 1 <= most <= MOST_DRAFTS
        self.check(is_right, "num_speculative_tokens", f"an integer from 1 to {MOST_DRAFTS}")
        if self.num_speculative_tokens_per_batch_size is not None and not self.measures:
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", self._checked_ranges())

    @property
    def measures(self) -> bool:
        """Whether the engine measures and chooses the number of drafts ("auto")."""
        return self.num_speculative_tokens_per_batch_size == "auto"

    @property
    def after_prompts(self) -> int:
        """Drafts after a prompt in a step without other drafts: 1 with "auto", so that the module's cache has every prompt; else 0."""
        return int(self.measures)

    def counts(self, least: int, most: int) -> list[int]:
        """Return the possible numbers of drafts per row while `least` to `most` requests are running on its DP rank, ascending."""
        if self.measures:
            return list(range(self.num_speculative_tokens + 1))
        return sorted({self.drafts(running) for running in range(least, most + 1)})

    def drafts(self, running: int) -> int:
        """Return the number of drafts per row while `running` requests are running on its DP rank; with "auto" the largest number."""
        if self.num_speculative_tokens_per_batch_size is None or self.measures:
            return self.num_speculative_tokens
        ranges = self.num_speculative_tokens_per_batch_size
        return next((n for _, high, n in ranges if running <= high), ranges[-1][2])

    def _checked_ranges(self) -> tuple[tuple[int, int, int], ...]:
        name = "num_speculative_tokens_per_batch_size"
        ranges = self.num_speculative_tokens_per_batch_size
        expected = 'a list of ranges [low, high, n], such as [[1, 64, 2], [65, 4096, 0]], or "auto"'
        self.check(isinstance(ranges, list | tuple) and bool(ranges), name, expected)
        expected_low = 1
        most = self.num_speculative_tokens
        for entry in ranges:
            is_triple = isinstance(entry, list | tuple) and len(entry) == 3 and all(map(is_integer, entry))
            self.check(is_triple, name, f"three integers [low, high, n] in place of {entry!r}")
            low, high, n = entry
            begins = f"{list(entry)} to begin at {expected_low}: ranges start at 1 and leave no gap"
            self.check(low == expected_low, name, begins)
            self.check(high >= low, name, f"{list(entry)} to end at {low} or more")
            self.check(0 <= n <= most, name, f"{list(entry)} to draft 0 to num_speculative_tokens = {most}")
            expected_low = high + 1
        return tuple((low, high, n) for low, high, n in ranges)
