"""Experts that the same tokens choose together, placed on one host: a policy beside DeepSeek's, and what it saves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from sharding.balancing import checked_numbers, pack, within_hosts
from sharding.errors import MeshError


def chosen_together(experts_LTK: Int[np.ndarray, "L T K"], experts: int) -> Float[np.ndarray, "L E E"]:
    """Recorded pairs: how many tokens of each layer chose both experts. The diagonal is each expert's load."""
    layers, tokens, _ = np.shape(experts_LTK)
    chosen_LTE = np.zeros((layers, tokens, experts), np.float32)
    np.put_along_axis(chosen_LTE, np.asarray(experts_LTK), 1, axis=2)
    return np.einsum("lte,ltf->lef", chosen_LTE, chosen_LTE, optimize=True).astype(np.float64)


def place_together(
    pairs_LEE: Float[np.ndarray, "L E E"],
    *,
    n_physical: int,
    ranks: int,
    hosts: int,
    groups: int = 1,
    slack: float = 0.1,
) -> Int[np.ndarray, "L P"]:
    """The logical expert in each physical slot ``[L, P]``, so that the experts that a token chooses lie on few hosts.

    It begins as the hierarchical policy does, with whole groups packed onto hosts by load (where the groups do not divide over the hosts,
    with single experts). Then groups, and after them single experts, of two hosts change places, each time the two that bring the most
    recorded pairs onto one host, until none bring any (Kernighan and Lin, 1970). Copies are made within a host and packed onto its ranks
    by load, as published. Recorded pairs are never more often apart than where it began.

    Args:
        pairs_LEE: as of ``chosen_together``: symmetric, with the loads on the diagonal.
        groups: groups of the router (``n_group``), each of consecutive experts.
        slack: by how much of its share a host may get more load than its share; more only where it began with more.

    Raises:
        MeshError: numbers that do not fit, as of ``rebalance``, or experts that do not divide over the hosts.
    """
    pairs_LEE = np.array(pairs_LEE, np.float32)
    layers, experts, _ = pairs_LEE.shape
    load_LE = np.einsum("lee->le", pairs_LEE).astype(np.float64)
    checked_numbers(load_LE, n_physical=n_physical, ranks=ranks, groups=groups, hosts=hosts)
    if experts % hosts:
        raise MeshError(f"{experts} experts on {hosts} hosts; expected as many on each")
    np.einsum("lee->le", pairs_LEE)[:] = 0
    whole = groups if groups % hosts == 0 else experts
    size = experts // whole
    by_group = pairs_LEE.reshape(layers, whole, size, whole, size).sum(axis=(2, 4))
    np.einsum("lgg->lg", by_group)[:] = 0
    load_LG = load_LE.reshape(layers, whole, size).sum(axis=2)
    host_LG, _ = pack(load_LG, np.arange(whole), hosts)
    host_LE = np.repeat(_exchanged(host_LG, by_group, load_LG, hosts, slack), size, axis=1)
    host_LE = _exchanged(host_LE, pairs_LEE, load_LE, hosts, slack)
    expert_LE = np.argsort(host_LE, axis=1, kind="stable")
    return within_hosts(load_LE, expert_LE, n_physical=n_physical, ranks=ranks, hosts=hosts)


