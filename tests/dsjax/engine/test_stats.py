"""What came of drafts is counted over all ranks: a row's last token is the model's own, and a row that failed has none."""

from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.stats import DraftCounts


def test_accepted_drafts_are_the_tokens_of_a_row_but_for_the_models_own():
    rows = [RowResult((5, 6, 7), num_drafts=3), RowResult((5,), num_drafts=3)]
    other = [RowResult((5, 6, 7, 8), num_drafts=3), RowResult((5,))]
    counts = DraftCounts.of([RankResults(rows, []), RankResults(other, [])])
    assert counts == DraftCounts(3, 9, 2 + 0 + 3, (2, 2, 1))


def test_of_a_row_that_failed_all_tokens_are_drafts():
    failed = RowResult((5, 6), error="no token is allowed", num_drafts=2)
    assert DraftCounts.of([RankResults([failed], [])]) == DraftCounts(1, 2, 2, (1, 1))


def test_prompts_and_rows_without_drafts_count_nothing():
    result = RankResults([RowResult((5,))], [RowResult((5, 6), num_drafts=2)])
    assert DraftCounts.of([result]) == DraftCounts(0, 0, 0, ())
