"""Print which tests to run for a changed file: `python -m pytest $(python tools/tests_of.py dsjax/engine/schedule/pages.py)`.

A module's tests are the test file of its name in the folder of `tests/` that mirrors its own, and each test file whose docstring names the
module. A module with neither has the whole mirrored folder. `tests/test_suite.py` holds that each module of the engine has one.
"""

import argparse
import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = Path("dsjax/engine")


@functools.cache
def named_in(tests: Path) -> dict[Path, set[str]]:
    """The paths that each test file's docstring names in backquotes, such as `schedule/pages.py`."""
    return {
        path: set((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("`")[1::2])
        for path in sorted(tests.rglob("test_*.py"))
    }


def files_of(module: Path, root: Path = ROOT) -> list[Path]:
    """The test files of a module; both are paths from the project's root. It is empty where no file is the module's own."""
    mirrored = Path("tests", module.parent, f"test_{module.name}")
    found = [mirrored] if (root / mirrored).exists() else []
    if module.is_relative_to(ENGINE):
        name = str(module.relative_to(ENGINE))
        found += [path.relative_to(root) for path, names in named_in(root / "tests" / ENGINE).items() if name in names]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a module or a test file")
    paths = []
    for file in parser.parse_args().files:
        file = file.resolve().relative_to(ROOT)
        if file.parts[0] == "tests":
            paths.append(file)
        else:
            mirrored = (folder for folder in Path("tests", file).parents if (ROOT / folder).is_dir())
            paths += files_of(file) or [next(mirrored)]
    print(*dict.fromkeys(paths), sep="\n")


if __name__ == "__main__":
    main()
