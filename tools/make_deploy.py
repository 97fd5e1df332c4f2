"""Writes `deploy/overlays`: the planner's answer for each bundled cluster, and engines of 1, 2 and 4 hosts; and `deploy/dynamo`.

    python tools/make_deploy.py [NAME …]

Each overlay's first line is its command. Where DeepSeek-V3 does not fit a cluster, the overlay is of DeepSeek-V2. The files of
`deploy/dynamo` have the layouts and limits of the published recipes for DeepSeek-R1 (docs/recipes.md says where they differ), and are
not planned.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from dsjax.hardware import load_hardware
from dsjax.plan.cluster import bundled_clusters, load_cluster
from dsjax.plan.dynamo_graph import Graph, Side
from dsjax.plan.kubernetes import needs_compute_domain, pod_resources

ROOT = Path(__file__).parents[1]
TOO_SMALL = ("rtx4090-32", "tpu-v5e-32")
HOSTS = {"hosts-1": ("h200-8", "dp=8"), "hosts-2": ("h200-16", "dp=16"), "hosts-4": ("h200-32", "dp=32")}

MODEL, VOLUME = "deepseek-ai/DeepSeek-R1", "810Gi"  # 688.6 GB, and a quarter
LENGTHS = {"--weights": "fp8", "--max-model-len": "16384"}
TENSOR = {"--max-num-batched-tokens": "8192", "--prefill-chunk": "4096"}
PREFILL = TENSOR | {"--mesh": "tp=8", "--dispatch-wire": "fp8", "--max-num-seqs": "64"}
WIDE = {
    "--dispatch-wire": "fp8",
    "--max-num-seqs": "512",
    "--max-num-batched-tokens": "4096",
    "--prefill-chunk": "2048",
    "--moe-chunk-tokens": "384",
}
GB200 = {"--weights": "nvfp4", "--dispatch-wire": "fp8", "--kv-cache-dtype": "fp8", "--max-model-len": "2251"}
GB200_PREFILL = {"--max-num-seqs": "4", "--max-num-batched-tokens": "4608", "--prefill-chunk": "1227"}
GB200_DECODE = {
    "--max-num-seqs": "32",
    "--max-num-batched-tokens": "288",
    "--prefill-chunk": "256",
    "--stream-interval": "20",
}
WIDE_PREFILL = TENSOR | {"--dispatch-wire": "fp8", "--max-num-seqs": "16"}
BALANCED = {
    "--enable-eplb": "",
    "--eplb-config": '{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000}',
}
GRAPHS = {
    "agg-tp8": (
        "aggregated, TP8: one engine on 8 Hopper GPUs, every expert on each, an eighth wide; for few users",
        (("worker", 1, 1, TENSOR | {"--mesh": "tp=8,ep=1", "--max-num-seqs": "256"}),),
    ),
    "agg-dep16": (
        "aggregated, DEP16: one engine on 2 hosts with 8 Hopper GPUs each, 16 attention replicas, 18 physical experts on each",
        (("worker", 1, 2, WIDE | BALANCED | {"--mesh": "dp=16"}),),
    ),
    "agg-dep32": (
        "aggregated, DEP32: one engine on 4 hosts with 8 Hopper GPUs each, 32 attention replicas, 9 physical experts on each",
        (("worker", 1, 4, WIDE | BALANCED | {"--mesh": "dp=32"}),),
    ),
    "disagg-16": (
        "prefill apart from decode on 16 Hopper GPUs: TEP8 on one host computes prompts, DEP8 on another makes tokens",
        (("prefill", 1, 1, PREFILL), ("decode", 1, 1, WIDE | {"--mesh": "dp=8"})),
    ),
    "disagg-32": (
        "prefill apart from decode on 32 Hopper GPUs: two hosts TEP8 each compute prompts, two hosts DEP8 each make tokens",
        (("prefill", 2, 1, PREFILL), ("decode", 2, 1, WIDE | {"--mesh": "dp=8"})),
    ),
    "disagg-wide-32": (
        "prefill apart from decode with wide EP on 32 Hopper GPUs: DEP16 on two hosts computes prompts, DEP16 on two others makes tokens",
        (
            ("prefill", 1, 2, WIDE_PREFILL | {"--mesh": "dp=16", "--redundant-experts": "32"}),
            ("decode", 1, 2, WIDE | BALANCED | {"--mesh": "dp=16"}),
        ),
    ),
    "disagg-tep16-dep16": (
        "prefill apart from decode on 32 Hopper GPUs: TEP16 on two hosts computes prompts, DEP16 on two others makes tokens",
        (
            ("prefill", 1, 2, PREFILL | {"--mesh": "tp=16"}),
            ("decode", 1, 2, WIDE | {"--mesh": "dp=16"}),
        ),
    ),
    "disagg-wide-gb200": (
        "prefill apart from decode with wide EP on 36 GB200: DEP4 on one tray computes prompts, DEP32 on eight makes tokens",
        (
            ("prefill", 1, 1, GB200 | GB200_PREFILL | {"--mesh": "dp=4"}),
            ("decode", 1, 8, GB200 | GB200_DECODE | {"--mesh": "dp=32"}),
        ),
    ),
}
"""What `deploy/dynamo` has, by name: a line about it, and its workers, each with its kind, engines, hosts of each and options."""
DEVICES = {"disagg-wide-gb200": 4}
"""Devices of a host in those where they are not 8."""


def graph(name: str) -> str:
    about, kinds = GRAPHS[name]
    lines = (f"DeepSeek-R1, {about}.", f"kubectl apply -f deploy/dynamo/{name}.yaml    # made by tools/make_deploy.py")
    devices = DEVICES.get(name, 8)
    hardware = "gb200" if name.endswith("gb200") else "h200"

    def side(kind: str, engines: int, hosts: int, own: dict[str, str]) -> Side:
        domain = needs_compute_domain(load_hardware(hardware), hosts)
        # Inside a ComputeDomain the pods talk over NVLink; Hopper's hosts talk over InfiniBand.
        resources = pod_resources("cuda", devices, rdma=hosts > 1 and not domain, domain=domain)
        return Side(kind, LENGTHS | own, engines, hosts, devices, resources)

    sides = tuple(side(*one) for one in kinds)
    return Graph(f"r1-{name}", lines, MODEL, sides, VOLUME, 1024, 1024).text()


def options_of(name: str, role: str) -> dict[str, str]:
    """Options of `dsjax dynamo` of a file's workers: `prefill`, `decode`, or `prefill and decode` for those that do both."""
    kinds = {kind: own for kind, _, _, own in GRAPHS[name][1]}
    both = role == "prefill and decode"
    return (
        {"--model": MODEL}
        | LENGTHS
        | kinds["worker" if both else role]
        | ({} if both else {"--disaggregation-mode": role})
    )


