"""`dsjax bench network`: the command. JAX is imported when it runs."""

import dataclasses
import importlib.metadata
import shlex
import sys
from typing import Any

import typer
from rich.console import Console

from dsjax.bench.network.options import GridOptions, GroupOptions, VerdictOptions
from dsjax.bench.serve.flags import options_of
from dsjax.cli.output import report_console, write_json
from dsjax.errors import UserError

_EXIT_CODES = {None: 0, "as expected": 0, "warning": 3, "failing": 4}
_INTERRUPTED = 130


@options_of(grid=GridOptions, verdict=VerdictOptions, group=GroupOptions)
def network(grid: GridOptions, verdict: VerdictOptions, group: GroupOptions) -> None:
    """Time the collectives that a step sends, on the links of a mesh, inside a host and between hosts, and judge them.

    Ends with 0 where all is as expected, 3 where a row is slower than the cluster's warning, 4 where one fails or data arrive wrong.
    `dsjax plan --network` takes the JSON in place of its assumptions. On many hosts, start the same command on each.
    """
    from dsjax.hosts import HostOptions
    from dsjax.plan.cluster import load_cluster
    from sharding.emulation import emulate_devices
    from sharding.mesh import MeshSpec

    spec = MeshSpec.parse(grid.mesh)
    if spec.num_devices < 2:
        raise UserError(
            f"--mesh {grid.mesh} is one device, which sends nothing; give a mesh of two or more, such as dp=8"
        )
    cluster = load_cluster(verdict.cluster) if verdict.cluster else None
    hosts = HostOptions.find(**dataclasses.asdict(group))
    emulate_devices(-(-spec.num_devices // (hosts.num_processes if hosts else 1)))
    joined = None
    if hosts:
        from dsjax.hosts.group import HostGroup

        joined = HostGroup.start(hosts, lambda: _alike(grid, verdict))
    try:
        code = _measure(grid, verdict, spec, cluster, joined)
    finally:
        if joined:
            joined.leave()
    if code:
        raise typer.Exit(code)


def _measure(grid: GridOptions, verdict: VerdictOptions, spec: Any, cluster: Any, joined: Any) -> int:
    """The exit code, the same in all processes; process 0 prints and writes."""
    import jax.numpy as jnp

    from dsjax.bench.modules.ceilings import Device
    from dsjax.bench.modules.report import case_progress
    from dsjax.bench.network.groups import device_groups
    from dsjax.bench.network.report import show, to_json
    from dsjax.bench.network.run import cases, check_cluster, run_cases

    mesh = spec.build()
    groups = device_groups(spec, mesh)
    if cluster:
        check_cluster(cluster, mesh.devices)
    first = mesh.devices.flat[0]
    name = grid.dtype if grid.dtype != "auto" else "float32" if first.platform == "cpu" else "bfloat16"
    dtype = jnp.dtype(name)
    todo = list(cases(groups, grid))
    leads = joined is None or joined.is_leader
    agree = joined.ask if joined else lambda stage, value: [value]
    with case_progress(Console(stderr=True), verdict.progress and leads, len(todo)) as on_start:
        found = run_cases(todo, grid, dtype, cluster, agree, on_start)
    if found.interrupted and joined:
        raise KeyboardInterrupt  # the others wait for this process: the group ends
    if leads:
        show(report_console(stderr=verdict.json_file == "-"), found, cluster)
        if verdict.json_file:
            members = [{"process_id": m.process_id, "host": m.host} for m in joined.members] if joined else []
            command = shlex.join(["dsjax", *sys.argv[1:]])
            body = to_json(found, grid, dtype, cluster, Device.of(first), members, command)
            write_json(verdict.json_file, body)
    if found.interrupted:
        print("interrupted: the figures are of what was done until then", file=sys.stderr)
        return _INTERRUPTED
    return _EXIT_CODES[found.verdict]


def _alike(grid: GridOptions, verdict: VerdictOptions) -> dict[str, Any]:
    """What must be the same in all processes, by name as messages have it."""
    found: dict[str, Any] = {}
    for package in ("dsjax", "jax", "jaxlib"):
        try:
            found[f"the version of {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[f"the version of {package}"] = "not installed"
    found |= {f"--{name.replace('_', '-')}": value for name, value in dataclasses.asdict(grid).items()}
    return found | {"--cluster": verdict.cluster}
