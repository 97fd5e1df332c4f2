"""What ``auto`` and the default capacity decide."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import MeshSpec
from sharding.dispatch import (
    DispatchConfig,
    choose_method,
    default_capacity,
    even_routing_rows,
    host_capacity,
    hosts_of_a_token,
    resolved_method,
)


def test_capacity_covers_even_routing_and_a_token_of_four_groups_needs_less_room_on_fewer_hosts():
    assert default_capacity(tokens=8, top_k=8, ranks=32) == 8
    assert default_capacity(tokens=1, top_k=8, ranks=32) == 1
    mean = 128 * (1 - (1 - 1 / 32) ** 8)
    capacity = default_capacity(tokens=128, top_k=8, ranks=32)
    assert mean < capacity < 2 * mean
    assert capacity % 8 == 0
    of_v3 = (8, 4)
    assert hosts_of_a_token(8, 8) == pytest.approx(8 * (1 - (7 / 8) ** 8))
    assert hosts_of_a_token(8, 8, of_v3) == 4  # a group a host
    # Two groups a host: 15 of 70 choices leave one out.
    assert hosts_of_a_token(8, 4, of_v3) == pytest.approx(4 * (1 - 15 / 70))
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
    assert choose_method("auto", tokens, 8, ranks, platform) == method


def test_in_one_memory_auto_gathers_few_tokens_alone_and_terms_come_back_as_columns_where_these_are_short():
    found = {tokens: choose_method("auto", tokens, 8, 32, "cpu", in_memory=True) for tokens in (8, 16, 32, 256)}
    assert found == {8: "gather", 16: "gather", 32: "padded", 256: "padded"}
    spec, sizes = MeshSpec.parse("dp=32"), {"top_k": 8, "experts": 256, "platform": "gpu"}
    for capacity, method in ((None, "padded"), (128, "gather"), (127, "padded")):
        config = DispatchConfig("gather", by_choice=True, capacity=capacity)
        assert resolved_method(spec, config, tokens=16, **sizes) == method  # 16 tokens, 8 experts a rank


@pytest.mark.parametrize(
    ("mesh", "options", "found"),
    [
        ("dp=32", {}, ["memory", "memory"]),
        ("dp=32", {"wire": "fp8"}, ["gather", "padded"]),
        ("dp=32,ep=16,etp=2", {}, ["gather", "padded"]),
        ("dp=32", {"in_memory": SimpleNamespace(experts_read_tokens=False)}, ["gather", "padded"]),
    ],
    ids=["read where they lie", "FP8 wire", "split width", "no native experts"],
)
def test_rows_pass_in_memory_where_experts_cannot_read_tokens_where_they_lie(mesh, options, found):
    config = DispatchConfig(**{"by_choice": True, "in_memory": SimpleNamespace(experts_read_tokens=True), **options})
    spec, sizes = MeshSpec.parse(mesh), {"top_k": 8, "experts": 256, "platform": "cpu"}
    assert [resolved_method(spec, config, tokens=tokens, **sizes) for tokens in (4, 64)] == found


@pytest.mark.parametrize(
    ("tokens", "ranks", "on_host", "method"),
    [
        (128, 32, 8, "hierarchical"),
        (2048, 32, 8, "hierarchical"),
        (24, 32, 8, "hierarchical"),
        (128, 16, 8, "hierarchical"),
        (128, 16, 2, "hierarchical"),
        (8, 32, 8, "gather"),  # a ring brings a row to each host once, with half the collectives
        (128, 32, 32, "padded"),  # one host, or chips that ICI joins
        (128, 32, 1, "padded"),  # each rank on a host of its own, or nothing is known of hosts
        (4096, 32, 1, "ragged"),
    ],
)
def test_auto_goes_by_way_of_a_rank_of_each_host_where_several_hosts_have_several(tokens, ranks, on_host, method):
    def chosen(platform, **options):
        return choose_method("auto", tokens, 8, ranks, platform, **options)

    for platform in ("gpu", "tpu"):
        assert chosen(platform, on_host=on_host) == method
        # Halves of a batch go the same way, but for `ragged`, beside which nothing would run.
        assert chosen(platform, on_host=on_host, overlapped=True) == ("padded" if method == "ragged" else method)
    # Emulated devices and hosts that are slow at exchanges keep what was measured.
    assert chosen("cpu", on_host=on_host) == chosen("cpu")


def test_auto_takes_one_stage_where_two_save_nothing_and_a_method_that_was_asked_for_is_taken():
    assert choose_method("auto", 4096, 1, 32, "gpu", on_host=8) == "ragged"
    assert choose_method("auto", 4096, 8, 32, "gpu", on_host=8) == "hierarchical"
    # Of 32 hosts a token's eight experts are on seven or eight; of eight hosts on four, where a token has four groups of eight.
    assert choose_method("auto", 4096, 8, 256, "gpu", on_host=8, routed_groups=(8, 4)) == "ragged"
    assert choose_method("auto", 4096, 8, 64, "gpu", on_host=8) == "ragged"
    assert choose_method("auto", 4096, 8, 64, "gpu", on_host=8, routed_groups=(8, 4)) == "hierarchical"
    for method in ("gather", "padded", "ragged"):
        assert choose_method(method, 128, 8, 32, "gpu", on_host=8) == method
    for on_host, method in ((8, "hierarchical"), (32, "padded"), (1, "padded")):
        assert choose_method("hierarchical", 8, 8, 32, "cpu", on_host=on_host) == method


@given(st.integers(1, 8192), st.integers(1, 8), st.sampled_from([2, 4, 8]), st.integers(2, 32), st.booleans())
def test_in_two_stages_less_goes_between_hosts_and_a_link_four_times_as_fast_carries_the_rest(
    tokens, top_k, on_host, hosts, grouped
):
    ranks, groups = on_host * hosts, (8, 4) if grouped else None
    if choose_method("auto", tokens, top_k, ranks, "gpu", on_host=on_host, routed_groups=groups) != "hierarchical":
        return
    direct = choose_method("auto", tokens, top_k, ranks, "gpu")
    capacity = default_capacity(tokens, top_k, ranks)
    straight = capacity if direct == "padded" else even_routing_rows(tokens, top_k, ranks)
    saved = straight * (ranks - on_host) - host_capacity(tokens, top_k, hosts, routed_groups=groups) * (hosts - 1)
    assert saved > 0
    assert capacity * (ranks - hosts) < 4 * saved
