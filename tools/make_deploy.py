"""Writes `deploy/overlays`: the planner's answer for each bundled cluster, and engines of 1, 2 and 4 hosts; and `deploy/dynamo`.

    python tools/make_deploy.py [NAME …]

Each overlay's first line is its command. Where DeepSeek-V3 does not fit a cluster, the overlay is of DeepSeek-V2. The files of
`deploy/dynamo` are not planned: `deploy/dynamo/graphs.toml` has the layouts and limits of the published recipes for DeepSeek-R1.
"""

import argparse
import functools
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from dsjax.hardware import load_hardware
from dsjax.plan import manifests
from dsjax.plan.cluster import bundled_clusters, load_cluster

ROOT = Path(__file__).parents[1]
DYNAMO = ROOT / "deploy" / "dynamo"
TOO_SMALL = ("rtx4090-32", "tpu-v5e-32")
HOSTS = {"hosts-1": ("h200-8", "dp=8"), "hosts-2": ("h200-16", "dp=16"), "hosts-4": ("h200-32", "dp=32")}


@functools.cache
def published() -> dict[str, Any]:
    """`deploy/dynamo/graphs.toml`."""
    return tomllib.loads((DYNAMO / "graphs.toml").read_text(encoding="utf-8"))


def sides_of(name: str) -> list[dict[str, Any]]:
    """The workers of a file of `deploy/dynamo`, as its template takes them."""
    said = published()["graphs"][name]
    joins = functools.partial(manifests.needs_compute_domain, load_hardware(said.get("hardware", "h200")))
    # Inside a ComputeDomain the pods talk over NVLink; Hopper's hosts talk over InfiniBand.
    return [
        side | manifests.pods_of("cuda", hosts, said.get("devices", 8), hosts > 1 and not joins(hosts), joins(hosts))
        for side in said["sides"]
        for hosts in [side["hosts"]]
    ]


def graph(name: str) -> str:
    every = published()
    about = [
        f"DeepSeek-R1, {every['graphs'][name]['about']}.",
        f"kubectl apply -f deploy/dynamo/{name}.yaml    # made by tools/make_deploy.py",
    ]
    lengths = every["input_tokens"], every["output_tokens"]
    return manifests.graph(f"r1-{name}", about, every["model"], sides_of(name), every["volume"], *lengths)


def command(name: str) -> list[str]:
    cluster, mesh = HOSTS.get(name, (name, None))
    model = "deepseek-v2" if name in TOO_SMALL else "deepseek-v3"
    given = ["--model", model, "--cluster", cluster, "--mode", "aggregated", *(["--mesh", mesh] if mesh else [])]
    return ["plan", "recipe", f"deploy/overlays/{name}", *given]


if __name__ == "__main__":
    alike = [name for name in bundled_clusters() if load_cluster(name).prefill is None]
    everything = (*published()["graphs"], *HOSTS, *alike)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all of {', '.join(everything)})")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in everything]:
        parser.error(f"no overlay {', '.join(map(repr, unknown))}; expected some of {', '.join(everything)}")
    for name in names or everything:
        print(name, flush=True)
        if name in published()["graphs"]:
            (DYNAMO / f"{name}.yaml").write_text(graph(name), encoding="utf-8")
            continue
        subprocess.run([sys.executable, "-m", "dsjax", *command(name)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
