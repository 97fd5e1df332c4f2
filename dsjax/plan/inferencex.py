"""Runs of software of 2026 on one host in a public copy of InferenceX's results: predicted first, measured values entered afterwards.

The rule was set before a number was read: H200 and B200, SGLang and TensorRT-LLM, no drafts, prefill and decode together, dated 2026.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsjax.config import load_config
from dsjax.plan.candidate import aggregated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Figure
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import precision
from dsjax.plan.workload import Lengths, Options, Workload

SOURCE = "InferenceX's results as the fixtures of its own application (vngcloud/InferenceX-app, commit 7fe6d62, benchmarks.json)"
_SHARE, _VARIATION = 0.9, 0.064
"""Lengths are drawn evenly from 0.8 to 1 times the given ones (the benchmark's `--random-range-ratio`)."""
_PRECISIONS = {"fp4": "nvfp4-bf16", "fp8": "fp8"}
"""The FP4 checkpoint is nvidia/DeepSeek-R1-0528-FP4-V2, whose attention is not FP8."""


@dataclass(frozen=True)
class Run:
    """One run: device, engine, weights, lengths as given, users, mesh. By its scripts the cache is FP8, SGLang's on H200 bf16."""

    device: str
    engine: str
    weights: str
    prompt: int
    output: int
    users: int
    mesh: str

    @property
    def name(self) -> str:
        """In one line."""
        engine = {"sglang": "SGLang", "trt": "TensorRT-LLM"}[self.engine]
        lengths = f"{self.prompt // 1024}K/{self.output // 1024}K"
        return f"{self.device.upper()}, {engine}, {self.weights.upper()}, `{self.mesh}`, {lengths}, {self.users} users"

    def predict(self) -> Figure:
        """Output tokens a second a device: the mean-value answer of a closed loop."""
        config = load_config("deepseek-v3")
        lengths = (Lengths(_SHARE * tokens, _VARIATION) for tokens in (self.prompt, self.output))
        cache = "bf16" if (self.device, self.engine) == ("h200", "sglang") else "fp8"
        options = Options(precision(_PRECISIONS[self.weights], cache), overlap="off")
        layout = parse_layout(self.mesh, 0, config)
        work = Workload(*lengths, concurrency=float(self.users))
        instance = Instance(config, load_cluster(f"{self.device}-8"), layout, options, work)
        return aggregated(instance, 1, self.users / layout.mesh.dp_size, _SHARE * self.prompt).per_device


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
    Run("h200", "sglang", "fp8", 1024, 8192, 4, "tp=8,ep=1"),
    Run("h200", "sglang", "fp8", 1024, 8192, 8, "tp=8,ep=1"),
    Run("h200", "sglang", "fp8", 1024, 8192, 16, "tp=8,ep=1"),
    Run("h200", "sglang", "fp8", 1024, 8192, 32, "tp=8,ep=1"),
    Run("h200", "sglang", "fp8", 1024, 8192, 64, "tp=8,ep=1"),
    Run("h200", "sglang", "fp8", 8192, 1024, 4, "tp=8,ep=1"),
    Run("h200", "sglang", "fp8", 8192, 1024, 8, "tp=8,ep=1"),
    Run("h200", "trt", "fp8", 1024, 1024, 8, "tp=8"),
    Run("h200", "trt", "fp8", 8192, 1024, 8, "tp=8"),
)
