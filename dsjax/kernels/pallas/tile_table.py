"""Tile sizes of matmuls and attention, tuned on a device; written by ``dsjax tune`` and read by ``--kernel-config``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsjax.errors import UserError

FORMAT = 1
FARTHEST = 2.0
"""Largest factor, up or down, between the rows of a matmul and of the entry used for it. Without such an entry, default sizes are used."""
ATTENTION = "latent_attention"
"""Kernel whose tiles have other fields than a matmul's."""
_POWERS = (16, 32, 64, 128)
_SHARED_SIZES = {"rows": _POWERS, "warps": (1, 2, 4, 8, 16), "stages": tuple(range(1, 9))}
SIZES = {**_SHARED_SIZES, "columns": _POWERS, "depth": _POWERS, "splits": tuple(range(1, 133))}
"""Allowed values of each field of a matmul's tile (`ProductTiles`). Sizes are powers of two that Triton accepts and that divide 128."""
ATTENTION_SIZES = {**_SHARED_SIZES, "positions": _POWERS}
"""Allowed values of each field of the attention kernel's tile (`AttentionTiles`)."""


@dataclass(frozen=True)
class Product:
    """A table's key: the per-device sizes of a matmul ``[rows, depth] × [depth, columns]`` or of attention.

    For ``latent_attention``, depth is the width of a cache entry, columns the (token, head) pairs per row, weights the cache's dtype and
    rows the rows of the step.
    """

    kernel: str  # name in profiles (``dense``, ``experts_gate_up``, ``experts_down``; with FP8 rows ``…_fp8``)
    depth: int  # contracted dimension
    columns: int  # output dimension
    weights: str  # storage dtype of the weights
    rows: float  # number of tokens; for experts, the mean number of (token, expert) pairs per expert

    @property
    def title(self) -> str:
        """Title in a progress bar."""
        if self.kernel == ATTENTION:
            return f"{self.kernel} of {self.columns} pairs over {self.depth} × {self.weights}, {self.rows:g} rows"
        return f"{self.kernel} {self.depth} × {self.columns}, {self.weights}, {self.rows:g} rows"


@dataclass(frozen=True)
class Tuned:
    """Fastest tile sizes found for a matmul, and its times in seconds with ``tiles`` and with the default ones."""

    product: Product
    tiles: tuple[tuple[str, int], ...]
    seconds: float
    default_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return this entry as in the file."""
        times = {"seconds": self.seconds, "default_seconds": self.default_seconds}
        return {**asdict(self.product), "tiles": dict(self.tiles), **times}


@dataclass(frozen=True)
class TileTable:
    """Tuned matmuls of one kind of device."""

    device: str  # JAX's name for it (``NVIDIA H200``)
    entries: tuple[Tuned, ...] = ()

    def find(self, product: Product) -> Mapping[str, int] | None:
        """Return the tiles of the entry with the same kernel and matrix and the nearest rows. None if there is none within ``FARTHEST``."""
        same = [e for e in self.entries if (e.product.kernel, e.product.depth, e.product.columns, e.product.weights)
                == (product.kernel, product.depth, product.columns, product.weights)]  # fmt: skip
        distance = lambda entry: abs(math.log(max(entry.product.rows, 1) / max(product.rows, 1)))  # noqa: E731
        nearest = min(same, key=distance, default=None)
        return dict(nearest.tiles) if nearest is not None and distance(nearest) <= math.log(FARTHEST) else None

    def with_entry(self, entry: Tuned) -> TileTable:
        """Return a table with this entry, which replaces one for the same matmul."""
        return TileTable(self.device, (*(e for e in self.entries if e.product != entry.product), entry))

    def to_json(self) -> dict[str, Any]:
        """Return the file's content."""
        return {"format": FORMAT, "device": self.device, "products": [entry.to_json() for entry in self.entries]}

    def write(self, path: Path) -> None:
        """Write the file atomically: concurrent readers, or readers after an interrupt, see the old or the new file."""
        unfinished = path.with_name(path.name + ".unfinished")
        unfinished.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def read(cls, path: str | Path) -> TileTable:
        """Read a file that ``dsjax tune`` wrote.

        Raises:
            UserError: the file is missing or invalid; the message names the entry and the expected values.
        """
        try:
            body = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read {path} ({error.strerror}); dsjax tune --output {path} makes it") from error
        except ValueError as error:
            raise UserError(f"{path} is no JSON ({error}); dsjax tune --output FILE makes such a file") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT or not isinstance(body.get("products"), list):
            raise UserError(f"{path} is no file of tile sizes of format {FORMAT}; dsjax tune --output FILE makes one")
        return cls(str(body.get("device")), tuple(_entry(path, i, given) for i, given in enumerate(body["products"])))


def _entry(path: str | Path, number: int, given: Any) -> Tuned:
    """Check an entry of a file."""
    try:
        product = Product(
            str(given["kernel"]),
            int(given["depth"]),
            int(given["columns"]),
            str(given["weights"]),
            float(given["rows"]),
        )
        tiles = {name: int(size) for name, size in given["tiles"].items()}
        seconds, default_seconds = float(given["seconds"]), float(given["default_seconds"])
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: product {number} lacks or misstates {error}; make the file anew with dsjax tune"
        ) from error
    sizes = ATTENTION_SIZES if product.kernel == ATTENTION else SIZES
    for name, size in tiles.items():
        if size not in sizes.get(name, ()):
            expected = f"one of {', '.join(map(str, sizes[name]))}" if name in sizes else f"only {', '.join(sizes)}"
            raise UserError(f"{path}: product {number} has {name} {size}; expected {expected}")
    return Tuned(product, tuple(sorted(tiles.items())), seconds, default_seconds)
