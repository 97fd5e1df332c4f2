"""Writes `deploy/overlays`: the planner's answer for each bundled cluster, and engines of 1, 2 and 4 hosts.

    python tools/make_deploy.py [NAME …]

Each overlay's first line is its command. Where DeepSeek-V3 does not fit a cluster, the overlay is of DeepSeek-V2.
"""

import subprocess
import sys
from pathlib import Path

from dsjax.plan.cluster import bundled_clusters

ROOT = Path(__file__).parents[1]
TOO_SMALL = ("rtx4090-32", "tpu-v5e-32")
HOSTS = {"hosts-1": ("h200-8", "dp=8"), "hosts-2": ("h200-16", "dp=16"), "hosts-4": ("h200-32", "dp=32")}


def command(name: str) -> list[str]:
    cluster, mesh = HOSTS.get(name, (name, None))
    model = "deepseek-v2" if name in TOO_SMALL else "deepseek-v3"
    given = ["plan", "--model", model, "--cluster", cluster, "--mode", "aggregated"]
    return [*given, *(["--mesh", mesh] if mesh else []), "--recipe", f"deploy/overlays/{name}"]


if __name__ == "__main__":
    for name in sys.argv[1:] or (*HOSTS, *bundled_clusters()):
        print(name, flush=True)
        subprocess.run([sys.executable, "-m", "dsjax", *command(name)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
