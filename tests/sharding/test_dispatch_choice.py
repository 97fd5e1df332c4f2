"""What ``auto`` and the default capacity decide."""

import pytest

from sharding.dispatch import choose_method, default_capacity


def test_capacity_never_exceeds_the_tokens_and_covers_even_routing_with_a_margin():
    assert default_capacity(tokens=8, top_k=8, ranks=32) == 8
    assert default_capacity(tokens=1, top_k=8, ranks=32) == 1
    mean = 128 * (1 - (1 - 1 / 32) ** 8)
    capacity = default_capacity(tokens=128, top_k=8, ranks=32)
    assert mean < capacity < 2 * mean
    assert capacity % 8 == 0


@pytest.mark.parametrize(
    ("tokens", "ranks", "platform", "method"),
    [
        (8, 32, "gpu", "gather"),  # no capacity below 8 would save a further round
        (128, 32, "gpu", "padded"),
        (4096, 32, "gpu", "ragged"),
        (4096, 32, "tpu", "ragged"),
        (4096, 2, "gpu", "gather"),  # of 8 experts one is nearly always on each of two ranks
        (4096, 1, "gpu", "gather"),  # only the width is split
        (8, 32, "cpu", "gather"),
        (128, 32, "cpu", "gather"),
        (1024, 32, "cpu", "padded"),
    ],
)
def test_auto_goes_by_tokens_ranks_and_platform(tokens, ranks, platform, method):
    assert choose_method(tokens, 8, ranks, platform) == method
