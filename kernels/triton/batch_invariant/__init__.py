"""Functions of kernels for CUDA that give a row the same bits whatever the batch (docs/design/kernels.md says how).

What is missing here (norms, rotation, gate: one program a row; routing: a few rows, each by itself) is so in
quire.kernels.triton already.
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
