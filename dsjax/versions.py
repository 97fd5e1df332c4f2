"""Installed package versions, and the versions that dsjax declares to work with."""

import platform
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_SOURCE_TREE = Path(__file__).parents[1] / "pyproject.toml"
_NOT_SERVED_WITH = ("test", "bench", "notebooks")
"""Extras that no server needs."""


def installed_version(package: str, missing: str = "not installed") -> str:
    """Return the version of a package; `missing` if it is not installed, as dsjax itself when it runs from its source tree."""
    import importlib.metadata  # takes 30 ms, and most commands do not need it

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return missing


class Mismatch(NamedTuple):
    """A package that is missing, or has a version that dsjax does not work with."""

    package: str
    installed: str | None  # its version; None if it is missing
    wanted: str  # requirement to pass to `pip install`
    is_optional: bool  # whether it belongs to an extra


def mismatches() -> list[Mismatch]:
    """Compare the installed packages with those that dsjax declares, in its metadata or the source tree's `pyproject.toml`.

    A package of an extra counts only if it is installed.
    """
    from packaging.specifiers import SpecifierSet

    python, declared = _declared()
    wrong = []
    if not SpecifierSet(python).contains(platform.python_version(), prereleases=True):
        wrong.append(Mismatch("Python", platform.python_version(), f"Python{python}", False))
    for requirement, extra in declared:
        version = installed_version(requirement.name, missing="") or None
        fits = version is not None and requirement.specifier.contains(version, prereleases=True)
        if not fits and not (extra and version is None):
            bounds = str(requirement.specifier)
            wrong.append(Mismatch(requirement.name, version, requirement.name + bounds, bool(extra)))
    return wrong


def _declared() -> tuple[str, list[tuple["Requirement", str]]]:
    """Return the bounds of Python, and each requirement that applies to this machine with its extra ("" if none)."""
    from packaging.requirements import Requirement

    project = tomllib.loads(_SOURCE_TREE.read_text(encoding="utf-8"))["project"] if _SOURCE_TREE.is_file() else {}
    if project.get("name") == "dsjax":
        groups = {"": project["dependencies"]} | project["optional-dependencies"]
        python, lines = project["requires-python"], [(one, extra) for extra, group in groups.items() for one in group]
    else:
        import importlib.metadata

        metadata = importlib.metadata.metadata("dsjax")
        python, lines = metadata["Requires-Python"] or "", list(_of_metadata(metadata.get_all("Requires-Dist") or []))
    parsed = [(Requirement(line), extra) for line, extra in lines if extra not in _NOT_SERVED_WITH]
    return python, [
        (one, extra) for one, extra in parsed if one.marker is None or one.marker.evaluate({"extra": extra})
    ]


def _of_metadata(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each requirement with its extra, taken from its marker."""
    for line in lines:
        _, _, extra = line.partition("extra ==")
        yield line, extra.strip(" '\"()")
