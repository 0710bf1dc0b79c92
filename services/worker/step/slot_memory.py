"""What the device keeps by slot from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """What the device keeps by slot, int32; the last row is of a scratch slot that no sequence has."""

    block_tables: Tensor  # [max_num_seqs + 1, num_groups * max_blocks_per_seq]
    last_tokens: Tensor  # [max_num_seqs + 1] sampled ones; -1 where nothing could be chosen

    num_groups: int = 1  # of KV

    @property
    def scratch_slot(self) -> int:
        return int(self.last_tokens.size(0)) - 1

    @property
    def group_tables(self) -> list[Tensor]:
        """[max_num_seqs + 1, max_blocks_per_seq] of each group; views."""
        return [self.block_tables] if self.num_groups == 1 else list(self.block_tables.chunk(self.num_groups, dim=1))

    @property
    def table_width(self) -> int:
        return int(self.block_tables.size(1))
