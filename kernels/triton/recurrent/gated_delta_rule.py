"""Gated delta rule and state space scan: a program has one head of one row and some of its value dimensions.

States of different value dimensions are independent. In a prompt the program processes CHUNK tokens at a time; the
triangular system of the reference is solved by inverting its matrix: blocks of 8 by 8 as a product of powers, which
stays accurate for so few, then blocks twice as large from two inverted ones, B - B C B with C between them. So nothing
is computed token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.state_pages import StatePages

LENGTH_EPS = tl.constexpr(1e-6)
LEAST_DOT = 16  # smallest matrix side


@dataclass(frozen=True)
class DeltaRuleTuning:
    """Tokens per chunk and value dimensions per program of the recurrent scans."""

    chunk: int  # tokens of a prompt per chunk
    values: int  # value dimensions per program in a prompt
    decode_values: int


TUNING = ByCapability({SM90: DeltaRuleTuning(chunk=32, values=32, decode_values=32)})  # not measured yet


@triton.jit
def _state_of(first_ptr, second_ptr, head, NUM_INPUTS: tl.constexpr, NUM_FIRST: tl.constexpr, WORDS: tl.constexpr):
    """Returns the address of a head's state in page 0."""
    found = first_ptr + NUM_INPUTS + head * WORDS
    if head >= NUM_FIRST:
        found = second_ptr + (head - NUM_FIRST) * WORDS
    return found


