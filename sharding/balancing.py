"""EPLB: from the load of every layer, choose which experts get copies and the rank of each copy; all layers at once, in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from sharding.errors import MeshError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Policy = Literal["auto", "global", "hierarchical"]


class Balancedness(NamedTuple):
    """How evenly the ranks are loaded. The first two lie between 1 ÷ ranks and 1 (even), the third between 1 (even) and ranks."""

    # Σ over layers of the mean rank's load ÷ Σ over layers of the busiest rank's, as vLLM logs it; what dsjax reports as balancedness. The
    # busiest rank is that of each layer, because a step waits for it in each layer
    of_sums: float
    of_layers: float  # the mean over layers of (mean ÷ busiest), as SGLang logs it
    # the mean over layers of (busiest ÷ mean): how many times longer than with an even load a layer's experts take
    busiest: float


def rebalance(
    load_LE: Float[np.ndarray, "L E"],
    *,
    n_physical: int,
    ranks: int,
    groups: int = 1,
    hosts: int = 1,
    policy: Policy = "auto",
) -> Int[np.ndarray, "L P"]:
    """Return the logical expert in each physical slot of each layer, ``[L, P]`` int32, by DeepSeek's published policies.

    Slots are ordered by rank, the same number on each, and ranks by host.

    ``global``: each extra slot goes to the expert with the most load per copy; then the copies, heaviest first, each go to the
    least loaded rank with a free slot. ``hierarchical``: whole groups of experts are first packed onto hosts in the same way;
    then copies are made within each host and packed onto its ranks, so a token routed to few groups is sent to few
    hosts. ``auto``: hierarchical if the groups divide over the hosts, as published (github.com/deepseek-ai/EPLB).

    Three rules are additions to the published policies: a layer without load counts as evenly loaded; an expert gets no more copies than
    there are ranks; and a second copy on a rank is exchanged for another rank's, unless the heavier of the two ranks gets heavier.
    The heaviest and lightest of the ranks that are packed together (all, or a host's) differ by at most the heaviest copy's load.

    Args:
        load_LE: tokens that each layer sent to each logical expert, or any other load.
        n_physical: slots over all ranks, logical experts and extra copies together.
        groups: groups of the router (``n_group``), each of consecutive experts.
        hosts: hosts of the ranks, the same number of ranks on each.

    Raises:
        MeshError: fewer slots than experts, numbers that do not divide, an unknown policy, or an invalid load.
    """
    load_LE = check_load(load_LE)
    layers, experts = load_LE.shape
    if n_physical < experts or n_physical % ranks:
        raise MeshError(
            f"{n_physical} physical experts for {experts} logical ones on {ranks} ranks; expected at least "
            f"{experts} and a multiple of {ranks}: {experts + -experts % ranks} is the least"
        )
    if hosts < 1 or ranks % hosts or groups < 1 or experts % groups:
        raise MeshError(
            f"{ranks} ranks on {hosts} hosts, {experts} experts in {groups} groups; expected as many ranks on each host and as "
            "many experts in each group"
        )
    if policy not in ("auto", "global", "hierarchical"):
        raise MeshError(f"balancing policy {policy!r}; expected auto, global or hierarchical")
    if policy == "hierarchical" and groups % hosts:
        raise MeshError(
            f"balancing policy hierarchical with {groups} groups of experts on {hosts} hosts; expected the same number of "
            "groups on each host; auto or global work with any"
        )
    if not by_host(policy, groups, hosts):
        groups = hosts = 1

    # Pack groups onto hosts. Unused experts get tiny weights, so that they are spread out too; in a layer without load, all are equal.
    total_L1, size = load_LE.sum(axis=1, keepdims=True), experts // groups
    load_LE = np.where(total_L1 > 0, np.maximum(load_LE, total_L1 * 1e-12), 1.0)
    host_LG, place_LG = pack(load_LE.reshape(layers, groups, size).sum(axis=2), np.arange(groups), hosts)
    group_LG = np.argsort(host_LG * groups + place_LG, axis=1)
    expert_LE = (group_LG[:, :, None] * size + np.arange(size)).reshape(layers, experts)
    # Copy each host's experts, and pack the copies onto its ranks.
    expert_XM = expert_LE.reshape(layers * hosts, experts // hosts)
    load_XM = np.take_along_axis(load_LE, expert_LE, axis=1).reshape(expert_XM.shape)
    item_XP, share_XP = _replicate(load_XM, n_physical // hosts, most=ranks // hosts)
    rank_XP, place_XP = pack(share_XP, item_XP, ranks // hosts)
    slot_XP = np.argsort(rank_XP * item_XP.shape[1] + place_XP, axis=1)
    item_XP, share_XP = (np.take_along_axis(array, slot_XP, axis=1) for array in (item_XP, share_XP))
    _separate_copies(item_XP, share_XP, ranks // hosts)
    return np.take_along_axis(expert_XM, item_XP, axis=1).reshape(layers, n_physical).astype(np.int32)


def by_host(policy: Policy, groups: int, hosts: int) -> bool:
    """Whether ``rebalance`` keeps groups of experts on hosts. If not, ``keep_in_place`` may swap the numbers of any two ranks."""
    return policy != "global" and groups % hosts == 0


def rank_loads(
    load_LE: Float[np.ndarray, "L E"], physical_to_logical_LP: Int[np.ndarray, "L P"], ranks: int
) -> Float[np.ndarray, "L R"]:
    """Return the load of each rank in each layer. Copies of an expert share its load evenly. One placement may serve all layers."""
    load_LE = check_load(load_LE)
    placement_LP = np.broadcast_to(physical_to_logical_LP, (len(load_LE), np.shape(physical_to_logical_LP)[-1]))
    if placement_LP.shape[1] % ranks:
        raise MeshError(f"{placement_LP.shape[1]} physical experts on {ranks} ranks; expected as many on each")
    copies_LE = _counts(placement_LP, load_LE.shape[1])
    share_LE = load_LE / np.maximum(copies_LE, 1)
    return np.take_along_axis(share_LE, placement_LP, axis=1).reshape(len(load_LE), ranks, -1).sum(axis=2)


def balancedness(
    load_LE: Float[np.ndarray, "L E"], physical_to_logical_LP: Int[np.ndarray, "L P"], ranks: int
) -> Balancedness:
    """Return how evenly a placement (per layer, or one for all) spreads a load over ranks. Layers without load are left out."""
    return balancedness_of_ranks(rank_loads(load_LE, physical_to_logical_LP, ranks))


def balancedness_of_ranks(loads_LR: Float[np.ndarray, "L R"]) -> Balancedness:
    """Return how evenly ranks are loaded, from each rank's load in each layer."""
    mean_L, most_L = loads_LR.mean(axis=1), loads_LR.max(axis=1)
    mean_L, most_L = mean_L[most_L > 0], most_L[most_L > 0]
    if not len(most_L):
        return Balancedness(1.0, 1.0, 1.0)
    return Balancedness(
        float(mean_L.sum() / most_L.sum()), float((mean_L / most_L).mean()), float((most_L / mean_L).mean())
    )


def keep_in_place(
    old_LP: Int[np.ndarray, "L P"], new_LP: Int[np.ndarray, "L P"], ranks: int, hosts: int = 1
) -> Int[np.ndarray, "L P"]:
    """Renumber the hosts, the ranks of each host and the slots of each rank of ``new_LP`` so that the fewest experts move.

    The numbering of ranks does not affect the load, but it determines how many bytes must be sent. The experts of each rank, and
    the ranks that share a host, stay as in ``new_LP``. ``experts_moved`` counts the experts that still have to move.

    hosts: 1 if the placement is not by host (``by_host``): ranks are then renumbered freely, and fewer experts move.
    """
    layers, slots = new_LP.shape
    if old_LP.shape != new_LP.shape or slots % ranks or ranks % hosts:
        raise MeshError(
            f"placements of shapes {old_LP.shape} and {new_LP.shape} on {ranks} ranks of {hosts} hosts; expected the same "
            "layers and slots, as many slots on each rank and as many ranks on each host"
        )
    old_LRS, new_LRS = (array.reshape(layers, ranks, -1) for array in (old_LP, new_LP))
    experts = int(max(old_LP.max(), new_LP.max())) + 1
    moved_LRS = np.empty_like(new_LRS)
    for layer in range(layers):
        stays_RR = _count_shared(_counts(new_LRS[layer], experts), _counts(old_LRS[layer], experts))
        becomes_R = _renumber(stays_RR, hosts)
        moved_LRS[layer, becomes_R] = new_LRS[layer]
    return _keep_slots(old_LRS, moved_LRS).reshape(layers, slots)


def experts_moved(old_LP: Int[np.ndarray, "L P"], new_LP: Int[np.ndarray, "L P"]) -> Int[np.ndarray, "L"]:
    """Return how many slots of each layer get another expert's weights."""
    return (np.asarray(old_LP) != np.asarray(new_LP)).sum(axis=1)


def check_load(load_LE: Float[np.ndarray, "L E"]) -> Float[np.ndarray, "L E"]:
    """Return the load as float64.

    Raises:
        MeshError: not two dimensions, no experts, or a number that is negative or not finite.
    """
    load_LE = np.asarray(load_LE, np.float64)
    if load_LE.ndim != 2 or not load_LE.shape[1] or not np.all(np.isfinite(load_LE)) or np.any(load_LE < 0):
        raise MeshError(
            f"load of shape {load_LE.shape}; expected finite counts of tokens [layers, logical experts], none negative"
        )
    return load_LE


def _replicate(load_XM: np.ndarray, slots: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return item and load of each copy ``[X, slots]``: one of each item, then one more of whichever has the most load per copy.

    An item with ``most`` copies gets another only if all items have that many.
    """
    count, items = load_XM.shape
    rows, copies_XM = np.arange(count), np.ones(load_XM.shape)
    item_XP = np.tile(np.arange(slots), (count, 1))
    for slot in range(items, slots):
        chosen_X = np.argmax(load_XM / copies_XM * np.where(copies_XM < most, 1.0, 1e-30), axis=1)
        item_XP[:, slot] = chosen_X
        copies_XM[rows, chosen_X] += 1
    return item_XP, np.take_along_axis(load_XM / copies_XM, item_XP, axis=1)


def pack(load_XN: np.ndarray, item_XN: np.ndarray, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each thing's pack and its place in the pack. Things go heaviest first to the least loaded pack with room.

    item_XN: the item that each thing is a copy of. Among equally loaded packs, the first without a copy of the same item is taken.
    """
    count, things = load_XN.shape
    item_XN = np.broadcast_to(item_XN, load_XN.shape)
    rows = np.arange(count)
    pack_XN, place_XN = np.zeros((2, count, things), np.int64)
    if packs == things:  # as published: one in each, in order
        pack_XN[:] = np.arange(things)
        return pack_XN, place_XN
    order_XN = np.argsort(-load_XN, axis=1, kind="stable")
    load_NX, item_NX = (np.take_along_axis(array, order_XN, axis=1).T.copy() for array in (load_XN, item_XN))
    pack_NX, place_NX = np.zeros((2, things, count), np.int64)
    loads, held = np.zeros((count, packs)), np.zeros((count, packs), np.int64)
    has = np.zeros((count, int(item_XN.max()) + 1, packs), bool)
    full, first = things // packs, 0
    if load_NX.min() > 0:  # while there are empty packs, each thing goes to the first of them
        first = packs
        pack_NX[:first] = np.arange(packs)[:, None]
        loads[:], held[:] = load_NX[:first].T, 1
        has[rows[:, None], item_NX[:first].T, np.arange(packs)] = True
    loads[held >= full] = np.inf
    # Flat views: indexing with one number per row costs a third of indexing with two.
    load_XR, held_XR, has_XER, start_X = loads.ravel(), held.ravel(), has.ravel(), rows * packs
    for thing in range(first, things):
        pack_X = loads.argmin(axis=1)
        at_X, item_X = start_X + pack_X, item_NX[thing]
        least_XR = loads == load_XR.take(at_X)[:, None]
        if np.count_nonzero(least_XR) > count:
            # Take the first maximum: the least loaded packs score above 0, and those without a copy of the item above those with one.
            pack_X = np.argmax(least_XR * (2 - has[rows, item_X]), axis=1)
            at_X = start_X + pack_X
        place_X = held_XR.take(at_X)
        pack_NX[thing], place_NX[thing] = pack_X, place_X
        held_XR[at_X] = place_X + 1
        load_XR[at_X] = np.where(place_X + 1 < full, load_XR.take(at_X) + load_NX[thing], np.inf)
        has_XER[(rows * has.shape[1] + item_X) * packs + pack_X] = True
    np.put_along_axis(pack_XN, order_XN, pack_NX.T, axis=1)
    np.put_along_axis(place_XN, order_XN, place_NX.T, axis=1)
    return pack_XN, place_XN


def _separate_copies(item_XP: np.ndarray, share_XP: np.ndarray, ranks: int) -> None:
    """Swap second copies of an item on a rank with another rank's items, in place, if neither rank exceeds the heavier one before."""
    sorted_XRS = np.sort(item_XP.reshape(len(item_XP), ranks, -1), axis=-1)
    for row, rank in np.argwhere((sorted_XRS[..., 1:] == sorted_XRS[..., :-1]).any(axis=-1)):
        items_RS, shares_RS = (array[row].reshape(ranks, -1) for array in (item_XP, share_XP))
        items = items_RS[rank].tolist()
        for slot in [s for s, item in enumerate(items) if item in items[:s]]:
            item, share = items_RS[rank, slot], shares_RS[rank, slot]
            loads_R = shares_RS.sum(axis=1)
            change_RS = shares_RS - share  # what this rank gains and the other one loses
            heavier_RS = np.maximum(loads_R[rank] + change_RS, loads_R[:, None] - change_RS)
            allowed_RS = heavier_RS <= np.maximum(loads_R[rank], loads_R)[:, None]
            allowed_RS &= ~(items_RS == item).any(axis=1)[:, None] & ~np.isin(items_RS, items_RS[rank])
            if allowed_RS.any():
                other = np.unravel_index(np.argmin(np.where(allowed_RS, heavier_RS, np.inf)), items_RS.shape)
                items_RS[rank, slot], items_RS[other] = items_RS[other], item
                shares_RS[rank, slot], shares_RS[other] = shares_RS[other], share


def _counts(held_RS: np.ndarray, experts: int) -> np.ndarray:
    """Return how often each row holds each expert: ``[rows, experts]``."""
    rows = np.arange(len(held_RS))[:, None]
    return np.bincount((held_RS + rows * experts).ravel(), minlength=len(held_RS) * experts).reshape(-1, experts)


def _count_shared(new_RE: np.ndarray, old_RE: np.ndarray) -> np.ndarray:
    """Return how many experts (counting copies) each new rank has in common with each old one: ``[new, old]``."""
    most = int(min(new_RE.max(), old_RE.max()))
    return sum((new_RE >= n).astype(np.float32) @ (old_RE >= n).astype(np.float32).T for n in range(1, most + 1))


def _renumber(stays_RR: np.ndarray, hosts: int) -> np.ndarray:
    """Return the old rank whose number each new rank takes, so that the most experts stay; ranks of one host stay together."""
    from scipy.optimize import linear_sum_assignment  # half a second of imports, not needed for placing alone

    ranks_per_host = len(stays_RR) // hosts
    blocks_HRHR = stays_RR.reshape(hosts, ranks_per_host, hosts, ranks_per_host)
    stays_HH, within = np.zeros((hosts, hosts)), {}
    for new in range(hosts):
        for old in range(hosts):
            rows, columns = linear_sum_assignment(blocks_HRHR[new, :, old], maximize=True)
            stays_HH[new, old], within[new, old] = blocks_HRHR[new, rows, old, columns].sum(), columns
    _, host_H = linear_sum_assignment(stays_HH, maximize=True)
    return np.concatenate([old * ranks_per_host + within[new, old] for new, old in enumerate(host_H)])


def _keep_slots(old_LRS: np.ndarray, new_LRS: np.ndarray) -> np.ndarray:
    """Return the experts of each new rank: those that the old rank had keep their slots, the others fill the free slots in order."""
    kept_LRS, used_LRS = np.full_like(new_LRS, -1), np.zeros(new_LRS.shape, bool)
    for slot in range(new_LRS.shape[-1]):
        expert_LR1 = old_LRS[..., slot, None]
        found_LRS = (new_LRS == expert_LR1) & ~used_LRS
        first_LR1 = found_LRS.argmax(axis=-1)[..., None]
        hit_LR1 = np.take_along_axis(found_LRS, first_LR1, axis=-1)
        np.put_along_axis(used_LRS, first_LR1, np.take_along_axis(used_LRS, first_LR1, axis=-1) | hit_LR1, axis=-1)
        kept_LRS[..., slot] = np.where(hit_LR1, expert_LR1, -1)[..., 0]
    # A stable sort brings the free slots, and the experts without a slot, to the front of each rank. There are equally many of both.
    slots_LRS = np.argsort(kept_LRS >= 0, axis=-1, kind="stable")
    experts_LRS = np.take_along_axis(new_LRS, np.argsort(used_LRS, axis=-1, kind="stable"), axis=-1)
    ordered_LRS = np.take_along_axis(kept_LRS, slots_LRS, axis=-1)
    np.put_along_axis(kept_LRS, slots_LRS, np.where(ordered_LRS < 0, experts_LRS, ordered_LRS), axis=-1)
    return kept_LRS
