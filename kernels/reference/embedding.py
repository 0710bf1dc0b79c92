"""Token ids to vectors."""

from __future__ import annotations

import torch
from torch.nn import functional


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of `table` [vocab_size, hidden_size] at `ids` int32 [num_tokens] -> [num_tokens, hidden_size].

    Every id is within the table: callers see to it.
    """
    return functional.embedding(ids, table)
