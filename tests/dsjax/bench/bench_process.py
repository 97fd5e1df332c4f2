"""One process of a group that runs two benchmarks, one after the other: `test_bench_processes.py` starts two of these."""

import argparse
import sys

from dsjax.bench.modules import command as modules_command
from dsjax.bench.modules import routed
from dsjax.bench.modules.options import ModelOptions, ModuleGrid, RunOptions
from dsjax.bench.network import command as network_command
from dsjax.bench.network import options as network_options
from dsjax.bench.processes import measuring_together
from dsjax.hosts import GroupOptions
from dsjax.plan.cluster import load_cluster
from sharding.mesh import MeshSpec


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs=3)
    parser.add_argument("--coordinator-address")
    for name in ("num-processes", "process-id", "start-timeout", "heartbeat-timeout"):
        parser.add_argument(f"--{name}", type=int)
    given = vars(parser.parse_args())
    (cluster, network_json, modules_json), spec = given.pop("files"), MeshSpec.parse("dp=4")
    with measuring_together(GroupOptions(**given), spec.num_devices, dict) as processes:
        grid = network_options.CollectiveGrid(
            mesh="dp=4", sizes="64", pair_sizes="64", repeats=2, only="all_to_all,send_receive"
        )
        verdict = network_options.VerdictOptions(cluster=cluster, json_file=network_json, progress=False)
        code = network_command._measure(grid, verdict, spec, load_cluster(cluster), processes)
        routed.METHODS, routed.SKEWS = ("padded",), {"even": 0.0}  # one program to compile
        # Nothing is built, and no ceiling is measured: this test times nothing that anybody reads.
        model = ModelOptions(model="demo", kernels="plain")
        run = RunOptions(seconds=0.001, hardware="h200", json_file=modules_json, progress=False)
        one_device = ModuleGrid(only="norms,dispatch", tokens="2", mesh="dp=4")
        modules_command._measure(model, one_device, run, spec, processes)
    return code


if __name__ == "__main__":
    sys.exit(main())
