"""`ExpertOptions`: how many copies experts have, where they are at the start, and whether they move after their load. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsjax.engine.experts.eplb import EplbConfig
from dsjax.errors import UserError
from dsjax.options import option


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Options of an engine that has experts more than once, or moves them."""

    redundant_experts: int = option(0, "physical experts beside the logical ones", least=0)
    enable_eplb: bool = option(False, "move and copy experts after their load while serving")
    eplb_config: str | dict[str, Any] | None = option(
        None,
        'how, with vLLM\'s names: JSON such as \'{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000, '
        '"log_balancedness": true, "max_bytes_per_step": 134217728, "payback": 1, "policy": "auto"}\'; with --enable-eplb',
    )
    init_expert_location: str | None = option(
        None,
        "file of experts' loads or places, as /dump_expert_distribution_record gives it: a start with experts already balanced",
    )

    @property
    def eplb(self) -> EplbConfig | None:
        """`eplb_config`, read, or its defaults with `enable_eplb`; None where experts stay where they are.

        Raises:
            UserError: it is not JSON, or has fields or values that cannot be.
        """
        if not self.enable_eplb:
            return None
        return EplbConfig() if self.eplb_config is None else EplbConfig.parse(self.eplb_config)

    @property
    def num_redundant(self) -> int:
        """Physical experts beside the logical ones, from whichever of the two options has them.

        Raises:
            UserError: both have, and they differ.
        """
        balanced = self.eplb.num_redundant_experts if self.eplb else None
        if balanced is not None and self.redundant_experts not in (0, balanced):
            raise UserError(
                f"--redundant-experts is {self.redundant_experts}, and num_redundant_experts in --eplb-config is {balanced}; "
                "give one of them"
            )
        return self.redundant_experts if balanced is None else balanced
