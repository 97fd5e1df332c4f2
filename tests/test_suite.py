"""How the suite is shared among processes: `pytest_xdist_auto_num_workers` and the order of files, in `conftest.py` beside this file."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def suite(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(HERE / "conftest.py"))


@pytest.mark.parametrize(
    ("arguments", "asked", "processes"),
    [
        ([HERE], (), min((os.cpu_count() or 1) + 1, 8)),
        ([HERE / "dsjax" / "plan", HERE / "sharding"], (), min((os.cpu_count() or 1) + 1, 8)),
        ([__file__], (), 0),
        ([f"{__file__}::test_a", f"{__file__}::test_b"], (), 0),
        ([HERE / "dsjax" / "top"], (), 0),  # one file
        ([__file__, HERE / "sharding" / "test_mesh.py"], (), 2),
        ([HERE], ("-m", "gpu"), 0),
    ],
)
def test_there_are_as_many_processes_as_there_is_to_share(suite, monkeypatch, arguments, asked, processes):
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    config = SimpleNamespace(args=list(map(str, arguments)), invocation_params=SimpleNamespace(args=asked))
    assert suite.pytest_xdist_auto_num_workers(config) == processes


def test_files_with_slow_tests_come_first_and_whole(suite):
    def item(file: str, name: str, slow: bool):
        return SimpleNamespace(path=file, name=name, get_closest_marker=lambda _: slow or None)

    items = [
        item("a", "1", False),
        item("b", "2", False),
        item("b", "3", True),
        item("b", "4", False),
        item("c", "5", False),
    ]
    suite.pytest_collection_modifyitems(items)
    assert [each.name for each in items] == ["2", "3", "4", "1", "5"]
