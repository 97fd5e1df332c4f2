"""`SpeculativeConfig`: how many tokens the MTP module drafts ahead of the model, and at which load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dsjax.engine.contract.json_option import is_integer, parse_json_option, wrong_field

METHODS = ("mtp", "deepseek_mtp")
"""Accepted names; the second is an older name of the first in vLLM, and means the same."""
MOST_DRAFTS = 4
"""The module is trained for one token ahead; each further draft applies it to its own guess, and fewer of them are accepted."""

FLAG = "--speculative-config"
EXAMPLE = '\'{"method": "mtp", "num_speculative_tokens": 2}\''


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding, with vLLM's names for its fields. Checked when made.

    method: what drafts: `mtp`, the model's own MTP module. num_speculative_tokens: most drafts of a row, 1 to 4.
    num_speculative_tokens_per_batch_size: ranges `(low, high, n)`: while `low` to `high` requests are running on a DP rank, each
    row drafts `n` tokens, 0 for none. The ranges begin at 1 and follow one another without a gap; the last one also holds for
    more requests than its `high`. None: `num_speculative_tokens` at any load.

    Raises:
        UserError: a value that cannot be, with the field's name, what was found and what would fit.
    """

    method: str
    num_speculative_tokens: int = 1
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self):
        if self.method not in METHODS:
            raise _wrong("method", self.method, '"mtp"')
        object.__setattr__(self, "method", "mtp")
        if not is_integer(self.num_speculative_tokens) or not 1 <= self.num_speculative_tokens <= MOST_DRAFTS:
            raise _wrong("num_speculative_tokens", self.num_speculative_tokens, f"an integer from 1 to {MOST_DRAFTS}")
        if self.num_speculative_tokens_per_batch_size is not None:
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", self._checked_ranges())

    @classmethod
    def parse(cls, given: str | Mapping[str, Any]) -> SpeculativeConfig:
        """From the JSON text of the command line, or the dictionary of `LLM(speculative_config=…)`.

        Raises:
            UserError: no JSON object, an unknown field, a missing one, or a value that cannot be.
        """
        return parse_json_option(cls, given, FLAG, EXAMPLE, required=("method",))

    def drafts(self, running: int) -> int:
        """How many tokens each row drafts while `running` requests are running on its DP rank."""
        if self.num_speculative_tokens_per_batch_size is None:
            return self.num_speculative_tokens
        ranges = self.num_speculative_tokens_per_batch_size
        return next((n for _, high, n in ranges if running <= high), ranges[-1][2])

    def counts(self) -> tuple[int, ...]:
        """The numbers of drafts that `drafts` can answer, ascending: what must be compiled."""
        if self.num_speculative_tokens_per_batch_size is None:
            return (self.num_speculative_tokens,)
        return tuple(sorted({n for _, _, n in self.num_speculative_tokens_per_batch_size}))

    def _checked_ranges(self) -> tuple[tuple[int, int, int], ...]:
        name, ranges = "num_speculative_tokens_per_batch_size", self.num_speculative_tokens_per_batch_size
        if not isinstance(ranges, list | tuple) or not ranges:
            raise _wrong(name, ranges, "a list of ranges [low, high, n], such as [[1, 64, 2], [65, 4096, 0]]")
        expected_low = 1
        for entry in ranges:
            if not isinstance(entry, list | tuple) or len(entry) != 3 or not all(map(is_integer, entry)):
                raise _wrong(name, ranges, f"three integers [low, high, n] in place of {entry!r}")
            low, high, n = entry
            if low != expected_low:
                raise _wrong(
                    name, ranges, f"{list(entry)} to begin at {expected_low}: ranges start at 1 and leave no gap"
                )
            if high < low:
                raise _wrong(name, ranges, f"{list(entry)} to end at {low} or more")
            if not 0 <= n <= self.num_speculative_tokens:
                raise _wrong(
                    name, ranges, f"{list(entry)} to draft 0 to num_speculative_tokens = {self.num_speculative_tokens}"
                )
            expected_low = high + 1
        return tuple((low, high, n) for low, high, n in ranges)


_wrong = partial(wrong_field, FLAG)
