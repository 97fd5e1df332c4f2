"""Attention and experts apart: which numbers of devices the two sides of an instance may have, and how many such instances there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsjax.plan.layout import InstanceLayout, apart_layouts, instance_sizes

if TYPE_CHECKING:
    from dsjax.plan.instance import Instance
    from dsjax.plan.question import Question

WIDEST = 128
"""Devices of an instance at most."""


def layouts_apart(question: Question) -> Iterator[InstanceLayout]:
    """Every layout of an instance with attention and experts apart that fits the model, and that the engine can run."""
    options = question.options
    blocks = options.precision.blocks
    per_host = question.cluster.devices_per_host
    for layout in apart_layouts(question.config, pairs(question), per_host, redundant=options.redundant, **blocks):
        if options.pins.attention_mesh in (None, layout.mesh):
            yield layout


def pairs(question: Question) -> list[tuple[int, int]]:
    """(devices with attention, devices with experts) of an instance.

    They share one host, or have whole hosts on either side.
    """
    cluster, beside, pins = question.cluster, question.cluster.experts, question.options.pins
    most = min(question.devices, WIDEST)
    here, there = cluster.devices_per_host, (beside or cluster).devices_per_host
    if pins.attention_mesh is not None:
        return [(pins.attention_mesh.num_devices, pins.expert_mesh.ep_size)]
    if beside is not None:
        hosts = range(1, most // here + 1), range(1, min(beside.num_devices, WIDEST) // there + 1)
        return [(a * here, e * there) for a in hosts[0] for e in hosts[1]]
    inside = [(a, n - a) for n in instance_sizes(min(here, most), here) for a in range(1, n)]
    hosts = most // here
    return inside + [(a * here, e * here) for a in range(1, hosts) for e in range(1, hosts - a + 1)]


def most_instances(question: Question, layout: InstanceLayout) -> int:
    """How many instances of a layout there is room for.

    One that fits into a host shares it with others and lies on no second one; of a larger one, attention and experts have whole hosts.
    """
    here, beside = question.cluster.devices_per_host, question.cluster.experts
    attention, experts = layout.mesh.num_devices, layout.experts
    if beside is not None and experts:
        return min(
            _room(question.devices, here, attention), _room(beside.num_devices, beside.devices_per_host, experts)
        )
    if layout.devices <= here:
        return _room(question.devices, here, layout.devices)
    return question.devices // (_whole_hosts(attention, here) + _whole_hosts(experts, here))


def devices_kept(question: Question, instance: Instance) -> int:
    """Devices that an instance keeps from all others: an even part of a host, or whole hosts.

    A layout with attention and experts apart that fits into no host has whole hosts for either side.
    """
    layout, here = instance.layout, min(instance.cluster.devices_per_host, question.devices)
    if layout.devices <= here:
        return here // (here // layout.devices)
    return _whole_hosts(layout.mesh.num_devices, here) + _whole_hosts(layout.experts, here)


def _room(devices: int, per_host: int, size: int) -> int:
    """How many times `size` devices fit into so many, the last host perhaps being a part of one."""
    if size > per_host:
        return devices // _whole_hosts(size, per_host)
    hosts, rest = divmod(devices, per_host)
    return hosts * (per_host // size) + rest // size


def _whole_hosts(size: int, per_host: int) -> int:
    """Devices of the fewest whole hosts that have `size` of them."""
    return -(-size // per_host) * per_host
