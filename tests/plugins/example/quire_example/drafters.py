"""A method of drafting: the last token once more."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.services.worker.spec_decode.proposer import DraftRequest, HostProposer
from quire.services.worker.step.drafts.drafts import Drafts


class SameAgain(HostProposer):
    """Drafter and proposer in one, since there are no weights."""

    block_bytes = 0
    needs_features = needs_prompts = False

    def __init__(self, config: Any, target: Any) -> None:
        """Nothing to load."""

    def start(self, worker: Any) -> SameAgain:
        return self

    def propose(self, wanted: DraftRequest) -> Drafts | None:
        lengths = wanted.history.lengths[wanted.slots]
        last = wanted.history.tokens[wanted.slots, lengths - 1]
        return Drafts(wanted.slots, np.ones_like(wanted.counts), last)
