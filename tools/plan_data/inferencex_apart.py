"""Runs of InferenceX with prefill and decode apart and wide EP: predicted first, measured values entered afterwards.

The rule was set before a number was read: DeepSeek-R1 on NVIDIA's devices, prefill and decode apart, no drafts, dated 2026, decode
instances of 16 or more devices with one attention replica on each.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsjax.config import load_config
from dsjax.plan.candidate import Candidate, prefill_pool, separated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Figure, Kind
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import precision
from dsjax.plan.workload import Lengths, PlanOptions, Workload
from tools.plan_data.inferencex import LENGTHS_SHARE, LENGTHS_VARIATION, RUN_PRECISIONS, SOURCE
from tools.plan_data.validation import Point

_CLUSTERS = {"h100": "h100-32", "gb200": "gb200-nvl72-36", "gb300": "gb300-nvl72-36"}
_REDUNDANT = 32
"""What decode instances are assumed to have: NVIDIA's and SGLang's guides for wide EP give 288 slots; the results do not say."""
_STEP = 16384
"""Prompt tokens of a prefill step a replica, assumed."""


@dataclass(frozen=True)
class ApartRun:
    """One run: device, engine, weights, lengths as given, users; prefill instances and their mesh, decode instances and theirs."""

    device: str
    engine: str
    weights: str
    prompt: int
    output: int
    users: int
    prefill: tuple[int, str]
    decode: tuple[int, str]

    @property
    def name(self) -> str:
        """Name the run in one line."""
        lengths = f"{self.prompt // 1024}K/{self.output // 1024}K"
        engine = {"sglang": "SGLang", "trt": "TensorRT-LLM"}[self.engine]
        sides = " + ".join(f"{count} × `{mesh}`" for count, mesh in (self.prefill, self.decode))
        return f"{self.device.upper()}, {engine}, {self.weights.upper()}, {sides}, {lengths}, {self.users:,} users"

    def deployment(self) -> Candidate:
        """The mean-value answer of a closed loop, without two-batch overlap."""
        config, cluster = load_config("deepseek-v3"), load_cluster(_CLUSTERS[self.device])
        layouts = [parse_layout(self.prefill[1], 0, config), parse_layout(self.decode[1], _REDUNDANT, config)]
        counts = self.prefill[0], self.decode[0]
        devices = sum(count * layout.devices for count, layout in zip(counts, layouts, strict=True))
        cluster = cluster.resized(-(-devices // cluster.devices_per_host))
        lengths = (Lengths(LENGTHS_SHARE * tokens, LENGTHS_VARIATION) for tokens in (self.prompt, self.output))
        work = Workload(*lengths, concurrency=float(self.users))
        options = PlanOptions(precision(RUN_PRECISIONS[self.weights], "fp8"), overlap="off")
        first, then = (Instance(config, cluster, layout, options, work) for layout in layouts)
        batch = self.users / (then.replicas * self.decode[0])
        return separated(prefill_pool(first, _STEP), self.prefill[0], then, self.decode[0], batch)

    def predict(self) -> Figure:
        """Output tokens a second a device that decodes, as the benchmark gives them."""
        found = self.deployment()
        return found.throughput / (found.decode.layout.devices * found.count)


APART = (
    ApartRun("gb200", "sglang", "fp4", 1024, 1024, 4096, (4, "dp=4"), (1, "dp=32")),
    ApartRun("gb200", "sglang", "fp4", 8192, 1024, 2048, (6, "tp=4,ep=1"), (1, "dp=48")),
    ApartRun("gb200", "sglang", "fp8", 1024, 1024, 4096, (2, "dp=8"), (1, "dp=32")),
    ApartRun("gb200", "sglang", "fp8", 8192, 1024, 6144, (5, "dp=8"), (1, "dp=32")),
    ApartRun("gb200", "trt", "fp4", 1024, 8192, 563, (1, "dp=4"), (1, "dp=32")),
    ApartRun("gb200", "trt", "fp4", 1024, 8192, 4096, (1, "dp=4"), (1, "dp=32")),
    ApartRun("gb200", "trt", "fp4", 1024, 8192, 8192, (1, "dp=4"), (1, "dp=32")),
    ApartRun("gb200", "trt", "fp8", 1024, 1024, 1127, (1, "dp=8"), (1, "dp=32")),
    ApartRun("gb200", "trt", "fp8", 1024, 1024, 2151, (1, "dp=8"), (1, "dp=16")),
    ApartRun("gb200", "trt", "fp8", 1024, 8192, 564, (1, "dp=8"), (1, "dp=32")),
    ApartRun("gb200", "trt", "fp8", 1024, 8192, 8192, (1, "dp=8"), (2, "dp=16")),
    ApartRun("gb200", "trt", "fp8", 8192, 1024, 333, (2, "dp=8"), (1, "dp=32")),
    ApartRun("gb200", "trt", "fp8", 8192, 1024, 1229, (5, "dp=8"), (1, "dp=16")),
    ApartRun("gb300", "sglang", "fp4", 1024, 1024, 512, (4, "dp=4"), (1, "dp=32")),
    ApartRun("gb300", "sglang", "fp4", 1024, 1024, 2048, (4, "dp=4"), (1, "dp=32")),
    ApartRun("gb300", "sglang", "fp4", 1024, 1024, 4096, (4, "dp=4"), (1, "dp=48")),
    ApartRun("gb300", "sglang", "fp4", 1024, 1024, 8192, (4, "dp=4"), (1, "dp=48")),
    ApartRun("gb300", "sglang", "fp4", 8192, 1024, 512, (6, "tp=4,ep=1"), (1, "dp=48")),
    ApartRun("gb300", "sglang", "fp4", 8192, 1024, 2048, (6, "tp=4,ep=1"), (1, "dp=48")),
    ApartRun("gb300", "sglang", "fp4", 8192, 1024, 4096, (6, "tp=4,ep=1"), (1, "dp=48")),
    ApartRun("gb300", "sglang", "fp8", 1024, 1024, 2048, (2, "dp=8"), (1, "dp=32")),
    ApartRun("gb300", "sglang", "fp8", 1024, 1024, 6144, (2, "dp=8"), (1, "dp=32")),
    ApartRun("gb300", "sglang", "fp8", 8192, 1024, 128, (5, "dp=8"), (1, "dp=32")),
    ApartRun("gb300", "sglang", "fp8", 8192, 1024, 512, (5, "dp=8"), (1, "dp=32")),
    ApartRun("gb300", "sglang", "fp8", 8192, 1024, 1024, (5, "dp=8"), (1, "dp=32")),
    ApartRun("gb300", "sglang", "fp8", 8192, 1024, 4096, (6, "dp=8"), (1, "dp=24")),
    ApartRun("gb300", "trt", "fp4", 1024, 8192, 1024, (1, "dp=2"), (1, "dp=32")),
    ApartRun("gb300", "trt", "fp4", 1024, 8192, 4096, (1, "dp=2"), (1, "dp=32")),
    ApartRun("gb300", "trt", "fp8", 1024, 8192, 8192, (1, "dp=4"), (2, "dp=16")),
    ApartRun("gb300", "trt", "fp8", 8192, 1024, 512, (6, "dp=4"), (1, "dp=32")),
    ApartRun("gb300", "trt", "fp8", 8192, 1024, 1229, (7, "dp=4"), (1, "dp=16")),
    ApartRun("h100", "trt", "fp8", 1024, 1024, 4916, (2, "dp=16"), (1, "dp=16")),
    ApartRun("h100", "trt", "fp8", 8192, 1024, 308, (2, "dp=16"), (1, "dp=16")),
)
COMMITTED = (
    (6325.9, 5070.4, 7535.8, 5031.9),
    (820.1, 636.4, 971.7, 800.2),
    (4967.6, 4033.9, 5919.2, 4172.1),
    (1768.8, 1427.1, 2108.5, 1713.1),
    (1139.3, 890.9, 1363.8, 1149.9),
    (5536.0, 4492.3, 6575.5, 5082.6),
    (7934.2, 6537.0, 9405.9, 6365.8),
    (1755.7, 1404.0, 2098.7, 1498.8),
    (4453.6, 3647.0, 5307.2, 4018.7),
    (915.4, 730.5, 1094.7, 877.1),
    (6071.3, 5043.7, 7197.0, 4993.4),
    (485.5, 386.3, 581.0, 456.0),
    (2411.5, 1975.7, 2871.0, 2173.6),
    (1068.3, 831.5, 1280.5, 1046.7),
    (3752.6, 2963.8, 4483.6, 3438.1),
    (4874.1, 3845.5, 5819.3, 2938.3),
    (6486.3, 5156.4, 7728.6, 2717.2),
    (706.6, 547.8, 847.1, 442.2),
    (822.3, 638.1, 974.4, 838.8),
    (822.3, 638.1, 974.4, 765.5),
    (3029.1, 2433.5, 3616.5, 2824.0),
    (5820.5, 4744.0, 6930.7, 4997.5),
    (217.8, 172.3, 260.9, 227.8),
    (788.4, 628.9, 942.8, 773.3),
    (1305.5, 1048.8, 1558.2, 1354.7),
    (2830.4, 2309.5, 3366.3, 2858.9),
    (1912.4, 1509.5, 2284.2, 2057.2),
    (5535.4, 4491.7, 6574.7, 5261.7),
    (6071.3, 5043.7, 7197.0, 5294.8),
    (785.2, 626.4, 939.0, 777.2),
    (2369.4, 1940.7, 2821.2, 2227.6),
    (2328.8, 1890.7, 2761.0, 2062.8),
    (466.7, 386.3, 553.6, 282.2),
)
"""What was predicted of `APART` at commit 5389fc7 (figure, low, high), and the output tokens a second a decoding device that were
published, entered afterwards."""


def apart_points() -> list[Point]:
    """Predictions as they were committed, beside what was measured."""
    found = []
    for number, (run, (*ends, published)) in enumerate(zip(APART, COMMITTED, strict=True), 1):
        predicted = Figure(*ends, Kind.MEASURED | Kind.ASSUMPTION)
        found.append(Point(f"W{number}", run.name, SOURCE, "tokens/s", published, lambda f=predicted: f, "serving"))
    return found
