"""Every command in `tools/` says what it does, and does nothing else, when it is asked with `--help`."""

import os
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [
    path.relative_to(ROOT / "tools").as_posix()
    for path in sorted((ROOT / "tools").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]


@pytest.mark.slow
@pytest.mark.usefixtures("cache_settings")
@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_0_and_prints_the_usage(name: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    path = ROOT / "tools" / name
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    # As for a script of its own: what it borrows from the tests, it has to find by itself.
    elsewhere = [place for place in sys.path if not Path(place).is_relative_to(ROOT / "tests")]
    monkeypatch.setattr(sys, "path", [str(path.parent), *elsewhere])
    for word, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == ROOT / "tests":
            monkeypatch.delitem(sys.modules, word)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert f"usage: {path.name}" in capsys.readouterr().out
