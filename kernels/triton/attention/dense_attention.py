"""Attention within long sequences of equal length by cuDNN, for GPUs where that is faster than the kernel for any
lengths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.kernels.capability import SM80, SM90, ByCapability

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # the first that takes a shape


@dataclass(frozen=True)
class DenseTuning:
    """Shortest sequences for which cuDNN is used, 0: never; and calls of a shape before it."""

    least_tokens: int
    calls_before: int = 0


# On an H200 in bfloat16, beside the kernel for any lengths: 1 x 4,784 tokens with 16 heads of 80 0.34 ms for 0.57,
# 1 x 3,600 with 16 heads of 72 0.22 for 0.36, 8 x 1,500 with 20 heads of 64 0.25 for 0.29, but 75 x 64 with 16 heads of
# 80 0.12 for 0.08. The first call of a shape takes 45 ms: about that much must have been lost before.
TUNING = ByCapability({SM80: DenseTuning(0), SM90: DenseTuning(1024, 256)})
MOST_SHAPES = 1024

_calls: Counter[tuple[int, ...]] = Counter()  # by number of sequences, their length, heads and size of a head


def takes_dense(q: torch.Tensor, num_seqs: int, longest: int) -> bool:
    """Returns whether all sequences of q [num_tokens, num_heads, head_dim] are as long as the longest, cuDNN is faster,
    and such calls recur."""
    tuning = TUNING.here
    is_long = 0 < tuning.least_tokens <= longest and q.size(0) == num_seqs * longest
    if not (is_long and q.is_cuda and q.element_size() == 2 and q.size(2) % 8 == 0):
        return False
    shape = num_seqs, longest, q.size(1), q.size(2)
    if len(_calls) >= MOST_SHAPES and shape not in _calls:
        _calls.clear()
    _calls[shape] += 1
    return _calls[shape] > tuning.calls_before


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, longest: int, scale: float) -> torch.Tensor:
    """Computes bidirectional attention within sequences of `longest` tokens each, [num_tokens, num_heads, head_dim]."""
    parts = (x.view(-1, longest, x.size(1), x.size(2)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(BACKENDS, set_priority=True):
        out = functional.scaled_dot_product_attention(*parts, scale=scale)
    return out.transpose(1, 2).reshape(q.shape)
