"""No group of collectives that broke is formed again, whatever was lost, and devices of a tensor-parallel group stay neighbours."""

import random

import pytest

from dsjax.errors import UserError
from dsjax.hosts.gloo.device_orders import DeviceOrders


def of(processes: int, devices: int) -> DeviceOrders:
    # As JAX numbers them: not contiguous from one process to the next.
    return DeviceOrders({1000 * process + device: process for process in range(processes) for device in range(devices)})


def ids(processes, devices: int) -> list[int]:
    return [1000 * process + device for process in processes for device in range(devices)]


def test_a_mesh_that_broke_comes_back_in_an_order_that_was_never_used():
    orders, used = of(2, 2), set()
    for _ in range(20):
        order = tuple(orders.choose(ids((0, 1), 2), (1, 4, 1)))
        assert order not in used
        used.add(order)
        orders.break_current({1})
        # What is left has no group with another process: it may be formed as often as wanted.
        assert orders.choose(ids((0,), 2), (1, 2, 1)) == [0, 1]


def test_groups_of_survivors_that_the_break_did_not_touch_are_whole_but_not_those_of_the_mesh_that_broke():
    orders = of(3, 1)
    assert orders.choose(ids((0, 1), 1), (1, 2, 1)) == [0, 1000]
    whole = orders.choose(ids((0, 1, 2), 1), (1, 3, 1))
    orders.break_current({2})
    assert orders.choose(ids((0, 1), 1), (1, 2, 1)) == [0, 1000]
    orders.break_current({2})  # and then something failed between these two
    assert orders.choose(ids((0, 1), 1), (1, 2, 1)) == [1000, 0]
    assert orders.choose(ids((0, 1, 2), 1), (1, 3, 1)) != whole


def test_a_process_that_ended_in_order_breaks_the_groups_that_it_was_in_and_no_others():
    orders = of(3, 1)
    apart = orders.choose(ids((0, 1), 1), (1, 2, 1))
    whole = orders.choose(ids((0, 1, 2), 1), (1, 3, 1))
    orders.break_with({2})
    assert orders.choose(ids((0, 1), 1), (1, 2, 1)) == apart
    assert orders.choose(ids((0, 1, 2), 1), (1, 3, 1)) != whole, "another process has that id now"


@pytest.mark.parametrize("shape", [(1, 4, 2), (2, 2, 2), (4, 1, 2), (1, 2, 4)])
def test_no_group_of_any_axis_is_formed_twice_once_it_broke(shape):
    orders, rng, broken = of(4, 2), random.Random(3), set()
    for _ in range(3):  # (2, 2, 2) has so many pairs of devices that more may not be left
        lost = rng.randrange(1, 4)
        order = orders.choose(ids(range(4), 2), shape)
        groups = orders._groups(order, shape)
        assert not groups & broken
        orders.break_current({lost})
        broken |= groups
        if shape[-1] == 2:  # the tensor-parallel pairs are each of one process
            assert all(order[at] // 1000 == order[at + 1] // 1000 for at in range(0, 8, 2))


def test_when_every_order_has_broken_that_is_said():
    orders = of(2, 1)
    for _ in range(2):
        orders.choose(ids((0, 1), 1), (1, 2, 1))
        orders.break_current({1})
    with pytest.raises(UserError, match=r"the 2 devices that are left have been in every order .* start all processes"):
        orders.choose(ids((0, 1), 1), (1, 2, 1))
    assert orders.find(ids((0, 1), 1), (1, 2, 1)) is None
    assert orders.find(ids((0,), 1), (1, 1, 1)) == [0]
