"""A DeepSeek-V4 in two processes of a stage each, the first without compressed entries, makes the tokens of one device."""

import pytest
from test_v4_processes import hold_to_one_device, written

pytestmark = pytest.mark.slow


def test_two_processes_of_a_stage_each_make_the_tokens_of_one_device(tmp_path):
    hold_to_one_device(*written(tmp_path, "wc"), mesh="pp=2,tp=2")
