"""What came of drafts is counted of decodes alone."""

from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.stats import DraftCounts


def test_prompts_and_rows_without_drafts_count_nothing():
    result = RankResults([RowResult((5,))], [RowResult((5, 6), num_drafts=2)])
    assert DraftCounts.of([result]) == DraftCounts(0, 0, 0, ())
