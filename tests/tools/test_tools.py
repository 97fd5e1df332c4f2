"""Every command in `tools/` says what it does, and does nothing else, when it is asked with `--help`."""

import os
import runpy
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
NO_COMMAND = "soaks/separated.py"
"""A process that `tools/soak.py` starts."""
COMMANDS = [
    name
    for path in sorted((ROOT / "tools").rglob("*.py"))
    if (name := path.relative_to(ROOT / "tools").as_posix()) != NO_COMMAND
    and '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]


@pytest.fixture
def kept_settings():
    """JAX's settings, which commands change before they read their options."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("kept_settings")
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
