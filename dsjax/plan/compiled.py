"""`DryRun`: the figures that `dsjax dryrun --json` read from a compiled step."""

import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dsjax.config import ModelConfig
from dsjax.plan.figure import Figure, Kind, drawn
from dsjax.plan.files import read_json
from dsjax.plan.layout import InstanceLayout
from dsjax.toml_files import AboveZero, Count
from sharding.mesh import MeshSpec

_Bytes = Annotated[int, msgspec.Meta(ge=0)]


class _Seconds(msgspec.Struct, frozen=True):
    value: AboveZero
    low: AboveZero
    high: AboveZero

    def __post_init__(self):
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value:g} s is not within its range, {self.low:g} to {self.high:g}")


class _Timeline(msgspec.Struct, frozen=True):
    step: _Seconds


class _Parameters(msgspec.Struct, frozen=True):
    total: Count


class _Memory(msgspec.Struct, frozen=True):
    weights_total: Count
    temporaries: _Bytes
    outputs: _Bytes
    aliased: _Bytes
    code: _Bytes | None = None


class _OneMesh(msgspec.Struct):
    """Checks that a dry run is of one mesh without stages, the only kind that a plan takes."""

    expert_mesh: Any = None
    stages: Any = None

    def __post_init__(self):
        if self.expert_mesh is not None:
            raise ValueError("it is of attention and experts apart, and a plan takes dry runs of one mesh")
        if self.stages is not None:
            raise ValueError("it is of several stages, of which a plan takes no dry run yet")


class DryRun(msgspec.Struct, frozen=True):
    """One JSON file of `dsjax dryrun`. All figures are for one device and one run of the step."""

    mesh: str
    physical_experts: _Bytes
    target: str
    step: Literal["decode", "prefill"]
    batch: Count  # rows of a DP rank, of `chunk` tokens each
    chunk: Count
    context: Count  # positions of a row's page table
    weights: str
    kv_cache_dtype: str
    parameters: _Parameters
    device_bytes: _Memory
    predicted: _Timeline | None = msgspec.field(default=None, name="timeline")
    halves: bool = False  # the step is computed in two halves that overlap
    versions: dict[str, Any] | None = None
    file: str = ""
    written: str = ""  # the file's date

    @property
    def step_tokens(self) -> int:
        """Tokens of a DP rank in this step."""
        return self.batch * self.chunk

    @property
    def shape(self) -> str:
        """`decode of 128 rows at context 4,096`."""
        rows = f"{self.batch} rows" if self.chunk == 1 else f"{self.batch} × {self.chunk} tokens"
        return f"{self.step} of {rows} at context {self.context:,}" + (", in two halves" if self.halves else "")

    @property
    def timeline(self) -> Figure | None:
        """Predicted seconds of the step, or None if the file has none."""
        ends = self.predicted and self.predicted.step
        kinds = Kind.COMPILED | Kind.ASSUMPTION
        return ends and Figure(ends.value, ends.low, ends.high, kinds, name="timeline", unit="s")

    @property
    def temporaries(self) -> float:
        """Bytes besides weights and cache: temporaries, outputs other than the cache, and code if known."""
        memory = self.device_bytes
        size = memory.temporaries + max(0, memory.outputs - memory.aliased) + (memory.code or 0)
        versions = [f"{name} {version}" for name, version in (self.versions or {}).items()]
        source = ", ".join([f"{Path(self.file).name}, dsjax dryrun --target {self.target}", *versions, self.written])
        about = {"name": "temporaries", "unit": "B", "source": f"{source}: {self.shape}"}
        return drawn(Figure(size, kinds=Kind.COMPILED, **about))

    def layout(self, config: ModelConfig) -> InstanceLayout:
        """Return the layout of one copy of the experts, which is what a plan prices."""
        return InstanceLayout(MeshSpec.parse(self.mesh), self.physical_experts - config.n_routed_experts).unit


def read_dry_run(path: str | Path) -> DryRun:
    """Read one file. Raises `UserError` if it cannot be read or is not from `dsjax dryrun --json`."""
    command = "dsjax dryrun --model … --mesh … --target … --json FILE"
    read_json("--compiled", path, _OneMesh, command)
    run = read_json("--compiled", path, DryRun, command)
    written = datetime.datetime.fromtimestamp(Path(path).stat().st_mtime, datetime.UTC).date().isoformat()
    return msgspec.structs.replace(run, file=str(path), written=written)
