"""Placement of whole experts: which rank has which experts of a layer, and at which local index.

Replicas of frequently chosen experts and placement by load follow DeepSeek V3 (arXiv 2412.19437, 3.4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.services.worker.layers.sharding import Shard

PlacementMap = npt.NDArray[np.int64]  # [ranks, places]: expert at each place, or NO_EXPERT
NO_EXPERT = -1
# Consecutive tokens alternate between the copies of an expert: 2, 3 or 4 copies divide this number evenly.
TURNS = 12


class ExpertPlacement:
    """Tables of one layer in device memory that map experts to ranks and places.

    CUDA graphs read them, so they may change between replays. Reloading weights resets them to those of a fresh model.
    """

    def __init__(self, num_experts: int, shard: Shard, device: torch.device) -> None:
        import torch  # lazy: families are also read without torch

        self._rank, self._has_copies = shard.rank, shard.spare_experts > 0
        own = num_experts // shard.size
        placement = np.full((shard.size, own + shard.spare_experts), NO_EXPERT)
        placement[:, :own] = np.arange(num_experts).reshape(shard.size, own)
        self._held: Tensor = torch.empty(placement.shape, dtype=torch.int64, device=device)
        self._places: Tensor = torch.empty(TURNS, num_experts, dtype=torch.int32, device=device)
        self._ranks: Tensor = torch.empty_like(self._places)
        self.assign(placement)

    @property
    def placement(self) -> PlacementMap:
        """Current placement int64 [ranks, places], copied to the host; waits for the device."""
        held: PlacementMap = self._held.cpu().numpy()
        return held

    def assign(self, placement: PlacementMap) -> None:
        """Replaces the placement int64 [ranks, places] from the next step on; all ranks have to pass the same one.

        Changes tables only: the experts' weights must be moved before. Consecutive tokens alternate between copies of
        an expert.
        """
        import torch

        places = np.full(self._places.shape, NO_EXPERT, dtype=np.int32)
        ranks = np.empty_like(places)
        for expert in range(places.shape[1]):
            copies = np.argwhere(placement == expert)
            turns = copies[np.arange(TURNS) % len(copies)]
            ranks[:, expert] = turns[:, 0]
            places[:, expert] = np.where(turns[:, 0] == self._rank, turns[:, 1], NO_EXPERT)
        self._held.copy_(torch.from_numpy(placement))
        self._places.copy_(torch.from_numpy(places))
        self._ranks.copy_(torch.from_numpy(ranks))

    def places_of(self, ids: Tensor) -> Tensor:
        """Maps expert ids int32 [num_tokens, top_k] to places on this rank; NO_EXPERT for those that other ranks
        compute."""
        return self._by_turn(self._places, ids)

    def ranks_of(self, ids: Tensor) -> Tensor:
        """Maps expert ids int32 [num_tokens, top_k] to the ranks that compute them."""
        return self._by_turn(self._ranks, ids)

    def _by_turn(self, table: Tensor, ids: Tensor) -> Tensor:
        """Looks up each id in the table [TURNS, num_experts], in the row of its token's turn; in row 0 without
        copies."""
        import torch

        if not self._has_copies:
            return table[0][ids]
        turns = torch.arange(len(ids), device=ids.device) % TURNS
        return table[turns.unsqueeze(1), ids]