def pods_of(name: str) -> dict[str, str]:
    """What a file gives its pods, beside the engine's options, and its benchmark.

    The pods' `/dev/shm` and resources, the volume that all read the model from, nodes of a ComputeDomain, lengths and concurrency.
    """
    text = graph(name)
    (asked,) = set(re.findall(r"resources: (\{\"requests.*?\}), \"limits", text))
    pods = json.loads(asked + "}")["requests"]
    alone = {
        "sharedMemorySize": r"sharedMemorySize: (\S+)",
        "storage": r"storage: (\S+)",
        "accessModes": r"accessModes: \[(\w+)\]",
        "numNodes": r"numNodes: (\d+)",
        "benchmark.input": r"--random-input-len (\d+)",
        "benchmark.output": r"--random-output-len (\d+)",
        "benchmark.concurrency": r"--sweep-concurrency (\S+)",
    }
    found = {key: set(re.findall(pattern, text)) for key, pattern in alone.items()}
    return {key: next(iter(values)) for key, values in found.items() if len(values) == 1} | pods


def command(name: str) -> list[str]:
    cluster, mesh = HOSTS.get(name, (name, None))
    model = "deepseek-v2" if name in TOO_SMALL else "deepseek-v3"
    given = ["plan", "--model", model, "--cluster", cluster, "--mode", "aggregated"]
    return [*given, *(["--mesh", mesh] if mesh else []), "--recipe", f"deploy/overlays/{name}"]


if __name__ == "__main__":
    alike = [name for name in bundled_clusters() if load_cluster(name).prefill is None]
    everything = (*GRAPHS, *HOSTS, *alike)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all of {', '.join(everything)})")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in everything]:
        parser.error(f"no overlay {', '.join(map(repr, unknown))}; expected some of {', '.join(everything)}")
    for name in names or everything:
        print(name, flush=True)
        if name in GRAPHS:
            (ROOT / "deploy" / "dynamo" / f"{name}.yaml").write_text(graph(name), encoding="utf-8")
            continue
        subprocess.run([sys.executable, "-m", "dsjax", *command(name)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
