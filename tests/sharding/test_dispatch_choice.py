"""What ``auto`` and the default capacity decide."""

import pytest

from sharding.dispatch import choose_method, default_capacity, host_capacity, hosts_of_a_token


def test_capacity_never_exceeds_the_tokens_and_covers_even_routing_with_a_margin():
    assert default_capacity(tokens=8, top_k=8, ranks=32) == 8
    assert default_capacity(tokens=1, top_k=8, ranks=32) == 1
    mean = 128 * (1 - (1 - 1 / 32) ** 8)
    capacity = default_capacity(tokens=128, top_k=8, ranks=32)
    assert mean < capacity < 2 * mean
    assert capacity % 8 == 0


def test_a_token_of_four_groups_reaches_fewer_hosts_and_needs_less_room_there():
    of_v3 = (8, 4)
    assert hosts_of_a_token(8, 8) == pytest.approx(8 * (1 - (7 / 8) ** 8))
    assert hosts_of_a_token(8, 8, of_v3) == 4  # a group a host
    assert hosts_of_a_token(8, 4, of_v3) == pytest.approx(
        4 * (1 - 15 / 70)
    )  # two groups a host: 15 of 70 choices leave one out
    assert hosts_of_a_token(8, 16, of_v3) < hosts_of_a_token(8, 16)
    assert hosts_of_a_token(8, 4, (8, 8)) == hosts_of_a_token(8, 4)
    for hosts in (4, 8, 16):
        assert 4096 * hosts_of_a_token(8, hosts, of_v3) / hosts < host_capacity(4096, 8, hosts, routed_groups=of_v3)
        assert host_capacity(4096, 8, hosts, routed_groups=of_v3) < host_capacity(4096, 8, hosts) <= 4096


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
