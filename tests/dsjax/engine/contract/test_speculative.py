"""Options of speculative decoding: read from JSON and dictionaries, refused with the field's name."""

import pytest

from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.errors import UserError

BY_LOAD = [[1, 8, 3], [9, 64, 1], [65, 4096, 0]]


def test_vllms_older_name_is_the_same_method():
    assert SpeculativeConfig.parse({"method": "deepseek_mtp"}) == SpeculativeConfig(method="mtp")


def test_ranges_choose_by_running_requests_and_the_last_one_goes_on():
    one = SpeculativeConfig(method="mtp", num_speculative_tokens=3, num_speculative_tokens_per_batch_size=BY_LOAD)
    assert [one.drafts(running) for running in (0, 1, 8, 9, 64, 65, 4096, 4097)] == [3, 3, 3, 1, 1, 0, 0, 0]


def test_a_measured_number_may_be_any_up_to_the_most():
    one = SpeculativeConfig(method="mtp", num_speculative_tokens=3, num_speculative_tokens_per_batch_size="auto")
    assert one.measures
    assert (one.counts(1, 8), one.drafts(5), one.after_prompts) == ([0, 1, 2, 3], 3, 1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("method", "eagle", 'method "eagle"; expected "mtp"'),
        ("num_speculative_tokens", 5, "from 1 to 4"),
        ("num_speculative_tokens_per_batch_size", [], "a list of ranges"),
        ("num_speculative_tokens_per_batch_size", "automatic", 'or "auto"'),
        ("num_speculative_tokens_per_batch_size", [[1, 8]], "three integers"),
        ("num_speculative_tokens_per_batch_size", [[2, 8, 1]], "to begin at 1"),
        ("num_speculative_tokens_per_batch_size", [[1, 8, 1], [10, 20, 0]], "to begin at 9"),
        ("num_speculative_tokens_per_batch_size", [[1, 0, 1]], "to end at 1 or more"),
        ("num_speculative_tokens_per_batch_size", [[1, 8, 3]], "to draft 0 to num_speculative_tokens = 2"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field_and_what_would_fit(field, value, message):
    with pytest.raises(UserError, match=message) as refused:
        SpeculativeConfig.parse({"method": "mtp", "num_speculative_tokens": 2, field: value})
    assert field in str(refused.value)
