"""What dsjax and sharding import is declared, and what is private of others is imported in one place."""

import functools
import re
import sys
import tomllib

from test_house import ROOT, imported, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "zmq": "pyzmq", "dynamo": "ai-dynamo", "yaml": "pyyaml"}
"""The distribution of what is imported under another name."""
PRIVATE = {
    "jax._src": ["sharding/jax_internals.py"],
    "uvicorn.protocols": ["dsjax/serve/connections.py"],
    "fastapi.routing": ["dsjax/serve/routing.py"],
}
"""Which files may reach into the modules that a package does not promise to keep."""


@functools.cache
def imports() -> dict[str, set[str]]:
    """Which files import each module or name of one."""
    found: dict[str, set[str]] = {}
    for package in ("dsjax", "sharding"):
        for _, path in modules(package):
            for name in imported(path):
                found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def normal(name: str) -> str:
    """A distribution's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> dict[str, str]:
    """The requirement of each distribution: of the project, or of one of its extras that is not for tests."""
    extras = [one for name, group in PROJECT["optional-dependencies"].items() if name != "test" for one in group]
    requirements = [*extras, *PROJECT["dependencies"]]
    return {normal(re.match(r"[\w.-]+", one)[0]): one for one in requirements}


def test_every_package_that_is_imported_is_declared():
    own = {*sys.stdlib_module_names, "dsjax", "sharding"}
    packages = {name.partition(".")[0] for name in imports()} - own
    assert {"jax", "fastapi", "zmq"} <= packages
    assert {name for name in packages if normal(DISTRIBUTIONS.get(name, name)) not in declared()} == set()


def test_private_modules_are_imported_in_one_place_and_no_others_are():
    for package, allowed in PRIVATE.items():
        files = {file for name, files in imports().items() if f"{name}.".startswith(f"{package}.") for file in files}
        assert sorted(files) == allowed
    private = [name for name in imports() if any(re.match(r"_[a-z]", part) for part in name.split(".")[:-1])]
    assert {name for name in private if not name.startswith(("jax._src", "dsjax", "sharding", "__future__"))} == set()


def test_what_is_reached_into_has_an_upper_bound():
    assert all("<" in declared()[package] for package in ("jax", "jaxlib", "fastapi", "starlette", "uvicorn"))
