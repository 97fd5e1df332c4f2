"""A sweep's slices are all of its runs, each once, and a commit chooses one of them by its hash."""

import argparse
import subprocess

import pytest

from tools.sweep_slice import ROOT, Slice


def test_the_slices_together_are_all_runs_each_once():
    runs = range(23)
    slices = [list(Slice.parse(f"{number}/5").of(runs)) for number in range(5)]
    assert slices[3] == [3, 8, 13, 18]
    assert sorted(run for own in slices for run in own) == list(runs)
    assert Slice().of(runs) == runs


def test_a_commit_chooses_the_slice_by_its_hash():
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not commit:
        pytest.skip("this is no git checkout")
    assert Slice.parse("HEAD/77") == Slice.parse(f"{commit}/77") == Slice(int(commit, 16) % 77, 77)


@pytest.mark.parametrize("text", ["3", "HEAD", "1/0", "5/5", "/5", "no-such-branch/5", "1/x"])
def test_what_is_no_slice_is_refused_with_what_would_be(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"found .*, expected .*HEAD"):
        Slice.parse(text)
