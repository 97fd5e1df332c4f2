"""Runs of software of 2026 on one host in a public copy of InferenceX's results: predicted first, measured values entered afterwards.

The rule was set before a number was read: H200 and B200, SGLang and TensorRT-LLM, no drafts, prefill and decode together, dated 2026.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dsjax.config import load_config
from dsjax.plan.candidate import aggregated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import PUBLISHED, Engine
from dsjax.plan.figure import Figure, Kind
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.operator_tables import BUNDLED
from dsjax.plan.precision import precision
from dsjax.plan.workload import Lengths, PlanOptions, Workload
from tools.plan_data.validation import Point

SOURCE = "InferenceX's results as the fixtures of its own application (vngcloud/InferenceX-app, commit 7fe6d62, benchmarks.json)"
LENGTHS_SHARE, LENGTHS_VARIATION = 0.9, 0.064
"""Lengths are drawn evenly from 0.8 to 1 times the given ones (the benchmark's `--random-range-ratio`)."""
RUN_PRECISIONS = {"fp4": "nvfp4-bf16", "fp8": "fp8"}
"""The FP4 checkpoint is nvidia/DeepSeek-R1-0528-FP4-V2, whose attention is not FP8."""


@dataclass(frozen=True)
class Run:
    """One run: device, engine, weights, lengths as given, users, mesh. By its scripts the cache is FP8, SGLang's on H200 bf16.

    tables: bundled tables of the engine's own version, where there are such; else those of SGLang 0.5.10.
    """

    device: str
    engine: str
    weights: str
    prompt: int
    output: int
    users: int
    mesh: str
    tables: str = ""

    @property
    def name(self) -> str:
        """Name the run in one line."""
        engine = {"sglang": "SGLang", "trt": "TensorRT-LLM"}[self.engine]
        lengths = f"{self.prompt // 1024}K/{self.output // 1024}K"
        return f"{self.device.upper()}, {engine}, {self.weights.upper()}, `{self.mesh}`, {lengths}, {self.users} users"

    @property
    def fuses(self) -> bool:
        """Whether the shared expert is a routed one: SGLang's way on Hopper where experts are cut, unless it is told otherwise."""
        return (self.device, self.engine) == ("h200", "sglang") and self.mesh.endswith("ep=1")

    @property
    def program(self) -> Engine:
        """What the engine can do. TensorRT-LLM has `attention_dp_config.enable_balance`; SGLang has no `--enable-mixed-chunk`."""
        return dataclasses.replace(PUBLISHED, holds_prompts=self.engine == "trt", mixes=self.engine == "trt")

    def predict(self) -> Figure:
        """Output tokens a second a device: the mean-value answer of a closed loop."""
        config = load_config("deepseek-v3")
        lengths = (Lengths(LENGTHS_SHARE * tokens, LENGTHS_VARIATION) for tokens in (self.prompt, self.output))
        cache = "bf16" if (self.device, self.engine) == ("h200", "sglang") else "fp8"
        operators = BUNDLED.of_version(self.tables) if self.tables else BUNDLED
        options = PlanOptions(
            precision(RUN_PRECISIONS[self.weights], cache), overlap="off", operators=operators, engine=self.program
        )
        layout = parse_layout(self.mesh, 0, config)
        layout = dataclasses.replace(layout, fused=self.fuses)
        work = Workload(*lengths, concurrency=float(self.users))
        instance = Instance(config, load_cluster(f"{self.device}-8"), layout, options, work)
        return aggregated(instance, 1, self.users / layout.mesh.dp_size, LENGTHS_SHARE * self.prompt).per_device


RUNS = (
    Run("b200", "sglang", "fp4", 1024, 1024, 1, "tp=8"),
    Run("b200", "sglang", "fp4", 1024, 1024, 64, "tp=8"),
    Run("b200", "sglang", "fp4", 1024, 8192, 8, "tp=8"),
    Run("b200", "sglang", "fp4", 1024, 8192, 128, "tp=4"),
    Run("b200", "sglang", "fp4", 8192, 1024, 1, "tp=8"),
    Run("b200", "sglang", "fp4", 8192, 1024, 16, "tp=8"),
    Run("b200", "sglang", "fp8", 1024, 1024, 1, "tp=8,ep=1"),
    Run("b200", "sglang", "fp8", 1024, 1024, 64, "tp=8,ep=1"),
    Run("b200", "sglang", "fp8", 1024, 8192, 4, "tp=8,ep=1"),
    Run("b200", "sglang", "fp8", 1024, 8192, 32, "tp=8,ep=1"),
    Run("b200", "sglang", "fp8", 8192, 1024, 1, "tp=8,ep=1"),
    Run("b200", "sglang", "fp8", 8192, 1024, 32, "tp=4,ep=1"),
    Run("b200", "trt", "fp4", 1024, 1024, 4, "tp=4,ep=1"),
    Run("b200", "trt", "fp4", 1024, 1024, 128, "dp=8"),
    Run("b200", "trt", "fp4", 1024, 8192, 4, "tp=4,ep=1"),
    Run("b200", "trt", "fp4", 8192, 1024, 4, "tp=4,ep=1"),
    Run("b200", "trt", "fp4", 8192, 1024, 16, "tp=4,ep=1"),
    Run("b200", "trt", "fp4", 8192, 1024, 128, "dp=8"),
    Run("b200", "trt", "fp8", 1024, 1024, 4, "tp=8,ep=1"),
    Run("b200", "trt", "fp8", 1024, 1024, 16, "tp=4,ep=1"),
    Run("b200", "trt", "fp8", 1024, 8192, 4, "tp=8,ep=1"),
    Run("b200", "trt", "fp8", 1024, 8192, 32, "tp=8,ep=1"),
    Run("b200", "trt", "fp8", 8192, 1024, 4, "tp=8,ep=1"),
    Run("b200", "trt", "fp8", 8192, 1024, 16, "tp=4,ep=1"),
    Run("b200", "trt", "fp8", 8192, 1024, 64, "tp=8,ep=1"),
    Run("h200", "sglang", "fp8", 1024, 1024, 4, "tp=8,ep=1"),
    Run("h200", "sglang", "fp8", 1024, 1024, 8, "tp=8,ep=1"),
    Run("h200", "sglang", "fp8", 1024, 8192, 4, "tp=8,ep=1", "sglang-0.5.9"),
    Run("h200", "sglang", "fp8", 1024, 8192, 8, "tp=8,ep=1", "sglang-0.5.9"),
    Run("h200", "sglang", "fp8", 1024, 8192, 16, "tp=8,ep=1", "sglang-0.5.9"),
    Run("h200", "sglang", "fp8", 1024, 8192, 32, "tp=8,ep=1", "sglang-0.5.9"),
    Run("h200", "sglang", "fp8", 1024, 8192, 64, "tp=8,ep=1", "sglang-0.5.9"),
    Run("h200", "sglang", "fp8", 8192, 1024, 4, "tp=8,ep=1"),
    Run("h200", "sglang", "fp8", 8192, 1024, 8, "tp=8,ep=1"),
    Run("h200", "trt", "fp8", 1024, 1024, 8, "tp=8"),
    Run("h200", "trt", "fp8", 8192, 1024, 8, "tp=8"),
)
COMMITTED = (
    (18.2, 11.7, 23.5, 20.7),
    (445.3, 353.2, 564.4, 450.5),
    (117.7, 80.7, 147.9, 109.5),
    (1133.7, 916.6, 1360.7, 1122.8),
    (17.4, 11.4, 22.2, 19.9),
    (165.9, 124.1, 197.9, 158.6),
    (12.9, 9.1, 16.1, 17.0),
    (301.0, 246.4, 361.5, 339.0),
    (44.4, 32.4, 54.8, 56.8),
    (208.6, 164.3, 251.5, 231.8),
    (12.5, 8.9, 15.5, 16.2),
    (223.6, 186.2, 261.6, 225.2),
    (103.1, 73.1, 127.3, 125.6),
    (560.6, 466.0, 768.6, 727.3),
    (105.6, 74.3, 131.3, 124.9),
    (96.5, 69.7, 117.8, 118.7),
    (235.7, 185.4, 278.5, 276.7),
    (197.6, 171.4, 540.5, 533.3),
    (43.8, 32.1, 53.7, 54.4),
    (174.1, 139.6, 208.7, 228.8),
    (44.4, 32.4, 54.8, 48.4),
    (208.6, 164.3, 251.5, 237.7),
    (41.5, 30.8, 50.5, 50.6),
    (155.6, 126.9, 183.5, 188.0),
    (238.8, 200.6, 274.7, 245.8),
    (37.7, 28.5, 45.6, 49.2),
    (63.5, 49.2, 76.0, 82.4),
    (38.2, 28.7, 46.3, 47.8),
    (64.1, 49.5, 77.3, 79.8),
    (89.1, 71.4, 106.5, 123.0),
    (156.6, 126.9, 186.7, 176.9),
    (240.7, 197.9, 286.0, 255.0),
    (33.6, 26.0, 39.9, 43.1),
    (52.6, 42.2, 61.6, 68.3),
    (72.4, 55.1, 87.1, 65.3),
    (62.3, 48.9, 73.3, 57.6),
)
"""What was predicted of `RUNS` at commit 54613e4 (figure, low, high), and the output tokens a second a device that were published, entered
afterwards."""


def inferencex_points() -> list[Point]:
    """Predictions as they were committed, beside what was measured."""
    found = []
    for number, (run, (*ends, published)) in enumerate(zip(RUNS, COMMITTED, strict=True), 1):
        predicted = Figure(*ends, Kind.MEASURED | Kind.ASSUMPTION)
        found.append(Point(f"X{number}", run.name, SOURCE, "tokens/s", published, lambda f=predicted: f, "serving"))
    return found


def points_of_today() -> list[Point]:
    """The same runs as the model of today predicts them, which has been changed since their measured values were read."""
    return [
        dataclasses.replace(point, predict=run.predict) for point, run in zip(inferencex_points(), RUNS, strict=True)
    ]