def _exchanged(host_LN: np.ndarray, pairs_LNN: np.ndarray, load_LN: np.ndarray, hosts: int, slack: float) -> np.ndarray:
    """The hosts after all exchanges of two things that bring pairs together, the best first; one a layer at a time."""
    layers, things = host_LN.shape
    host_LN, rows = host_LN.copy(), np.arange(layers)
    cap_L = load_LN.sum(axis=1) / hosts * (1 + slack)
    # A thing changes places a few times at most; the bound is against rounding that would go in circles.
    for _ in range(4 * things):
        held_LNH = (host_LN[:, :, None] == np.arange(hosts)).astype(np.float32)
        near_LNH = pairs_LNN @ held_LNH  # pairs that each thing would have on each host
        own_LN = np.take_along_axis(near_LNH, host_LN[:, :, None], axis=2)[:, :, 0]
        gains_LNN = (
            np.take_along_axis(near_LNH, np.repeat(host_LN[:, None, :], things, axis=1), axis=2) - own_LN[:, :, None]
        )
        gains_LNN = gains_LNN + gains_LNN.swapaxes(1, 2) - 2 * pairs_LNN
        loads_LH = np.einsum("ln,lnh->lh", load_LN, held_LNH)
        loads_LN = np.take_along_axis(loads_LH, host_LN, axis=1)
        after_LNN = loads_LN[:, :, None] - load_LN[:, :, None] + load_LN[:, None, :]
        most_LN = np.maximum(loads_LN, cap_L[:, None])[:, :, None]
        allowed_LNN = (after_LNN <= most_LN) & (after_LNN <= most_LN).swapaxes(1, 2)
        allowed_LNN &= host_LN[:, :, None] != host_LN[:, None, :]
        gains_LNN = np.where(allowed_LNN, gains_LNN, 0).reshape(layers, -1)
        best_L = gains_LNN.argmax(axis=1)
        improves_L = gains_LNN[rows, best_L] > 1e-6 * pairs_LNN.sum(axis=(1, 2))
        if not improves_L.any():
            break
        one_L, other_L = np.divmod(best_L, things)
        changed = rows[improves_L], one_L[improves_L], other_L[improves_L]
        first, second = host_LN[changed[0], changed[1]], host_LN[changed[0], changed[2]]
        host_LN[changed[0], changed[1]], host_LN[changed[0], changed[2]] = second, first
    return host_LN


def together_on_a_host(
    pairs_LEE: Float[np.ndarray, "L E E"], placement_LP: Int[np.ndarray, "L P"], hosts: int
) -> Float[np.ndarray, "L"]:
    """How many recorded pairs of two experts have both on one host, where a token goes to each copy in turn."""
    experts = pairs_LEE.shape[1]
    layers, slots = placement_LP.shape
    host_P = np.arange(slots) // (slots // hosts)
    copies_LE = np.stack([np.bincount(row, minlength=experts) for row in placement_LP])
    portion_LEH = np.zeros((layers, experts, hosts))
    np.add.at(portion_LEH, (np.arange(layers)[:, None], placement_LP, host_P), 1.0)
    portion_LEH /= np.maximum(copies_LE, 1)[:, :, None]
    both_LEE = portion_LEH @ portion_LEH.swapaxes(1, 2)
    return (pairs_LEE * both_LEE * ~np.eye(experts, dtype=bool)).sum(axis=(1, 2)) / 2


class Crossings(NamedTuple):
    """What a token sends to other hosts, on average over tokens and layers.

    rows: one to each rank of another host that has one of its experts, as dsjax's dispatch sends. hosts: one to each other host, as
    DeepEP's normal kernels send. pairs: one for each of its experts there, as DeepEP's low-latency kernels send.
    """

    rows: float
    hosts: float
    pairs: float


def crossings(
    slots_LTK: Int[np.ndarray, "L T K"], home_T: Int[np.ndarray, "T"], per_rank: int, ranks: int, hosts: int
) -> Crossings:
    """Count what goes to other hosts. slots: physical experts of each token; home: the rank that a token is on."""
    rank_LTK = np.asarray(slots_LTK) // per_rank
    away_LTK = rank_LTK // (ranks // hosts) != (np.asarray(home_T) // (ranks // hosts))[:, None]
    used_LTR = np.zeros((*rank_LTK.shape[:2], ranks), bool)
    np.put_along_axis(used_LTR, rank_LTK, True, axis=2)
    foreign_TR = np.arange(ranks) // (ranks // hosts) != (np.asarray(home_T) // (ranks // hosts))[:, None]
    rows_LTR = used_LTR & foreign_TR
    hosts_LTH = rows_LTR.reshape(*rows_LTR.shape[:2], hosts, -1).any(axis=3)
    return Crossings(float(rows_LTR.sum(2).mean()), float(hosts_LTH.sum(2).mean()), float(away_LTK.sum(2).mean()))
