"""Per-slot state on the device that persists between steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """Per-slot device tensors, int32, that steps read and write; the last row belongs to a scratch slot without a
    sequence, for writes that must reach no slot."""

    block_tables: Tensor  # [max_num_seqs + 1, num_groups * max_blocks_per_seq]
    last_tokens: Tensor  # [max_num_seqs + 1] last sampled token; -1 if no token could be sampled

    num_groups: int = 1  # KV groups whose blocks grow with a sequence
    cross_width: int = 0  # columns at the end of each row for blocks of encoder outputs

    @property
    def scratch_slot(self) -> int:
        return int(self.last_tokens.size(0)) - 1

    @property
    def group_tables(self) -> list[Tensor]:
        """Returns a view [max_num_seqs + 1, max_blocks_per_seq] for each KV group."""
        growing = self.block_tables.narrow(1, 0, self.table_width - self.cross_width)
        return [growing] if self.num_groups == 1 else list(growing.chunk(self.num_groups, dim=1))

    @property
    def cross_tables(self) -> Tensor:
        """Returns a view [max_num_seqs + 1, cross_width]: the blocks of encoder outputs."""
        return self.block_tables.narrow(1, self.table_width - self.cross_width, self.cross_width)

    @property
    def table_width(self) -> int:
        return int(self.block_tables.size(1))
