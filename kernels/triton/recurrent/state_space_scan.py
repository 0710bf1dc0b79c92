"""State space scan: the programs of the gated delta rule without correction."""

from __future__ import annotations

import torch

from quire.kernels.state_pages import StatePages
from quire.kernels.triton.recurrent.gated_delta_rule import scan


def state_space_scan(
    qkv: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    step_bias: torch.Tensor,
    pages: StatePages,
    block_tables: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Computes the outputs [num_tokens, num_heads, value_dim] of a Mamba-2 scan and stores states in the pages."""
    return scan(qkv, None, step, rate, step_bias, pages, block_tables, query_start, seq_lens, block_size)
