"""How the sweep over layouts compiles, and what it says of a run."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from layouts import Answer, judge

TOOL = Path(__file__).parents[2] / "tools/check_layouts.py"


@pytest.mark.parametrize("asked", ["on the command line", "by the process that started this one", "not at all"])
def test_with_servings_compilation_no_flag_of_the_tests_is_left(asked):
    arguments = ["--serving-compilation"] if asked == "on the command line" else []
    environment = {name: value for name, value in os.environ.items() if name != "DSJAX_SERVING_COMPILATION"}
    if asked == "by the process that started this one":
        environment["DSJAX_SERVING_COMPILATION"] = "1"
    code = "from quick_compilation import QUICK_COMPILATION; print(len(QUICK_COMPILATION))"
    ran = [sys.executable, "-c", code, *arguments]
    found = subprocess.run(
        ran, cwd=TOOL.parents[1] / "tests", env=environment, capture_output=True, text=True, timeout=240
    )
    assert (int(found.stdout) > 0) == (asked == "not at all"), found.stderr


def test_a_balanced_run_must_have_moved_experts_too():
    reference, other = Answer(np.ones((1, 4)), [[3]]), np.full((1, 4), 2.0)
    assert judge(Answer(np.ones((1, 4)), [[3]], rebalances=3), reference, rebalances=3) == "equal"
    assert judge(Answer(np.ones((1, 4)), [[3]], rebalances=2), reference, rebalances=3) == "only 2 rebalances"
    assert judge(Answer(other, [[3]]), reference).startswith("logits differ by")
    assert judge(Answer(other, [[3]], rebalances=2), reference, rebalances=3).endswith("; only 2 rebalances")
