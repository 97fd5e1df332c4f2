"""The host tier's table: each page has a slot of its own, and is found where it was put."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.engine.tiers.page_tiers import HostTier


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["store", "fetch", "forget", "step"]), st.integers(0, 9))))
def test_each_page_has_a_slot_of_its_own_and_is_found_where_it_was_put(slots, actions):
    tier, memory, where = HostTier(slots), {}, {}
    for action, number in actions:
        name = bytes([number])
        if action == "store":
            stored = tier.store(name)
            assert (stored is None) == (name in where)
            if stored is not None:
                slot, victim = stored
                assert victim == next((other for other, at in where.items() if at == slot), None)
                where = {other: at for other, at in where.items() if at != slot}
                where[name], memory[slot] = slot, name
        elif action == "fetch":
            if tier.can_fetch(name):
                assert memory[tier.fetch(name)] == name
        elif action == "forget":
            tier.forget([name])
            where.pop(name, None)
        else:
            tier.begin_step()
        assert {name for name in (bytes([n]) for n in range(10)) if name in tier} == set(where)
        assert tier.counts().used_pages == len(where) <= slots


def test_what_was_fetched_outlives_what_was_only_stored():
    tier, names = HostTier(4), [bytes([name]) for name in b"abcdefg"]
    for name in names[:4]:
        tier.store(name)
    tier.begin_step(), tier.begin_step()
    tier.fetch(b"a")
    for name in names[4:]:
        tier.store(name)
    assert [name for name in names if name in tier] == [b"a", *names[4:]]


@pytest.mark.parametrize(("sizes", "steps"), [({}, 2), ({"under_way": 4}, 4)])
def test_a_page_leaves_for_as_many_steps_as_can_be_under_way_and_is_not_fetched_meanwhile(sizes, steps):
    tier = HostTier(4, **sizes)
    tier.store(b"a")
    for _ in range(steps):
        assert not tier.can_fetch(b"a")
        tier.begin_step()
    assert tier.can_fetch(b"a")
    assert not tier.can_fetch(b"b")
