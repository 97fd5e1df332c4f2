"""Writes `deploy/requirements-VARIANT.txt`: every package of an image, with one version and the hashes of its files.

    pip install uv
    python tools/lock_requirements.py [VARIANT …]            # resolve again, through PyPI
    python tools/lock_requirements.py --check                # offline: pyproject.toml is satisfied by every file; exits with 1 where not
    pip-audit --strict --require-hashes --disable-pip -r deploy/requirements-cpu.txt      # ask PyPI for known vulnerabilities

`deploy/Dockerfile` installs a file whole, without resolving: `pip install --no-deps --require-hashes`. A file holds for Python 3.12 on
every platform; lines that one platform alone needs carry a marker. `--upgrade` takes newer versions; without it, versions stay where they
fit.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYTHON = "3.12"
MACHINES = ("x86_64", "aarch64")
"""GB200's hosts have Arm processors."""
BENCH = ("aiohttp>=3.10",)
"""What `dsjax bench serve` asks with."""
DYNAMO = ("transformers", "kubernetes", "redis", "zstandard")
DYNAMO_ALONE = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
"""They are locked without what they ask for: one package of it cannot be had from everywhere, and a worker does not need it
(docs/dynamo.md)."""
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "cpu": ((), BENCH, ()),
    "cuda": (("cuda",), BENCH, ()),
    "tpu": (("tpu",), BENCH, ()),
    "cuda-dynamo": (("cuda",), BENCH + DYNAMO, DYNAMO_ALONE),
}
"""Each variant of `deploy/Dockerfile` has extras of pyproject.toml, further packages, and packages without their dependencies."""
BUILD = "build"
"""The file of what the wheel itself is built with."""
FILES = (*VARIANTS, BUILD)
_LINE = re.compile(
    r"^(?P<requirement>[A-Za-z0-9][^\\\n]*?)(?P<rest>(?:\s*\\\n\s+--hash=sha256:[0-9a-f]{64})*)$", re.MULTILINE
)


def lock_file(variant: str) -> Path:
    return ROOT / "deploy" / f"requirements-{variant}.txt"


def wanted(variant: str) -> list[Requirement]:
    """Everything that a variant's file has to satisfy directly."""
    everything = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if variant == BUILD:
        return [Requirement(line) for line in everything["build-system"]["requires"]]
    project, (extras, further, alone) = everything["project"], VARIANTS[variant]
    lines = [*project["dependencies"], *(line for one in extras for line in project["optional-dependencies"][one])]
    return [Requirement(line) for line in (*lines, *further, *alone)]


def locked(text: str) -> list[tuple[Requirement, int]]:
    """The lines of a file, each with how many hashes it has."""
    return [(Requirement(one["requirement"]), one["rest"].count("--hash=")) for one in _LINE.finditer(text)]


def environment(machine: str) -> dict[str, str]:
    """What markers read in an image."""
    return {
        "python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "platform_machine": machine, "sys_platform": "linux",
        "platform_system": "Linux", "os_name": "posix", "implementation_name": "cpython", "platform_python_implementation": "CPython",
    }  # fmt: skip


def mistakes(variant: str, text: str) -> Iterator[str]:
    """Say what of a variant's file is not what pyproject.toml and this tool ask for."""
    lines = locked(text)
    for requirement, hashes in lines:
        pins = [one.operator for one in requirement.specifier]
        if pins != ["=="] or not hashes:
            yield f"{requirement} is not one version with hashes"
    rest = _LINE.sub("", text)
    strange = (line for line in rest.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    yield from (f"the line {line!r} is no locked package" for line in strange)
    for machine in MACHINES:
        here = environment(machine)
        versions: dict[str, Version] = {}
        for requirement, _ in lines:
            if requirement.marker is None or requirement.marker.evaluate(here):
                name = canonicalize_name(requirement.name)
                if name in versions:
                    yield f"{name} is locked twice on {machine}"
                versions[name] = Version(next(iter(requirement.specifier)).version)
        for requirement in wanted(variant):
            version = versions.get(canonicalize_name(requirement.name))
            if requirement.marker is not None and not requirement.marker.evaluate(here):
                continue
            if version is None:
                yield f"{requirement} is not locked on {machine}"
            elif not requirement.specifier.contains(version, prereleases=True):
                yield f"{requirement} is locked at {version} on {machine}"


def compile_lines(lines: list[str], kept: Path, *options: str) -> str:
    """Resolve with uv, whose output goes over `kept`, so that versions there stay where they fit."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "wanted.in"), Path(folder, "locked.txt")
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if kept.exists():
            target.write_bytes(kept.read_bytes())
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", f"--python-version={PYTHON}"]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--no-config"]
        command += ["--index-url=https://pypi.org/simple"]
        subprocess.run(
            [*command, *options, str(source), "--output-file", str(target)], check=True, stdout=subprocess.DEVNULL
        )
        return target.read_text(encoding="utf-8")


def write(variant: str, *options: str) -> None:
    alone = () if variant == BUILD else VARIANTS[variant][2]
    lines = [str(one) for one in wanted(variant) if str(one) not in alone]
    text = compile_lines(lines, lock_file(variant), *options)
    if alone:
        text += compile_lines(list(alone), Path("none"), "--no-deps")
    head = f"# Made by `python tools/lock_requirements.py {variant}`; deploy/Dockerfile installs it.\n"
    lock_file(variant).write_text(head + text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"which (default: {', '.join(FILES)})")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare the files with pyproject.toml, offline")
    mode.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    args = parser.parse_args()
    if unknown := [name for name in args.variants if name not in FILES]:
        parser.error(f"no variant {', '.join(map(repr, unknown))}; expected some of {', '.join(FILES)}")
    failed = 0
    for variant in args.variants or FILES:
        if args.check:
            path = lock_file(variant)
            lines = list(mistakes(variant, path.read_text(encoding="utf-8"))) if path.exists() else ["it is not there"]
            for line in lines:
                print(f"{path.relative_to(ROOT)}: {line}; run python tools/lock_requirements.py {variant}")
            failed |= bool(lines)
        else:
            print(variant, flush=True)
            write(variant, *(["--upgrade"] if args.upgrade else []))
    sys.exit(failed)
