"""A replica on the CPU without a model: its steps cost what remains besides model and sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.services.worker.replica.replica import Replica
from tests.services.worker.replica_internals import runner_of

Choose = Callable[[int], torch.Tensor]  # a token for each of so many rows


class NullModel:
    def __init__(self, vocab_size: int) -> None:
        self._logits = torch.zeros(1, vocab_size)
        self._made: dict[int, torch.Tensor] = {}  # by number of rows: making a view takes longer than finding it

    def forward(self, batch: Any, caches: object) -> int:
        """Returns the number of rows in place of hidden states."""
        return int((batch.token_ids if batch.logit_tokens is None else batch.logit_tokens).numel())

    def logits(self, num_rows: int) -> torch.Tensor:
        if num_rows not in self._made:
            self._made[num_rows] = self._logits.expand(num_rows, -1)
        return self._made[num_rows]


def ones(num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, dtype=torch.int32)


def leave_out_forward(replica: Replica, choose: Choose = ones) -> None:
    """Replaces the model and sampling; tokens come from `choose`."""

    def sample(logits: torch.Tensor, *_parameters: object) -> torch.Tensor:
        return choose(len(logits))

    runner = runner_of(replica)
    runner.use_model(NullModel(replica.vocab_size))
    runner.sampler.vocabulary.sample = sample  # type: ignore[method-assign]
