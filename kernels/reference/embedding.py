"""Token embedding lookup in a table."""

from __future__ import annotations

import torch
from torch.nn import functional


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Gathers rows of `table` [vocab_size, hidden_size] at `ids` int32 [num_tokens] -> [num_tokens, hidden_size].

    Callers ensure that every id is within the table.
    """
    return functional.embedding(ids, table)
