"""The command `dsjax bench network`. It imports JAX only when it runs."""

import sys
from typing import Any

import typer
from rich.console import Console

from dsjax.bench.network.options import CollectiveGrid, VerdictOptions
from dsjax.bench.processes import Processes, as_flags, measuring_together
from dsjax.cli.options import options_of
from dsjax.cli.output import INTERRUPTED, report_console, write_json
from dsjax.errors import UserError
from dsjax.hosts import GroupOptions
from dsjax.options import check_place
from dsjax.progress import track

_EXIT_CODES = {None: 0, "as expected": 0, "warning": 3, "failing": 4}


@options_of(grid=CollectiveGrid, verdict=VerdictOptions, group=GroupOptions)
def network(grid: CollectiveGrid, verdict: VerdictOptions, group: GroupOptions) -> None:
    """Time a step's collectives on the links of a mesh, within a host and between hosts, and compare them with the cluster's limits.

    Exit status 0: all as expected; 3: a row is slower than the cluster's `warning`; 4: slower than `failing`, or wrong data.
    `dsjax plan --network` reads the JSON instead of using its assumptions. On several hosts, start the same command on each.
    """
    from dsjax.plan.cluster import load_cluster
    from sharding.mesh import MeshSpec

    spec = MeshSpec.parse(grid.mesh)
    if spec.num_devices < 2:
        raise UserError(
            f"--mesh {grid.mesh} is one device, which sends nothing; give a mesh of two or more, such as dp=8"
        )
    cluster = load_cluster(verdict.cluster) if verdict.cluster is not None else None
    must_match = as_flags(grid) | {"--cluster": verdict.cluster}
    with measuring_together(group, spec.num_devices, lambda: must_match) as processes:
        code = _measure(grid, verdict, spec, cluster, processes)
    if code:
        raise typer.Exit(code)


def _measure(grid: CollectiveGrid, verdict: VerdictOptions, spec: Any, cluster: Any, processes: Processes) -> int:
    """Measure; process 0 prints and writes the results. Return the exit code, which is the same in all processes."""
    import jax.numpy as jnp

    from dsjax.bench.modules.setting import Device
    from dsjax.bench.network.programs import device_groups, device_pairs
    from dsjax.bench.network.run import cases, check_cluster, run_cases, show, to_json, worst

    if processes.leads:  # fail before the measurement, not after it
        check_place("--json", verdict.json_file)
    mesh = spec.build()
    processes.check_shares(spec, mesh)
    groups = [*device_groups(spec, mesh), *device_pairs(mesh)]
    if cluster:
        check_cluster(cluster, mesh.devices)
    first = mesh.devices.flat[0]
    name = grid.dtype if grid.dtype != "auto" else "float32" if first.platform == "cpu" else "bfloat16"
    dtype = jnp.dtype(name)
    todo = list(cases(groups, grid))
    timed = track(Console(stderr=True), verdict.progress and processes.leads, "timing cases", todo)
    results = run_cases(timed, grid, dtype, cluster, processes.agree)

    def report() -> None:
        show(report_console(stderr=verdict.json_file == "-"), results, cluster)
        if verdict.json_file:
            body = to_json(results, grid, dtype, cluster, Device.of(first), processes.members)
            write_json(verdict.json_file, body)

    processes.report(results, report)
    if results.interrupted:
        print("interrupted: the figures are of what was done until then", file=sys.stderr)
        return INTERRUPTED
    if cluster and not results.rows:
        raise UserError("no collective was timed, so there is no verdict; the lines above say why each was left out")
    return _EXIT_CODES[worst(results)]
