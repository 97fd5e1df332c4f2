"""``LayerPlacements``: the logical expert in each physical slot of each layer; ``exchange_rounds``: transfers from one to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from sharding.errors import MeshError
from sharding.placement import CopyTables, Placement, copy_tables


@dataclass(frozen=True, eq=False)
class LayerPlacements:
    """The placement of logical experts on physical slots in each layer. Every rank has the same number of consecutive slots."""

    # the logical expert in each physical slot. Every logical expert has at least one slot in every layer, and so at most ``width`` copies;
    # tables on the devices are ``width`` columns wide for every placement
    physical_to_logical: Int[np.ndarray, "L P"]
    n_logical: int

    def __post_init__(self):
        rows = np.array(self.physical_to_logical, np.int32)
        object.__setattr__(self, "physical_to_logical", rows)
        rows.flags.writeable = False
        if rows.ndim != 2:
            raise MeshError(f"placements have the shape {rows.shape}, expected [layers, physical experts]")
        for layer, row in enumerate(rows.tolist()):
            try:
                Placement(tuple(row), self.n_logical)
            except MeshError as error:
                raise MeshError(f"MoE layer {layer}: {error}") from None

    @classmethod
    def alike(cls, placement: Placement, layers: int) -> LayerPlacements:
        """Return placements in which all ``layers`` layers use ``placement``."""
        return cls(np.tile(np.array(placement.physical_to_logical, np.int32), (layers, 1)), placement.n_logical)

    @property
    def n_layers(self) -> int:
        """Layers with experts."""
        return self.physical_to_logical.shape[0]

    @property
    def n_physical(self) -> int:
        """Physical slots of a layer, over all ranks."""
        return self.physical_to_logical.shape[1]

    @property
    def width(self) -> int:
        """Largest number of copies of an expert: one, plus all redundant slots."""
        return self.n_physical - self.n_logical + 1

    @property
    def tables(self) -> CopyTables:
        """``physical_EC`` and ``copies_E`` of all layers, with a leading axis of layers; ``width`` copies wide."""
        return copy_tables(self.physical_to_logical, self.n_logical)

    def with_fused_shared(self, ranks: int) -> LayerPlacements:
        """Add one more expert, numbered ``n_logical``, with a slot on each of ``ranks`` ranks."""
        rows = self.physical_to_logical.reshape(self.n_layers, ranks, -1)
        more = np.full((self.n_layers, ranks, 1), self.n_logical, np.int32)
        return LayerPlacements(np.concatenate([rows, more], axis=2).reshape(self.n_layers, -1), self.n_logical + 1)

    def with_layer(self, layer: int, row: Sequence[int]) -> LayerPlacements:
        """Return the placements with another row for one layer."""
        rows = self.physical_to_logical.copy()
        rows[layer] = row
        return LayerPlacements(rows, self.n_logical)

    def logical_load(self, physical_load: np.ndarray) -> np.ndarray:
        """Sum counts over copies: ``[L, P]`` to ``[L, E]``. ``physical_load`` may have only the first layers."""
        rows = self.physical_to_logical[: len(physical_load)]
        total = np.zeros((len(rows), self.n_logical), np.asarray(physical_load).dtype)
        np.add.at(total, (np.arange(len(rows))[:, None], rows), physical_load)
        return total


def exchange_rounds(
    old: Sequence[int], new: Sequence[int], *, ranks: int, experts: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield the transfers that turn ``old`` into ``new``, in rounds of pairs (source slot, destination slot).

    In a round a rank sends and receives at most ``experts`` experts each, and at most one to the same rank. A slot reads from a copy
    on its own rank if there is one, else from the copy whose rank has the least to send.

    old, new: ``[P]`` physical to logical of one layer.
    """
    old, new = np.asarray(old), np.asarray(new)
    per_rank = len(old) // ranks
    holders = {expert: np.flatnonzero(old == expert).tolist() for expert in np.unique(old).tolist()}
    sending = np.zeros(ranks, int)
    moves = []
    for slot in np.flatnonzero(old != new).tolist():
        rank = slot // per_rank
        source = min(
            holders[int(new[slot])], key=lambda copy: (copy // per_rank != rank, sending[copy // per_rank], copy)
        )
        sending[source // per_rank] += 1
        moves.append((source, slot))
    while moves:
        sent, received, pairs = [set() for _ in range(ranks)], np.zeros(ranks, int), set()
        this_round, later = [], []
        for source, slot in moves:
            sender, receiver = source // per_rank, slot // per_rank
            is_full = received[receiver] >= experts or len(sent[sender] | {source}) > experts
            if is_full or (sender, receiver) in pairs:
                later.append((source, slot))
                continue
            sent[sender].add(source)
            received[receiver] += 1
            pairs.add((sender, receiver))
            this_round.append((source, slot))
        yield this_round
        moves = later
