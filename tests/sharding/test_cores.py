"""A process has as many threads that compute as it may use cores, whatever its machine has."""

import os
from pathlib import Path

import numpy as np
import pytest

from dsjax.checkpoint import load
from dsjax.checkpoint.hub import resolve
from dsjax.config import load_config
from dsjax.engine.program_cache import compiled_programs
from dsjax.kernels import build, table
from sharding import MeshSpec, Rules, cores
from sharding.emulation import emulate_devices


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of 64 cores, whose files of control groups a test writes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)

    def write(files: dict[str, str], groups: str = "0::/\n") -> float:
        written = {"proc/self/cgroup": groups} | {f"cgroup/{path}": text for path, text in files.items()}
        for path, text in written.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text + "\n")
        return cores.available_cores(tmp_path / "proc", tmp_path / "cgroup")

    return write


@pytest.mark.parametrize(
    ("files", "groups", "available"),
    [
        ({}, "0::/", 64),
        ({"cpu.max": "max 100000"}, "0::/", 64),
        ({"cpu.max": "250000 100000"}, "0::/", 2.5),
        ({"cpu.max": "999900000 100000"}, "0::/", 64),
        # A service of systemd, which is bound by its slice more than by itself.
        ({"a.slice/cpu.max": "200000 100000", "a.slice/b.service/cpu.max": "800000 100000"}, "0::/a.slice/b.service", 2),
        # Version 1, with the container's own group as the root although the kernel tells the host's path, and without.
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/docker/4f", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/", 64),
        ({"cpu,cpuacct/x/cpu.cfs_quota_us": "50000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/x/y", 0.5),
        ({"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, "4:memory:/z\n3:cpuacct,cpu:/x", 3),
        # What another controller's group says is nothing about processor time.
        ({"cpu/m/cpu.cfs_quota_us": "100000", "cpu/m/cpu.cfs_period_us": "100000"}, "4:memory:/m", 64),
        ({"cpu.max": "", "cpu/cpu.cfs_quota_us": "damaged"}, "no group", 64),
    ],
)  # fmt: skip
def test_the_least_quota_of_a_group_and_those_above_it_counts(machine, files, groups, available):
    assert machine(files, groups) == available
    assert cores.available_cores(Path("missing"), Path("missing")) == 64, "without control groups"


@pytest.fixture
def quota_of_three(machine, monkeypatch, tmp_path):
    machine({"cpu.max": "350000 100000"})
    monkeypatch.setattr(cores, "_groups", lambda proc, cgroup: [tmp_path / "cgroup"])
    assert cores.most_threads() == 3


class Asked(Exception):
    """How many threads somebody asked for."""


def ask(number, **_):
    raise Asked(number)


def test_whatever_computes_with_threads_has_the_quotas(quota_of_three, monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setenv("PJRT_NPROC", "0")
    emulate_devices(1)
    assert os.environ["PJRT_NPROC"] == "3"
    emulate_devices(2)
    assert os.environ["PJRT_NPROC"] == "4"  # two a device: fewer would deadlock its collectives
    monkeypatch.setattr(build, "find_or_build", lambda folder: build.BuiltLibrary(tmp_path))
    monkeypatch.setattr(table.NativeKernels, "load", lambda path, threads: threads)
    kernels = [table.choose_kernels("auto", "cpu", np.dtype(np.float32), devices=n, cache=tmp_path) for n in (1, 2)]
    assert [each.native for each in kernels] == [3, 1]
    monkeypatch.setattr(compiled_programs, "ThreadPoolExecutor", ask)
    with pytest.raises(Asked, match="3"):
        compiled_programs.CompiledPrograms(None, None, None).compile_all({}, None, None)
    monkeypatch.setattr(load, "ThreadPoolExecutor", ask)
    directory, spec = resolve("demo"), MeshSpec.parse("dp=1")
    with pytest.raises(Asked, match="3"):
        load.load(load_config(directory), directory, spec.build(), Rules.for_mesh(spec))
