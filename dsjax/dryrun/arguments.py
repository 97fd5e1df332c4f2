"""`DryRunArgs`: an engine's options, and which of its steps to compile for what."""

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
"""Running requests of a DP rank when neither `--batch` nor `--max-num-seqs` is given."""
CONTEXT = 4096
"""Tokens that a row's page table covers when neither `--context` nor `--max-model-len` is given."""
_MOST_SLOTS = 2**31 - 1
"""Cache slots of a DP rank, which have numbers of 32 bits with a sign."""


class TooLarge(UserError):
    """A step that is too large for the device, or for any."""


@dataclass(frozen=True, kw_only=True)
class DryRunArgs:
    """What to compile.

    engine: the options that would serve. target: `cpu`, a name of `configs/hardware`, or a file like those.
    step: `decode` (each row one token, or with speculative decoding its last token and the drafts that are verified), `prefill`
    (each row `prefill_chunk` tokens), or `mixed` (decodes, and beside them the prompts of `max_num_batched_tokens`). batch: rows of a DP
    rank, in a mixed step its decodes; None:
    `max_num_seqs`, or 32 decodes, or as many prefill rows as `max_num_batched_tokens` allows. context: tokens of a row's
    page table; None: `max_model_len`, or 4,096, or as many as the model has positions.
    """

    engine: EngineArgs
    target: str = "cpu"
    step: Literal["decode", "prefill", "mixed"] = "decode"
    batch: int | None = None
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
        """Decodes of a DP rank; None in a step without any."""
        return None if self.step == "prefill" else Rectangle(self.rows, self.chunk)

    @property
    def prefill(self) -> Rectangle | None:
        """Rows of prompts of a DP rank; None in a step without any."""
        if self.step == "decode":
            return None
        return Rectangle(self.rows if self.step == "prefill" else self._prompts, self.engine.chunk_tokens)

    @property
    def _prompts(self) -> int:
        return max(1, self.engine.max_num_batched_tokens // self.engine.chunk_tokens)

    @property
    def chunk(self) -> int:
        """Tokens of a row in this step, in a mixed one of its decodes."""
        return self.engine.chunk_tokens if self.step == "prefill" else 1 + self.drafts

    @property
    def drafts(self) -> int:
        """Tokens that each row drafts after this step, at this many rows; as many are verified in a decode."""
        return self.engine.speculation.drafts(self.rows) if self.engine.speculation else 0

    @property
    def rows(self) -> int:
        """Rows of a DP rank."""
        if self.batch:
            return self.batch
        if self.step == "prefill":
            return self._prompts
        return self.engine.max_num_seqs or DECODE_ROWS

    @property
    def row_tokens(self) -> int:
        """Context positions of a row."""
        return self.context or self.engine.max_model_len or CONTEXT

    def for_model(self, config: ModelConfig) -> EngineArgs:
        """The engine's options on the machine that the target stands for.

        `dtype="auto"` is float32 on a real CPU; a dry run stands in for an accelerator, and computes in the checkpoint's dtype.
        """
        if self.engine.dtype != "auto":
            return self.engine
        return dataclasses.replace(self.engine, dtype="float32" if config.torch_dtype == "float32" else "bfloat16")

    def limits(self, config: ModelConfig, spec: MeshSpec) -> ExecutorLimits:
        """The executor's sizes: a cache of `cache_tokens`, or of just what the rows need, and page 0, which is never used.

        Raises:
            TooLarge: more slots than a program can number.
        """
        page = self.engine.page_size_of(config)
        pages_of_a_row = -(-self.row_tokens // page)
        rows = sum(rectangle.rows for rectangle in (self.decode, self.prefill) if rectangle)
        wanted = -(-self.engine.cache_tokens // page) if self.engine.cache_tokens else rows * pages_of_a_row
        slots = (wanted + 1) * page  # with page 0
        if slots > _MOST_SLOTS:
            asked = (
                "--cache-tokens"
                if self.engine.cache_tokens
                else f"--batch {self.rows:,} at --context {self.row_tokens:,}"
            )
            raise TooLarge(
                f"{asked}: a DP rank's cache would have {slots:,} token slots, and a program can number {_MOST_SLOTS:,}; ask for less"
            )
        return ExecutorLimits(
            max_rows_decode=self.rows,
            max_rows_prefill=self.prefill.rows if self.prefill else self.rows,
            max_chunk=max(rectangle.chunk for rectangle in (self.decode, self.prefill) if rectangle),
            page_size=page,
            pages_per_rank=wanted + 1,
            num_ranks=spec.dp_size,
            max_model_len=self.row_tokens,
            vocab_size=config.vocab_size,
        )
