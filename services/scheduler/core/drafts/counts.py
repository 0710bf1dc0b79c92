"""Counters of drafted and accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.drafts.rows import DraftedRows


@dataclass(slots=True)
class DraftCounts:
    """Counters of verified drafts and accepted tokens, named like the metrics vllm:spec_decode_*."""

    drafts: int = 0  # sequences with at least one draft token, summed over all steps
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, rows: DraftedRows) -> None:
        """Adds the verified drafts and accepted tokens of one step, in total and by position; grows
        accepted_by_position if a row has more drafts than before."""
        drafted = rows.verified
        accepted = np.where(drafted > 0, rows.counts.astype(np.int64) - 1, 0)
        self.drafts += int(np.count_nonzero(drafted))
        self.draft_tokens += int(drafted.sum())
        self.accepted_tokens += int(accepted.sum())
        most = int(drafted.max(initial=0))
        lacking = most - len(self.accepted_by_position)
        if lacking > 0:
            self.accepted_by_position = np.pad(self.accepted_by_position, (0, lacking))
        exactly = np.bincount(accepted, minlength=most + 1)
        self.accepted_by_position[:most] += exactly[::-1].cumsum()[::-1][1:]
