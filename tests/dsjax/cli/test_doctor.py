"""`dsjax doctor` tells what is broken, and ends with 1 where something is."""

import errno
import importlib.metadata
import os
import re
import tempfile
from email.message import Message
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from typer.testing import CliRunner

from dsjax import versions
from dsjax.cli import doctor
from dsjax.cli.main import app
from dsjax.engine.device import process
from dsjax.errors import UserError
from dsjax.kernels import build, table
from sharding import MeshError, MeshSpec

pytestmark = pytest.mark.usefixtures("cache_settings")


@pytest.fixture
def installed(monkeypatch):
    """A function that lets packages have other versions, or none."""
    real = versions.installed_version

    def use(**others):
        def version(package, missing="not installed"):
            return others.get(package.replace("-", "_"), real(package, missing)) or missing

        monkeypatch.setattr(versions, "installed_version", version)
        monkeypatch.setattr(doctor, "installed_version", version)

    return use


READ_ONLY = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))


def found(part) -> dict[str, doctor.Finding]:
    return {one.subject: one for one in part()}


@pytest.mark.parametrize(
    ("others", "told", "advice"),
    [
        ({"jax": "0.11.2"}, "jax is 0.11.2", "'jax!=0.11.2,<0.12,>=0.10.2'"),
        (
            {"flax": "0.11.0", "uvicorn": "0.60"},
            "flax is 0.11.0, uvicorn is 0.60",
            "'flax>=0.12' 'uvicorn<0.60,>=0.30'",
        ),
        ({"msgspec": ""}, "msgspec is not installed", "'msgspec>=0.19'"),
    ],
)
def test_a_package_of_an_excluded_version_is_trouble_by_what_is_declared(installed, others, told, advice):
    installed(**others)
    finding = found(doctor._versions)["versions"]
    assert (finding.state, finding.found) == ("trouble", told)
    assert advice in finding.advice


def test_a_package_of_an_extra_counts_where_it_is_installed(installed):
    installed(ai_dynamo="1.7", pyzmq="", nixl_cu13="")
    finding = found(doctor._versions)["optional packages"]
    assert (finding.state, finding.found) == ("note", "ai-dynamo is 1.7")


def test_an_installed_dsjax_is_compared_with_its_own_metadata(installed, monkeypatch):
    metadata = Message()
    metadata["Requires-Python"] = ">=99"
    elsewhere = 'uvloop>=99; sys_platform == "no such"'
    for line in ("jax!=0.11.2,>=0.10.2", elsewhere, 'nixl>=2; extra == "nixl"', 'x; extra == "test"'):
        metadata["Requires-Dist"] = line
    monkeypatch.setattr(versions, "_SOURCE_TREE", Path("missing"))
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    installed(jax="0.11.2", nixl="1")
    found = [(one.package, one.is_optional) for one in versions.mismatches()]
    assert found == [("Python", False), ("jax", False), ("nixl", True)]


def read_only(monkeypatch, tmp_path):
    monkeypatch.setattr(process.tempfile, "TemporaryFile", READ_ONLY)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))


def read_only_with_programs(monkeypatch, tmp_path):
    (tmp_path / "program").touch()
    read_only(monkeypatch, tmp_path)


def no_home(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)


def broken_kernels(monkeypatch, tmp_path):
    (tmp_path / "native").mkdir()
    path = tmp_path / "native" / f"{build.source_version()}-{build.machine()}-00000000.so"
    path.write_bytes(b"\x7fELF and no more")
    monkeypatch.setattr(build, "compiler", lambda: None)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))


def no_device(monkeypatch, _):
    monkeypatch.setattr(MeshSpec, "build", Mock(side_effect=MeshError("JAX_PLATFORMS is 'cuda', and JAX found none")))


def unloadable_kernels(monkeypatch, tmp_path):
    broken_kernels(monkeypatch, tmp_path)
    monkeypatch.setattr(table.build, "find_or_build", lambda folder: build.BuiltLibrary(folder / "gone.so"))


@pytest.mark.parametrize(("break_it", "part", "subject", "told"), [
    (read_only, "_caches", "compiled programs", "will not be kept: cannot write"),
    (read_only_with_programs, "_caches", "compiled programs", "new ones are not kept"),
    (no_home, "_caches", "compiled programs", "there is no home folder"),
    (lambda patch, _: patch.setattr(tempfile, "mkdtemp", READ_ONLY), "_temporary_folder", "temporary folder", "Read-only file system"),
    (lambda patch, _: patch.setattr(doctor, "descriptor_limit", lambda: 20), "_open_files", "open files", "20 files and connections"),
    (broken_kernels, "_native_kernels", "native kernels", "do not work on this machine"),
    (unloadable_kernels, "_native_kernels", "native kernels", "do not load"),
    (lambda patch, _: patch.setenv("JAX_ENABLE_X64", "1"), "_settings", "JAX_ENABLE_X64", "is on"),
    (no_device, "_devices", "devices", "JAX_PLATFORMS is 'cuda'"),
])  # fmt: skip
def test_what_is_broken_is_trouble_and_ends_with_1(monkeypatch, tmp_path, break_it, part, subject, told):
    break_it(monkeypatch, tmp_path)
    finding = found(getattr(doctor, part))[subject]
    assert finding.state == "trouble"
    assert told in finding.found
    assert finding.advice
    monkeypatch.setattr(doctor, "run_checks", lambda: [finding])
    ended = CliRunner().invoke(app, ["doctor"])
    assert ended.exit_code == 1
    assert re.search(rf"trouble +{subject}: [^→]*\n +→ ", ended.output)


def test_a_quota_is_told(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(doctor, "available_cores", lambda: 2.5)
    assert found(doctor._cores)["cores"].found.startswith("2.5 of the machine's 64, by a quota")
    monkeypatch.setattr(doctor, "available_cores", lambda: 0.5)
    assert found(doctor._cores)["cores"].state == "note"


def test_what_cannot_be_looked_at_is_trouble_and_the_rest_is_looked_at(monkeypatch):
    """As with a JAX in which a name that is imported is gone."""

    def fail():
        raise ImportError("cannot import name 'xla_bridge'")
        yield

    monkeypatch.setattr(doctor, "_devices", fail)
    findings = found(doctor.run_checks)
    assert findings["fail"].state == "trouble"
    assert "xla_bridge" in findings["fail"].found
    assert {"host memory", "temporary folder"} <= findings.keys()


def test_the_temporary_folder_is_told_where_all_is_well(monkeypatch):
    assert found(doctor._temporary_folder)["temporary folder"].state == "ok"
    fails = Mock(side_effect=UserError("too long"))
    monkeypatch.setattr("dsjax.serve.front_ends.engine_server.private_listener", fails)
    assert found(doctor._temporary_folder)["temporary folder"].found == "too long"
