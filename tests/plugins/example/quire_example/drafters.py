"""Drafting method that repeats the last token."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.services.worker.spec_decode.proposer import DraftRequest, HostProposer
from quire.services.worker.step.drafts.drafts import Drafts


class SameAgain(HostProposer):
    """Drafter and proposer in one class, since there are no weights."""

    block_bytes = 0
    needs_features = needs_prompts = False

    def __init__(self, config: Any, target: Any) -> None:
        """Takes the configuration and the target model; loads nothing."""

    def start(self, worker: Any) -> SameAgain:
        return self

    def propose(self, request: DraftRequest) -> Drafts | None:
        lengths = request.history.lengths[request.slots]
        last = request.history.tokens[request.slots, lengths - 1]
        return Drafts(request.slots, np.ones_like(request.counts), last)
