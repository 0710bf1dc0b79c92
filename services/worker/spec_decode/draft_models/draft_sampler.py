"""Samples drafts from a drafter's logits.

Coupled sampling uses the noise that the model will use at the same position, so that both pick the same token where
their distributions agree. The rejection rule needs independent noise, and a record of each draft's distribution.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.choice import BoundChoice
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.rejection import DRAFT
from quire.services.worker.sampling.sampler import Sampler
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.step.drafts.drafts import Drafts
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32


class DraftSampler:
    """Samples the drafts of one step, one token of every slot per draw(), and collects them. Under the rejection rule
    it keeps the logits of each draft's distribution as well."""

    def __init__(self, sampler: Sampler, config: SpeculativeConfig, slots: Rows, lengths: I32, counts: I32) -> None:
        """`slots`: slots whose sequences have `lengths` tokens and get `counts` drafts each, at least 1."""
        self._greedy = config.draft_sample_method == "greedy"
        self._uses_rejection_rule = config.rejection_sample_method == "standard" and not self._greedy
        self._slots, self._lengths, self._counts = slots, lengths, counts
        self._choice: BoundChoice = sampler.bind_choice(slots)
        self._tokens: list[Tensor] = []  # one tensor per draw() call, [num_slots]
        self._proposed: list[Tensor] = []

    def draw(self, logits: Tensor) -> Tensor:
        """Samples the next draft of each slot from `logits` [num_slots, vocab_size]: int32 [num_slots] on the device,
        and stores it; call k, from 0, draws for position lengths + k."""
        self._tokens.append(self._choose(logits).clamp_(min=0))
        return self._tokens[-1]

    def drafts(self) -> Drafts:
        """Returns the sampled drafts, the first `counts` of each slot; waits for the device. `proposed` has the
        distributions of sampled drafts under the rejection rule, else it is None."""
        in_draft = np.arange(len(self._tokens)) < self._counts[:, None]
        token_ids = torch.stack(self._tokens, dim=1).cpu().numpy()[in_draft]
        proposed = None
        if self._proposed:
            proposed = torch.stack(self._proposed, dim=1)[upload(in_draft, self._proposed[0].device)]
        return Drafts(self._slots, self._counts, token_ids, proposed)

    def _choose(self, logits: Tensor) -> Tensor:
        """Chooses the slots' next tokens: the likeliest, or a sample with the model's noise of that position, or under
        the rejection rule a sample with independent noise, whose logits are kept."""
        choice = self._choice
        if self._greedy or choice.temperature is None:
            return logits.argmax(dim=1).int()
        logits = logits.float()
        places = self._lengths + len(self._tokens)
        positions = Positions(places, upload(places, logits.device))
        if not self._uses_rejection_rule:
            return choice.choose(logits, positions)
        self._proposed.append(choice.filtered(logits, slice(None)))
        return choice.choose(logits, positions, stream=DRAFT)
