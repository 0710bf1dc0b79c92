"""The most likely tokens, equally likely ones by ascending id.

Which of equal ones torch's topk takes depends on how many are asked for, and that is the most that any row of a step
asks for. 16-bit logits are often equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_ID = (1 << 32) - 1


def largest_by_id(values: Tensor, count: int) -> Tensor:
    """int64 [n, count] of float32 `values` [n, vocab_size], best first."""
    if values.is_cuda:
        return largest_by_packed_keys(values, count)
    return largest_with_ties(values, count)


def largest_by_packed_keys(values: Tensor, count: int) -> Tensor:
    """Looks at nothing on the host."""
    bits = values.view(torch.int32).long()
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    ranks = (ordered << 32) + (LARGEST_ID - torch.arange(values.size(1), device=values.device))
    return ranks.topk(count, dim=1).indices


def largest_with_ties(values: Tensor, count: int) -> Tensor:
    """A pass over the vocabulary more than topk's, for rows in which the token behind the last is as likely as it."""
    best, ids = values.topk(min(count + 1, values.size(1)), dim=1)
    best, ids, behind = best[:, :count], ids[:, :count], best[:, count:]
    if count and behind.size(1):
        for row in (behind == best[:, -1:]).flatten().nonzero().flatten().tolist():
            candidates = (values[row] >= behind[row]).nonzero().flatten()
            ids[row] = candidates[values[row, candidates].sort(descending=True, stable=True).indices[:count]]
    ids, places = ids.sort(dim=1)
    return ids.gather(1, best.gather(1, places).sort(dim=1, descending=True, stable=True).indices)
