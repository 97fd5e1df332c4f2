"""The tool that measures what placing experts together saves: its table, and the file that it writes."""

import json
import sys

import numpy as np

import tools.coactivation as tool


def test_the_table_has_every_policy_and_the_placement_is_written(monkeypatch, capsys, tmp_path):
    rng = np.random.default_rng(0)
    # Pairs of groups are chosen together: experts 0 … 7 with 32 … 39, and so on.
    first = rng.integers(4, size=(1, 6 * tool.PIECE, 1)) * 8
    ids = first + np.argsort(rng.random((1, 6 * tool.PIECE, 8)), axis=2)[..., :4]
    monkeypatch.setattr(tool, "routing", lambda tokens: (np.concatenate([ids, ids + 32], axis=2), 64))
    written = tmp_path / "experts.json"
    monkeypatch.setattr(sys, "argv", ["coactivation.py", "--ranks", "8", "--redundant", "8", "--write", str(written)])
    tool.main()
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    hosts = {line[0].removeprefix("| "): float(line[2]) for line in lines}
    assert list(hosts) == ["by no load", "global", "hierarchical", "chosen together"]
    # A token's two groups are on one host of four, on which one in four tokens is.
    assert 0.7 < hosts["chosen together"] < 0.8 < hosts["global"]
    found = json.loads(written.read_text())
    assert np.shape(found["physical_to_logical"]) == (1, 72)
    assert np.shape(found["logical_load"]) == (1, 64)
