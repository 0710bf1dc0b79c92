"""Ranks the most likely tokens, equally likely ones by ascending id.

Which of several equal values torch.topk returns depends on how many are requested, and that is the maximum over the
rows of a step. Logits of 16 bits are often equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_ID = (1 << 32) - 1


def largest_by_id(values: Tensor, count: int) -> Tensor:
    """Returns the ids of the `count` largest `values` (float32 [n, vocab_size]), best first and equal ones by ascending
    id: int64 [n, count]. `count` is at most vocab_size."""
    if values.is_cuda:
        return largest_by_packed_keys(values, count)
    return largest_with_ties(values, count)


def largest_by_packed_keys(values: Tensor, count: int) -> Tensor:
    """Computes largest_by_id() on CUDA: sorts by (value, -id) packed into int64 keys, without synchronizing with the
    host."""
    bits = values.view(torch.int32).long()
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    ranks = (ordered << 32) + (LARGEST_ID - torch.arange(values.size(1), device=values.device))
    return ranks.topk(count, dim=1).indices


def largest_with_ties(values: Tensor, count: int) -> Tensor:
    """Computes largest_by_id() on the CPU: topk, then one more pass over the vocabulary for rows whose next value ties
    with the last one returned."""
    best, ids = values.topk(min(count + 1, values.size(1)), dim=1)
    best, ids, following = best[:, :count], ids[:, :count], best[:, count:]
    if count and following.size(1):
        for row in (following == best[:, -1:]).flatten().nonzero().flatten().tolist():
            candidates = (values[row] >= following[row]).nonzero().flatten()
            ids[row] = candidates[values[row, candidates].sort(descending=True, stable=True).indices[:count]]
    ids, places = ids.sort(dim=1)
    return ids.gather(1, best.gather(1, places).sort(dim=1, descending=True, stable=True).indices)
