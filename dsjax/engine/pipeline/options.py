"""``StageOptions``, for an engine of several stages (``--mesh pp=2,…``); what does not go with these, and why. No JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsjax.errors import UserError
from dsjax.options import option

_REFUSED = {
    "expert_mesh": "a stage has its own routed experts",
    "prefill_mesh": "a page of the cache is in parts then, one at each stage, which are not handed over yet",
    "disaggregation_mode": "a page of the cache is in parts then, one at each stage, which are not handed over yet",
    "page_source": "a page of the cache is in parts then, one at each stage",
}
"""Options that do not go with stages, and why."""


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Options of an engine whose layers are divided among stages."""

    pp_layer_partition: str | None = option(
        None,
        "layers of each stage of a --mesh with pp, such as 31,30; default: so that the fullest stage has as little work as can be",
    )


def check_stages(args: Any, stages: int) -> None:
    """Check that the other options go with so many stages. args: `EngineArgs`, which are checked where they are made.

    Raises:
        UserError: they do not.
    """
    if stages == 1:
        if args.pp_layer_partition is not None:
            raise UserError(
                f"--pp-layer-partition divides layers among stages, and --mesh {args.mesh} has one; add pp, or leave it out"
            )
        return
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, reason in _REFUSED.items():
        if getattr(args, name) != defaults[name]:
            raise UserError(
                f"--{name.replace('_', '-')} does not go with stages, and a mesh here has pp={stages}: {reason}; leave one of the two out"
            )
