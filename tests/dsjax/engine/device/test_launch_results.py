"""Tokens of a launch, read on the host. Scores, drafts and rules are in `test_sampled_generation.py`."""

from unittest.mock import Mock

import numpy as np
import pytest

from dsjax.engine.contract.executor import RowResult
from dsjax.engine.device.launch_results import NO_TOKEN_ALLOWED, _RankReader
from dsjax.engine.device.sampler import NONE_ALLOWED, NOT_FINITE
from dsjax.engine.device.slots import NOT_COMPUTED, REJECTED


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_row_that_computed_nothing_has_not_failed(drafts):
    firsts = [5, NOT_COMPUTED, NOT_FINITE, NONE_ALLOWED]
    tokens = [[first, *[NOT_COMPUTED if first == NOT_COMPUTED else REJECTED] * drafts] for first in firsts]
    launched = Mock(rules=Mock(slots={}), shape=Mock(decode_rows=(len(firsts), 1 + drafts)))
    found = _RankReader(0, launched, np.ravel(tokens), None, None).decodes(len(firsts))
    expected = [RowResult((5,)), RowResult(), RowResult(finite=False), RowResult(error=NO_TOKEN_ALLOWED)]
    assert [(*row.token_ids, row.num_drafts) for row in found] == [(5, drafts), (0,), (drafts,), (drafts,)]
    assert [row[1:5] for row in found] == [row[1:5] for row in expected]
