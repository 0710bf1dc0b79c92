"""Recurrent layers on the compiled library. Meaning, shapes and dtypes: kernels/reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.kernels import reference
from quire.kernels.cpu.functions import dense
from quire.kernels.cpu.native import DTYPES, calls
from quire.kernels.state_pages import StatePages

Tensor = torch.Tensor
MOST_TAPS = 8  # recurrent.cpp


def short_convolution(
    x: Tensor,
    weight: Tensor,
    pages: StatePages,
    block_tables: Tensor,
    query_start: Tensor | None,
    seq_lens: Tensor,
    block_size: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes silu(bias + convolution) of x [num_tokens, num_channels], -> the same shape, and stores the inputs for
    later steps in the pages. Other dtypes or longer filters use the reference."""
    code = DTYPES.get(x.dtype)
    if code is None or weight.size(1) > MOST_TAPS:
        return reference.short_convolution(x, weight, pages, block_tables, query_start, seq_lens, block_size, bias)
    assert weight.dtype is x.dtype
    assert bias is None or (bias.dtype is x.dtype and bias.is_contiguous())
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    _check(pages, block_tables, query_start, seq_lens)
    num_tokens, num_channels = x.shape
    out = calls.empty(num_tokens, num_channels, dtype=x.dtype)
    calls.short_convolution(
        code,
        block_tables.size(0),
        num_channels,
        weight.size(1),
        x.stride(0),
        pages.first.stride(0),
        block_tables.stride(0),
        block_size,
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        pages.first.data_ptr(),
        block_tables.data_ptr(),
        None if query_start is None else query_start.data_ptr(),
        seq_lens.data_ptr(),
        out.data_ptr(),
    )
    return out


def gated_delta_rule(
    qkv: Tensor,
    strength: Tensor,
    step: Tensor,
    rate: Tensor,
    step_bias: Tensor,
    pages: StatePages,
    block_tables: Tensor,
    query_start: Tensor | None,
    seq_lens: Tensor,
    block_size: int,
) -> Tensor:
    """Computes the outputs [num_tokens, num_heads, value_dim] of the gated delta rule and stores states in the pages.
    Other dtypes use the reference."""
    code = DTYPES.get(qkv.dtype)
    if code is None:
        return reference.gated_delta_rule(
            qkv, strength, step, rate, step_bias, pages, block_tables, query_start, seq_lens, block_size
        )
    return _scan(
        calls.gated_delta_rule, code, (qkv, strength, step), (rate, step_bias), pages, block_tables, query_start,
        seq_lens, block_size,
    )  # fmt: skip


def state_space_scan(
    qkv: Tensor,
    step: Tensor,
    rate: Tensor,
    step_bias: Tensor,
    pages: StatePages,
    block_tables: Tensor,
    query_start: Tensor | None,
    seq_lens: Tensor,
    block_size: int,
) -> Tensor:
    """Computes the outputs [num_tokens, num_heads, value_dim] of a Mamba-2 scan and stores states in the pages. Other
    dtypes use the reference."""
    code = DTYPES.get(qkv.dtype)
    if code is None:
        return reference.state_space_scan(
            qkv, step, rate, step_bias, pages, block_tables, query_start, seq_lens, block_size
        )
    return _scan(
        calls.state_space_scan, code, (qkv, step), (rate, step_bias), pages, block_tables, query_start, seq_lens,
        block_size,
    )  # fmt: skip


def _scan(
    call: Callable[..., None],
    code: int,
    by_token: Sequence[Tensor],
    by_head: Sequence[Tensor],
    pages: StatePages,
    block_tables: Tensor,
    query_start: Tensor | None,
    seq_lens: Tensor,
    block_size: int,
) -> Tensor:
    """Calls the library's scan over states, which writes the pages; returns [num_tokens, num_heads, value_dim].
    `by_token`: qkv and other per-token inputs in the library's order; `by_head`: rates and step biases, float32."""
    qkv, shape = by_token[0], pages.shape
    assert all(tensor.dtype is qkv.dtype and tensor.stride(1) == 1 for tensor in by_token)
    assert all(tensor.dtype is torch.float32 for tensor in by_head)
    assert dense(*by_head)
    assert pages.first.stride(0) == pages.second.stride(0)
    _check(pages, block_tables, query_start, seq_lens)
    keys = (qkv.size(1) - shape.num_heads * shape.value_dim) // 2
    out = calls.empty(qkv.size(0), shape.num_heads, shape.value_dim, dtype=qkv.dtype)
    call(
        code,
        block_tables.size(0),
        shape.num_heads,
        keys // shape.key_dim,
        shape.key_dim,
        shape.value_dim,
        shape.num_first,
        shape.num_inputs,
        *(tensor.stride(0) for tensor in by_token),
        pages.first.stride(0),
        block_tables.stride(0),
        block_size,
        *(tensor.data_ptr() for tensor in (*by_token, *by_head)),
        pages.first.data_ptr(),
        pages.second.data_ptr(),
        block_tables.data_ptr(),
        None if query_start is None else query_start.data_ptr(),
        seq_lens.data_ptr(),
        out.data_ptr(),
    )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes rms_norm(x) * silu(gate): [num_tokens, num_heads, size] -> [num_tokens, num_heads * size]. Other dtypes
    use the reference."""
    code = DTYPES.get(x.dtype)
    if code is None:
        return reference.gated_norm(x, gate, weight, eps)
    assert gate.dtype is weight.dtype is x.dtype
    assert gate.stride(1) == 1
    assert dense(x, weight)
    num_tokens, num_heads, size = x.shape
    out = calls.empty(num_tokens, num_heads * size, dtype=x.dtype)
    calls.gated_norm(
        code,
        num_tokens,
        num_heads,
        size,
        gate.stride(0),
        eps,
        x.data_ptr(),
        gate.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
    )
    return out


def _check(pages: StatePages, block_tables: Tensor, query_start: Tensor | None, seq_lens: Tensor) -> None:
    """Asserts dtypes and layouts of pages, tables and lengths, which C does not check."""
    assert pages.first.dtype is pages.second.dtype is torch.float32
    assert block_tables.dtype is seq_lens.dtype is torch.int32
    assert block_tables.stride(1) == 1
    assert seq_lens.is_contiguous()
    assert query_start is None or (query_start.dtype is torch.int32 and query_start.is_contiguous())
