"""The options of `dsjax bench network`."""

import re
from dataclasses import dataclass

from dsjax.options import Checked, OptionError, option
from dsjax.plan.measured import COLLECTIVES, SEND_RECEIVE

_ALL = (*COLLECTIVES, SEND_RECEIVE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class CollectiveGrid(Checked):
    """Collectives and sizes."""

    mesh: str = option("dp=1", "Mesh whose device groups are timed (emulated on a CPU).")
    sizes: str = option("1K,16K,256K,4M,64M", "Bytes that a device sends in a collective. K, M, G: powers of 1,024.")
    pair_sizes: str = option("64,4K,64K,1M,16M,256M,1G", "Bytes of a message between two devices (send_receive).")
    only: str | None = option(None, f"Time only these collectives, separated by commas: {', '.join(_ALL)}")
    dtype: str = option("auto", "auto: float32 on a CPU, else bfloat16.", choices=("auto", "float32", "bfloat16"))
    repeats: int = option(10, "Number of samples per row.", least=1)
    row_limit: float = option(20.0, "Skip rows whose collective would take longer than this many seconds.", above=0)

    def __post_init__(self):
        super().__post_init__()
        unknown = [name for name in self.collectives if name not in _ALL]
        if unknown:
            raise OptionError(
                f"--only names {', '.join(unknown) if any(unknown) else repr('')}; expected some of {', '.join(_ALL)}"
            )
        _ = self.byte_counts, self.pair_byte_counts  # each raises if invalid

    @property
    def collectives(self) -> tuple[str, ...]:
        """Collectives that `--only` names, or all."""
        return tuple(name.strip() for name in self.only.split(",")) if self.only is not None else _ALL

    @property
    def byte_counts(self) -> list[int]:
        """`--sizes` in bytes, ascending."""
        return _bytes("--sizes", self.sizes)

    @property
    def pair_byte_counts(self) -> list[int]:
        """`--pair-sizes` in bytes, ascending."""
        return _bytes("--pair-sizes", self.pair_sizes)


def _bytes(flag: str, text: str) -> list[int]:
    matches = [re.fullmatch(r"(\d+)([KMG]?)", part.strip()) for part in text.split(",")]
    if not all(matches) or any(int(match[1]) < 1 for match in matches):
        raise OptionError(f"{flag} is {text!r}, expected sizes such as 1K,256K,64M, separated by commas")
    return sorted({int(match[1]) * _UNITS[match[2]] for match in matches})


@dataclass(frozen=True)
class VerdictOptions(Checked):
    """Expectations and output."""

    cluster: str | None = option(None, "Bundled cluster or TOML file, with expected rates in [acceptance].")
    json_file: str | None = option(None, "Also write JSON to this file; - for standard output.", flag="--json")
    progress: bool = option(True, "Show a progress bar.")
