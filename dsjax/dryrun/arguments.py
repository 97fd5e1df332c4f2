"""`DryRunArgs`: an engine's options, the step to compile, and the compilation target."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from dsjax.config import ModelConfig
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device.buckets import Rectangle
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from sharding import MeshSpec

STEPS = ("decode", "prefill", "mixed")
DECODE_ROWS = 32
"""Running requests per DP rank if neither `--batch` nor `--max-num-seqs` is given."""
CONTEXT = 4096
"""Tokens that a row's page table covers if neither `--context` nor `--max-model-len` is given."""
_MOST_SLOTS = 2**31 - 1
"""Maximum cache slots per DP rank: slot numbers are signed 32-bit integers."""


class TooLarge(UserError):
    """The step is too large for the target device, or for any device."""


@dataclass(frozen=True, kw_only=True)
class DryRunArgs:
    """A step to compile, and its target."""

    engine: EngineArgs  # the serving options
    target: str = "cpu"  # `cpu`, a name in `configs/hardware`, or a file in the same format
    # `decode` (per row one token or, with speculative decoding, the last token and the drafts to verify), `prefill` (`prefill_chunk` tokens
    # per row), or `mixed` (decodes, plus prompts of `max_num_batched_tokens`)
    step: Literal["decode", "prefill", "mixed"] = "decode"
    # rows per DP rank (in a mixed step, decode rows); None: in a prefill step as many as `max_num_batched_tokens` allows, otherwise
    # `max_num_seqs` or 32
    batch: int | None = None
    # tokens of a row's page table; None: `max_model_len` or 4,096, at most the model's number of positions
    context: int | None = None

    def __post_init__(self):
        if self.step not in STEPS:
            raise UserError(f"--step is {self.step!r}, expected one of {', '.join(STEPS)}")
        for name in ("batch", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}, expected at least 1")
        if self.prefill and self.prefill.chunk > self.row_tokens:
            raise UserError(
                f"--prefill-chunk is {self.prefill.chunk}, more than the --context of {self.row_tokens}; "
                "lower the first or raise the second"
            )

    @property
    def decode(self) -> Rectangle | None:
        """Decode rows of a DP rank; None in a prefill step."""
        return None if self.step == "prefill" else Rectangle(self.rows, self.chunk)

    @property
    def prefill(self) -> Rectangle | None:
        """Prefill rows of a DP rank; None in a decode step."""
        if self.step == "decode":
            return None
        return Rectangle(self.rows if self.step == "prefill" else self._prompts, self.engine.chunk_tokens)

    @property
    def _prompts(self) -> int:
        return max(1, self.engine.max_num_batched_tokens // self.engine.chunk_tokens)

    @property
    def chunk(self) -> int:
        """Tokens per row; in a mixed step, tokens per decode row."""
        return self.engine.chunk_tokens if self.step == "prefill" else 1 + self.drafts

    @property
    def drafts(self) -> int:
        """Draft tokens per row at this number of rows: drafted after the step and, if it decodes, also verified in it."""
        return self.engine.speculation.drafts(self.rows) if self.engine.speculation else 0

    @property
    def rows(self) -> int:
        """Rows per DP rank."""
        if self.batch:
            return self.batch
        if self.step == "prefill":
            return self._prompts
        return self.engine.max_num_seqs or DECODE_ROWS

    @property
    def row_tokens(self) -> int:
        """Context positions per row."""
        return self.context or self.engine.max_model_len or CONTEXT

    def for_model(self, config: ModelConfig) -> EngineArgs:
        """Return the engine's options for the target device.

        A server resolves `dtype="auto"` to float32 on a CPU. A dry run models an accelerator, so it uses the checkpoint's dtype.
        """
        if self.engine.dtype != "auto":
            return self.engine
        return dataclasses.replace(self.engine, dtype="float32" if config.torch_dtype == "float32" else "bfloat16")

    def limits(self, config: ModelConfig, spec: MeshSpec) -> ExecutorLimits:
        """Return the executor's sizes. The cache has `cache_tokens`, or just enough for the rows, plus page 0, which is never used.

        Raises:
            TooLarge: the cache has more slots than a program can address.
        """
        page = self.engine.page_size_of(config)
        pages_of_a_row = -(-self.row_tokens // page)
        rows = sum(rectangle.rows for rectangle in (self.decode, self.prefill) if rectangle)
        pages = -(-self.engine.cache_tokens // page) if self.engine.cache_tokens else rows * pages_of_a_row
        slots = (pages + 1) * page  # with page 0
        if slots > _MOST_SLOTS:
            given = (
                "--cache-tokens"
                if self.engine.cache_tokens
                else f"--batch {self.rows:,} at --context {self.row_tokens:,}"
            )
            raise TooLarge(
                f"{given}: a DP rank's cache would have {slots:,} token slots, and a program can number {_MOST_SLOTS:,}; ask for less"
            )
        return ExecutorLimits(
            max_rows_decode=self.rows,
            max_rows_prefill=self.prefill.rows if self.prefill else self.rows,
            max_chunk=max(rectangle.chunk for rectangle in (self.decode, self.prefill) if rectangle),
            page_size=page,
            pages_per_rank=pages + 1,
            num_ranks=spec.dp_size,
            max_model_len=self.row_tokens,
            vocab_size=config.vocab_size,
        )