@triton.jit
def _softplus(x):
    """Computes softplus as torch does."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _normalize_to_unit_length(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + LENGTH_EPS)[:, None]


@triton.jit
def _inverse(before, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Inverts 1 + before, where `before` is strictly lower triangular."""
    rows, columns = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    one = tl.where(rows == columns, 1.0, 0.0)
    small = tl.where(rows // 8 == columns // 8, before, 0.0)
    squared = _dot(small, small, PRECISION)
    inverse = _dot(one - small, one + squared, PRECISION)
    inverse = _dot(inverse, one + _dot(squared, squared, PRECISION), PRECISION)
    for level in tl.static_range(3):
        if (8 << level) < CHUNK:
            between = (rows // (8 << level) != columns // (8 << level)) & (
                rows // (16 << level) == columns // (16 << level)
            )
            inverse -= _dot(_dot(inverse, tl.where(between, before, 0.0), PRECISION), inverse, PRECISION)
    return inverse


@triton.jit
def _prompts(
    qkv_ptr,
    qkv_stride,
    strength_ptr,
    strength_stride,
    step_ptr,
    step_stride,
    rate_ptr,
    bias_ptr,
    out_ptr,
    first_ptr,
    second_ptr,
    page_stride,
    table_ptr,
    table_stride,
    start_ptr,
    len_ptr,
    block_size,
    scale,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_FIRST: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Processes rows of any length.

    DELTA: the gated delta rule, else a state space. KEYS, VALUES: powers of two covering KEY_DIM and a program's share
    of VALUE_DIM.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    count, seq_len = end - begin, tl.load(len_ptr + row)
    if count == 0:
        return
    first = seq_len - count
    table_ptr += row.to(tl.int64) * table_stride
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    of_state = keys[:, None] * VALUE_DIM + values[None, :]
    in_state = is_key[:, None] & is_value[None, :]
    states_ptr = _state_of(first_ptr, second_ptr, head, NUM_INPUTS, NUM_FIRST, KEY_DIM * VALUE_DIM)
    read = tl.load(table_ptr + (first - 1) // block_size, mask=first > 0, other=0).to(tl.int64)
    goes_on = in_state & (keys[:, None] < first * KEYS)  # first > 0
    state = tl.load(states_ptr + read * page_stride + of_state, mask=goes_on, other=0.0)
    tl.debug_barrier()  # the page read may be the page written
    rate, bias = tl.load(rate_ptr + head), tl.load(bias_ptr + head)
    q_ptr = qkv_ptr + (head // REPEATS) * KEY_DIM
    k_ptr = q_ptr + (HEADS // REPEATS) * KEY_DIM
    v_ptr = qkv_ptr + 2 * (HEADS // REPEATS) * KEY_DIM + head * VALUE_DIM
    rows, columns = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    position = first
    while position < seq_len:
        behind = tl.minimum(tl.minimum(position + CHUNK, seq_len), (position // block_size + 1) * block_size)
        tokens = tl.arange(0, CHUNK)
        there = tokens < behind - position
        places = (begin + position - first + tokens).to(tl.int64)
        of_keys, with_keys = places[:, None] * qkv_stride + keys[None, :], there[:, None] & is_key[None, :]
        q = tl.load(q_ptr + of_keys, mask=with_keys, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + of_keys, mask=with_keys, other=0.0).to(tl.float32)
        with_values = there[:, None] & is_value[None, :]
        v = tl.load(v_ptr + places[:, None] * qkv_stride + values[None, :], mask=with_values, other=0.0).to(tl.float32)
        step = tl.load(step_ptr + places * step_stride + head, mask=there, other=0.0).to(tl.float32)
        step = tl.where(there, _softplus(step + bias), 0.0)
        total = tl.cumsum(rate * step, 0)
        all_of_it = tl.min(total, 0)  # cumulative decays never increase
        since = total[:, None] - total[None, :]
        ratio = tl.where(rows >= columns, tl.exp(tl.where(rows >= columns, since, 0.0)), 0.0)
        kept = tl.exp(total)
        if DELTA:
            q, k = _normalize_to_unit_length(q) * scale, _normalize_to_unit_length(k)
            share = tl.load(strength_ptr + places * strength_stride + head, mask=there, other=0.0).to(tl.float32)
            share = tl.where(there, tl.sigmoid(share), 0.0)
            alike = _dot(k, tl.trans(k), PRECISION)
            before = tl.where(rows > columns, share[:, None] * ratio * alike, 0.0)
            wanted = share[:, None] * (v - kept[:, None] * _dot(k, state, PRECISION))
            u = _dot(_inverse(before, CHUNK, PRECISION), wanted, PRECISION)
        else:
            u = step[:, None] * v
        found = kept[:, None] * _dot(q, state, PRECISION)
        found += _dot(ratio * _dot(q, tl.trans(k), PRECISION), u, PRECISION)
        out_places = (places[:, None] * HEADS + head) * VALUE_DIM + values[None, :]
        tl.store(out_ptr + out_places, found.to(out_ptr.dtype.element_ty), mask=with_values)
        left = k * tl.exp(all_of_it - total)[:, None]
        state = tl.exp(all_of_it) * state + _dot(tl.trans(left), u, PRECISION)
        if (behind == seq_len) | (behind % block_size == 0):
            written = tl.load(table_ptr + (behind - 1) // block_size).to(tl.int64)
            tl.store(states_ptr + written * page_stride + of_state, state, mask=in_state)
        position = behind


@triton.jit
def _decodes(
    qkv_ptr,
    qkv_stride,
    strength_ptr,
    strength_stride,
    step_ptr,
    step_stride,
    rate_ptr,
    bias_ptr,
    out_ptr,
    first_ptr,
    second_ptr,
    page_stride,
    table_ptr,
    table_stride,
    len_ptr,
    block_size,
    scale,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_FIRST: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Processes one token of a row: updates a share of one head's state and stores the outputs."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_value = values < VALUE_DIM
    out_ptr += (row * HEADS + head) * VALUE_DIM
    last = tl.load(len_ptr + row) - 1
    if last < 0:  # padding row of a recording
        tl.store(out_ptr + values, 0.0, mask=is_value)
        return
    keys = tl.arange(0, KEYS)
    is_key = keys < KEY_DIM
    of_state = keys[:, None] * VALUE_DIM + values[None, :]
    in_state = is_key[:, None] & is_value[None, :]
    states_ptr = _state_of(first_ptr, second_ptr, head, NUM_INPUTS, NUM_FIRST, KEY_DIM * VALUE_DIM)
    table_ptr += row * table_stride
    read = tl.load(table_ptr + (last - 1) // block_size, mask=last > 0, other=0).to(tl.int64)
    written = tl.load(table_ptr + last // block_size).to(tl.int64)
    goes_on = in_state & (keys[:, None] < last * KEYS)  # last > 0
    state = tl.load(states_ptr + read * page_stride + of_state, mask=goes_on, other=0.0)
    tl.debug_barrier()  # the page read may be the page written
    q_ptr = qkv_ptr + row * qkv_stride + (head // REPEATS) * KEY_DIM
    k_ptr = q_ptr + (HEADS // REPEATS) * KEY_DIM
    v_ptr = qkv_ptr + row * qkv_stride + 2 * (HEADS // REPEATS) * KEY_DIM + head * VALUE_DIM
    q = tl.load(q_ptr + keys, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + keys, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + values, mask=is_value, other=0.0).to(tl.float32)
    step = _softplus(tl.load(step_ptr + row * step_stride + head).to(tl.float32) + tl.load(bias_ptr + head))
    state *= tl.exp(tl.load(rate_ptr + head) * step)
    if DELTA:
        q *= tl.rsqrt(tl.sum(q * q, 0) + LENGTH_EPS) * scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + LENGTH_EPS)
        share = tl.sigmoid(tl.load(strength_ptr + row * strength_stride + head).to(tl.float32))
        u = share * (v - tl.sum(k[:, None] * state, 0))
    else:
        u = step * v
    state += k[:, None] * u[None, :]
    tl.store(states_ptr + written * page_stride + of_state, state, mask=in_state)
    tl.store(out_ptr + values, tl.sum(q[:, None] * state, 0).to(out_ptr.dtype.element_ty), mask=is_value)


def gated_delta_rule(
    qkv: torch.Tensor,
    strength: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    step_bias: torch.Tensor,
    pages: StatePages,
    block_tables: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Computes the outputs [num_tokens, num_heads, value_dim] of the gated delta rule and stores states in the
    pages."""
    return scan(qkv, strength, step, rate, step_bias, pages, block_tables, query_start, seq_lens, block_size)


def scan(
    qkv: torch.Tensor,
    strength: torch.Tensor | None,
    step: torch.Tensor,
    rate: torch.Tensor,
    step_bias: torch.Tensor,
    pages: StatePages,
    block_tables: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Launches the gated delta rule, or with `strength` None a state space scan; returns [num_tokens, num_heads,
    value_dim] and stores states in the pages. `query_start` None: one token per row."""
    shape = pages.shape
    assert qkv.stride(1) == step.stride(1) == 1
    assert strength is None or strength.stride(1) == 1
    assert pages.first.stride(0) == pages.second.stride(0)
    heads, key_dim, value_dim = shape.num_heads, shape.key_dim, shape.value_dim
    num_key_heads = (qkv.size(1) - heads * value_dim) // (2 * key_dim)
    out = torch.empty((qkv.size(0), heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    num_rows = block_tables.size(0)
    if not qkv.size(0) or not num_rows:
        return out
    shares = step if strength is None else strength
    given = (qkv, qkv.stride(0), shares, shares.stride(0), step, step.stride(0), rate, step_bias, out)
    where = (pages.first, pages.second, pages.first.stride(0), block_tables, block_tables.stride(0))
    sizes = {
        "HEADS": heads,
        "REPEATS": heads // num_key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "NUM_INPUTS": shape.num_inputs,
        "NUM_FIRST": shape.num_first,
        "DELTA": strength is not None,
    }
    if query_start is None:
        values = min(TUNING.here.decode_values, triton.next_power_of_2(value_dim))
        _decodes[(num_rows, heads, triton.cdiv(value_dim, values))](
            *given,
            *where,
            seq_lens,
            block_size,
            key_dim**-0.5,
            **sizes,
            KEYS=triton.next_power_of_2(key_dim),
            VALUES=values,
        )
        return out
    values = max(LEAST_DOT, min(TUNING.here.values, triton.next_power_of_2(value_dim)))
    _prompts[(num_rows, heads, triton.cdiv(value_dim, values))](
        *given,
        *where,
        query_start,
        seq_lens,
        block_size,
        key_dim**-0.5,
        **sizes,
        KEYS=max(LEAST_DOT, triton.next_power_of_2(key_dim)),
        VALUES=values,
        CHUNK=TUNING.here.chunk,
        PRECISION="tf32x3",  # a state sums over the whole past
    )
    return out
