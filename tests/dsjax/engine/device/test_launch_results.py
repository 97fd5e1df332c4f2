"""Tokens of a launch, read on the host. Scores, drafts and rules are in `test_sampled_generation.py`."""

from types import SimpleNamespace

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
    shape = SimpleNamespace(decode_rows=(len(firsts), 1 + drafts))
    launched = SimpleNamespace(shape=shape, rules=SimpleNamespace(slots={}))
    found = _RankReader(0, launched, np.ravel(tokens), None, None).decodes(len(firsts))
    failed = {"finite": False}, {"error": NO_TOKEN_ALLOWED}
    expected = [RowResult((5,)), RowResult(), *(RowResult((), **how) for how in failed)]
    assert [row._replace(token_ids=tuple(row.token_ids), num_drafts=0) for row in found] == expected
    assert [row.num_drafts for row in found] == [drafts, 0, drafts, drafts]
