"""`Engine`: what a serving program can do, so that nothing is credited to a plan which the program that runs it lacks."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from dsjax.errors import UserError
from dsjax.plan.precision import BF16, FP8_CACHE, Precision


@dataclass(frozen=True)
class Engine:
    """balances: places experts by their load. overlaps: two half batches. transfers: caches from prefill to decode.
    drafts: with the MTP module. fp4: loads FP4 experts. int8: loads block-wise INT8 weights. fp8_cache: bytes a
    value of its FP8 latent cache, None without one.
    dispatch: of tokens to experts, by default. eager: starts the kernels of a prefill step one by one, and each pass of the
    MTP module by itself; otherwise one compiled program has all of them.
    most_drafts: tokens that it drafts a step at most, None where no bound is known.
    """

    name: str
    balances: bool
    overlaps: bool
    transfers: bool
    drafts: bool
    fp4: bool
    fp8_cache: float | None
    dispatch: str
    eager: bool
    int8: bool = False
    most_drafts: int | None = None

    def check(
        self,
        *,
        separated: bool,
        overlap: bool,
        drafts: int,
        fp4: bool,
        fp8_cache: bool,
        dispatch: str,
        int8: bool = False,
    ) -> None:
        """Raise `UserError` where something is asked for that this engine cannot do."""
        asked = (
            (separated and not self.transfers, "--mode separated", "does not move caches between instances"),
            (overlap and not self.overlaps, "--two-batch-overlap on", "does not overlap two half batches"),
            (drafts and not self.drafts, "--mtp", "does not draft with the MTP module"),
            (
                drafts > (self.most_drafts or drafts),
                f"--mtp {drafts}",
                f"drafts at most {self.most_drafts} tokens a step",
            ),
            (fp4 and not self.fp4, "--precision nvfp4 or nvfp4-bf16", "does not load FP4 experts"),
            (int8 and not self.int8, "--precision int8", "does not load block-wise INT8 weights"),
            (fp8_cache and self.fp8_cache is None, "an FP8 cache", "has none"),
            (dispatch == "deepep" and self.dispatch != "deepep", "--dispatch deepep", "has dispatches of its own"),
        )
        for wrong, flag, reason in asked:
            if wrong:
                who = "dsjax serve" if self.name == "dsjax" else self.name
                raise UserError(
                    f"{flag} is asked for, but {who} {reason}; change that, or give --engine published for engines that can"
                )

    def precision(self, chosen: Precision) -> Precision:
        """What was chosen, with an FP8 cache as this engine keeps it."""
        if chosen.cache >= BF16 or self.fp8_cache is None:
            return chosen
        return dataclasses.replace(chosen, cache=self.fp8_cache)


PUBLISHED = Engine("published", True, True, True, True, True, 1.0, "deepep", eager=True, int8=True)
"""SGLang and TensorRT-LLM with the kernels and overlaps that they publish."""
_OTHERS = {
    "vllm": dataclasses.replace(PUBLISHED, name="vllm", int8=False),
    "sglang": dataclasses.replace(PUBLISHED, name="sglang"),
    "tensorrt-llm": dataclasses.replace(PUBLISHED, name="tensorrt-llm", overlaps=False, int8=False),
}
"""One engine of them: the published kernels, the layouts that it can be asked for (`launch.unfit`), and its own commands."""


@functools.cache
def dsjax_engine() -> Engine:
    """What `dsjax serve` of this version can do, by the options that it has."""
    from dsjax.engine.contract.speculative import MOST_DRAFTS
    from dsjax.engine.setup.args import EngineArgs

    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}
    cache = fields["kv_cache_dtype"].metadata.get("choices") or ()
    return Engine(
        "dsjax",
        balances="enable_eplb" in fields,
        overlaps="enable_dbo" in fields or "two_batch_overlap" in fields,
        transfers="kv_transfer_config" in fields or "prefill_mesh" in fields or "disaggregation_mode" in fields,
        drafts="speculative_config" in fields,
        fp4="nvfp4" in (fields["weights"].metadata.get("choices") or ()),
        fp8_cache=FP8_CACHE if any("fp8" in name for name in cache) else None,
        dispatch="auto",
        eager=False,
        most_drafts=MOST_DRAFTS,
    )


ENGINES = ("dsjax", "published", *_OTHERS)


def find_engine(name: str) -> Engine:
    """By name.

    Raises:
        UserError: no such engine.
    """
    if name not in ENGINES:
        raise UserError(f"--engine is {name!r}, expected one of {', '.join(ENGINES)}")
    return dsjax_engine() if name == "dsjax" else _OTHERS.get(name, PUBLISHED)
