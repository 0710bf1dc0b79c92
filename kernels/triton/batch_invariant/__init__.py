"""Functions of kernels for CUDA that give a row the same bits in any batch (method: docs/design/kernels.md).

Functions missing here are batch invariant in quire.kernels.triton already: norms, rotation and gate use one program per
row, routing treats rows independently.
"""

from __future__ import annotations

from quire.kernels.reference.linear import prepare_linear
from quire.kernels.triton import unavailable
from quire.kernels.triton.batch_invariant.attention import paged_attention
from quire.kernels.triton.batch_invariant.expert_layers import experts
from quire.kernels.triton.batch_invariant.linear import linear
from quire.kernels.triton.batch_invariant.log_softmax import log_softmax
from quire.kernels.triton.batch_invariant.sampling import sample
from quire.kernels.triton.moe.expert_layers import prepare_experts

__all__ = [
    "experts",
    "linear",
    "log_softmax",
    "paged_attention",
    "prepare_experts",
    "prepare_linear",
    "sample",
    "unavailable",
]
