"""Writes `deploy/overlays`: the planner's answer for each bundled cluster, and engines of 1, 2 and 4 hosts; and `deploy/dynamo`.

    python tools/make_deploy.py [NAME …]

Each overlay's first line is its command. Where DeepSeek-V3 does not fit a cluster, the overlay is of DeepSeek-V2. The files of
`deploy/dynamo` have the layouts of the recipes in circulation for DeepSeek-R1, and are not planned.
"""

import subprocess
import sys
from pathlib import Path

from dsjax.plan.cluster import bundled_clusters
from dsjax.plan.dynamo_graph import Graph
from dsjax.plan.kubernetes import pod_resources

ROOT = Path(__file__).parents[1]
TOO_SMALL = ("rtx4090-32", "tpu-v5e-32")
HOSTS = {"hosts-1": ("h200-8", "dp=8"), "hosts-2": ("h200-16", "dp=16"), "hosts-4": ("h200-32", "dp=32")}

MODEL, VOLUME = "deepseek-ai/DeepSeek-R1", "810Gi"  # 688.6 GB, and a quarter
LENGTHS = {"--weights": "fp8", "--max-model-len": "16384"}
WIDE = {
    "--dispatch-wire": "fp8",
    "--enable-eplb": "",
    "--eplb-config": '{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000}',
}
GRAPHS = {
    "agg-tp8": (
        "aggregated, TP8: one engine on 8 Hopper GPUs, every expert on each, an eighth wide; for few users",
        1,
        {"--mesh": "tp=8,ep=1", "--max-num-seqs": "256", "--max-num-batched-tokens": "8192", "--prefill-chunk": "4096"},
    ),
    "agg-dep16": (
        "aggregated, DEP16: one engine on 2 hosts with 8 Hopper GPUs each, 16 attention replicas, 18 physical experts on each",
        2,
        {
            "--mesh": "dp=16",
            **WIDE,
            "--max-num-seqs": "256",
            "--max-num-batched-tokens": "4096",
            "--prefill-chunk": "2048",
        },
    ),
    "agg-dep32": (
        "aggregated, DEP32: one engine on 4 hosts with 8 Hopper GPUs each, 32 attention replicas, 9 physical experts on each",
        4,
        {
            "--mesh": "dp=32",
            **WIDE,
            "--max-num-seqs": "256",
            "--max-num-batched-tokens": "4096",
            "--prefill-chunk": "2048",
        },
    ),
}
"""Of `deploy/dynamo`: name to what it is, hosts, and options of the worker."""


def graph(name: str) -> str:
    about, hosts, options = GRAPHS[name]
    lines = (f"DeepSeek-R1, {about}.", f"kubectl apply -f deploy/dynamo/{name}.yaml    # made by tools/make_deploy.py")
    resources = pod_resources("cuda", 8)
    return Graph(f"r1-{name}", lines, MODEL, {**LENGTHS, **options}, 1, hosts, 8, resources, VOLUME, 1024, 1024).text()


def command(name: str) -> list[str]:
    cluster, mesh = HOSTS.get(name, (name, None))
    model = "deepseek-v2" if name in TOO_SMALL else "deepseek-v3"
    given = ["plan", "--model", model, "--cluster", cluster, "--mode", "aggregated"]
    return [*given, *(["--mesh", mesh] if mesh else []), "--recipe", f"deploy/overlays/{name}"]


if __name__ == "__main__":
    for name in sys.argv[1:] or (*GRAPHS, *HOSTS, *bundled_clusters()):
        print(name, flush=True)
        if name in GRAPHS:
            (ROOT / "deploy" / "dynamo" / f"{name}.yaml").write_text(graph(name), encoding="utf-8")
            continue
        subprocess.run([sys.executable, "-m", "dsjax", *command(name)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
