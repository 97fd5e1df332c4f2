"""File of expert loads and placements, from `POST /dump_expert_distribution_record`, for `--init-expert-location` and `dsjax plan`.

JSON: ``{"version": 1, "model": …, "logical_load": [[tokens of each logical expert] of each MoE layer], "physical_to_logical": [[the
logical expert in each physical slot] of each MoE layer]}``. The MTP module's layer, if any, is the last. Either table may be missing:
without a placement that fits, the server computes one from the loads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dsjax.errors import UserError

VERSION = 1
FLAG = "--init-expert-location"


@dataclass(frozen=True, eq=False)
class ExpertLocation:
    """Content of a file, with at least one table."""

    model: str
    logical_load: Float[np.ndarray, "L E"] | None  # ``[layers, experts]``, tokens
    physical_to_logical: Int[np.ndarray, "L P"] | None  # ``[layers, slots]``

    @classmethod
    def read(cls, path: str | Path) -> ExpertLocation:
        """Read a file. Raises `UserError` if the file cannot be read or is not in the format above."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{FLAG}: {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"{FLAG}: {path} is not JSON: {error}") from error
        if not isinstance(content, dict) or content.get("version") != VERSION:
            version = content.get("version") if isinstance(content, dict) else None
            raise UserError(
                f"{FLAG}: {path} has version {version!r}, expected {VERSION}: an object with logical_load, physical_to_logical or "
                "both, as POST /dump_expert_distribution_record gives it"
            )
        load, places = (_table(path, content, name) for name in ("logical_load", "physical_to_logical"))
        if load is None and places is None:
            raise UserError(f"{FLAG}: {path} has neither logical_load nor physical_to_logical")
        if places is not None and (places != np.round(places)).any():
            raise UserError(f"{FLAG}: {path} has physical_to_logical with values that are no integers")
        return cls(str(content.get("model", "")), load, None if places is None else places.astype(np.int32))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        arrays = {"logical_load": self.logical_load, "physical_to_logical": self.physical_to_logical}
        tables = {name: array.tolist() for name, array in arrays.items() if array is not None}
        return {"version": VERSION, "model": self.model, **tables}


def _table(path: str | Path, content: dict, name: str) -> np.ndarray | None:
    value = content.get(name)
    if value is None:
        return None
    try:
        table = np.array(value, float)
    except (ValueError, TypeError):
        table = np.zeros(0)  # refused below
    if table.ndim != 2 or not table.size or not np.isfinite(table).all() or (table < 0).any():
        raise UserError(
            f"{FLAG}: {path} has {name} that is no table of numbers: expected a list for each MoE layer, all of one length, "
            "none negative"
        )
    return table
