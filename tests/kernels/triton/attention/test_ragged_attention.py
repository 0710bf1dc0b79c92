"""Bidirectional attention over concatenated prompts equals plain torch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.triton.attention.dense_attention import dense_attention, takes_dense
from tests.kernels.triton.closeness import assert_close

LENGTHS = [[1], [5, 1, 33], [70], [16, 16, 64, 130]]


def inputs(lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
    """Creates views of one tensor, as from a projection, with NaN after the last token."""
    total = sum(lengths)
    qkv = torch.full((total + 3, 3, heads, head_dim), float("nan"), dtype=dtype, device=device)
    qkv[:total] = torch.randn(total, 3, heads, head_dim).to(dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    return *qkv[:total].unbind(1), starts


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 32), (2, 24), (1, 64), (2, 72), (1, 80)])
@pytest.mark.parametrize("reach", [0, 3, 20])
def test_every_token_sees_its_own_prompt(
    lengths: list[int], heads: int, head_dim: int, reach: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v, starts = inputs(lengths, heads, head_dim, dtype, device)
    found = triton.ragged_attention(q, k, v, starts, max(lengths), head_dim**-0.5, reach)
    wide = (t.float().cpu() for t in (q, k, v))
    wanted = reference.ragged_attention(*wide, starts.cpu(), max(lengths), head_dim**-0.5, reach)
    assert_close(found, wanted)


@pytest.mark.parametrize("reach", [0, 3])
def test_only_the_first_tokens_are_seen(reach: int, dtype: torch.dtype, device: torch.device) -> None:
    """Some sequences have a limit of visible tokens; a row that sees no token gets zeros."""
    lengths = [33, 5, 70]
    q, k, v, starts = inputs(lengths, 2, 32, dtype, device)
    num_seen = torch.tensor([20, 5, 1], dtype=torch.int32, device=device)
    found = triton.ragged_attention(q, k, v, starts, max(lengths), 32**-0.5, reach, num_seen)
    wide = (t.float().cpu() for t in (q, k, v))
    wanted = reference.ragged_attention(*wide, starts.cpu(), max(lengths), 32**-0.5, reach, num_seen.cpu())
    assert_close(found, wanted)
    assert bool((wanted[-1] == 0).all()) == bool(reach)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_seqs", "length", "heads", "head_dim"), [(1, 4784, 16, 80), (3, 1030, 4, 72), (2, 1500, 20, 64)]
)
def test_long_sequences_of_equal_length(num_seqs: int, length: int, heads: int, head_dim: int) -> None:
    """Sequences that cuDNN takes give what the kernel for any lengths gives."""
    lengths = [length] * num_seqs
    q, k, v, starts = inputs(lengths, heads, head_dim, torch.bfloat16, torch.device("cuda"))
    found = dense_attention(q, k, v, length, head_dim**-0.5)
    assert_close(found, triton.ragged_attention(q, k, v, starts, length, head_dim**-0.5, 0))
    while not takes_dense(q, num_seqs, length):
        pass
    assert torch.equal(found, triton.ragged_attention(q, k, v, starts, length, head_dim**-0.5, 0))
