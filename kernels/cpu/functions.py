"""The functions of kernels on the compiled library. Meaning, shapes and dtypes: kernels/reference.

Unsupported dtypes (float16, mixed ones) use the reference. Tensors are dense where noted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels import reference
from quire.kernels.cpu.native import DTYPES, LIBRARY, calls
from quire.kernels.reference.linear import LinearWeight

Tensor = torch.Tensor
ALIGNMENT = 64


def dense(*tensors: Tensor) -> bool:
    """Returns whether all tensors are contiguous."""
    for tensor in tensors:  # noqa: SIM110  all() over a generator takes twice as long
        if not tensor.is_contiguous():
            return False
    return True


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight in tiles (linear.h), with the arguments of the call precomputed."""

    dtype: torch.dtype
    code: int
    in_features: int
    out_features: int
    pointer: int
    bias_pointer: int | None
    owners: tuple[Tensor | None, ...]  # keep the memory of the pointers alive


def aligned(num_bytes: int) -> Tensor:
    """Allocates memory with the alignment of tiles, as a tensor of exactly that length, so that it can be copied."""
    memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :][:num_bytes]


def prepare_linear(weight: Tensor, bias: Tensor | None) -> PackedWeight | LinearWeight:
    """Packs `weight` [out_features, in_features] into tiles, copying it, and keeps a copy of `bias` if needed.
    Unsupported or mixed dtypes return the reference's weight."""
    code = DTYPES.get(weight.dtype)
    if code is None or (bias is not None and bias.dtype is not weight.dtype):
        return reference.prepare_linear(weight, bias)
    weight = weight.detach().contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    out_features, in_features = weight.shape
    memory = aligned(LIBRARY.quire_packed_bytes(code, out_features, in_features))
    pointer = memory.data_ptr()
    LIBRARY.quire_pack_weight(code, out_features, in_features, weight.data_ptr(), pointer)
    bias_pointer = None if bias is None else bias.data_ptr()
    return PackedWeight(weight.dtype, code, in_features, out_features, pointer, bias_pointer, (memory, bias))


def linear(x: Tensor, weight: PackedWeight | LinearWeight) -> Tensor:
    """Computes x @ weight.T + bias: dense [num_tokens, in_features] -> [num_tokens, out_features], in the weight's
    dtype."""
    if type(weight) is not PackedWeight:
        return reference.linear(x, weight)
    rows, in_features = x.shape
    assert x.dtype is weight.dtype
    assert in_features == weight.in_features
    assert x.is_contiguous()
    out = calls.empty(rows, weight.out_features, dtype=weight.dtype)
    calls.linear(
        weight.code,
        rows,
        in_features,
        weight.out_features,
        x.data_ptr(),
        weight.pointer,
        weight.bias_pointer,
        out.data_ptr(),
    )
    return out


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Gathers rows of `table` [vocab_size, hidden_size] at `ids` [num_tokens]; ids are not checked."""
    if ids.dtype is not torch.int32:
        ids = ids.int()
    assert dense(ids, table)
    rows, size = ids.size(0), table.size(1)
    out = calls.empty(rows, size, dtype=table.dtype)
    calls.embed(rows, size * table.element_size(), ids.data_ptr(), table.data_ptr(), out.data_ptr())
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes x / sqrt(mean(x²) + eps) * weight over the last dimension; x is dense. Mixed dtypes use the
    reference."""
    code = DTYPES.get(x.dtype)
    if code is None or weight.dtype is not x.dtype:
        return reference.rms_norm(x, weight, eps)
    assert x.is_contiguous()
    size = weight.size(0)
    out = calls.empty_like(x)
    calls.rms_norm(code, x.numel() // size, size, eps, x.data_ptr(), None, weight.data_ptr(), out.data_ptr())
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual` in place and returns the RMS norm of the sum; both dense [num_tokens, size]. Mixed dtypes
    use the reference."""
    code = DTYPES.get(x.dtype)
    if code is None or weight.dtype is not x.dtype or residual.dtype is not x.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    rows, size = x.shape
    assert residual.shape == x.shape
    assert dense(x, residual)
    out = calls.empty_like(x)
    calls.rms_norm(code, rows, size, eps, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr())
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Computes silu(gate) * up: dense [num_tokens, 2 * size], gates first -> [num_tokens, size]."""
    code = DTYPES.get(gate_up.dtype)
    if code is None:
        return reference.silu_mul(gate_up)
    assert gate_up.is_contiguous()
    rows, size = gate_up.size(0), gate_up.size(1) // 2
    out = calls.empty(rows, size, dtype=gate_up.dtype)
    calls.silu_mul(code, rows, size, gate_up.data_ptr(), out.data_ptr())
    return out


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """Normalizes and rotates queries and keys, stores keys and values in the caches, and returns the queries
    [num_tokens, num_q_heads, head_dim]. A cache or norm weight of another dtype uses the reference."""
    code = DTYPES.get(qkv.dtype)
    weighted = q_weight is not None and k_weight is not None
    mixed = k_cache.dtype is not qkv.dtype or (weighted and q_weight.dtype is not qkv.dtype)
    if code is None or mixed:
        return reference.qk_norm_rope_store(
            qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache, num_q_heads, num_kv_heads
        )
    assert positions.dtype is slot_mapping.dtype is torch.int32
    assert cos_sin.dtype is torch.float32
    assert dense(qkv, cos_sin, positions, slot_mapping, k_cache, v_cache)
    rows, head_dim = qkv.size(0), k_cache.size(3)
    out = calls.empty(rows, num_q_heads, head_dim, dtype=qkv.dtype)
    calls.qk_norm_rope_store(
        code,
        rows,
        num_q_heads,
        num_kv_heads,
        head_dim,
        eps,
        qkv.data_ptr(),
        q_weight.data_ptr() if weighted else None,
        k_weight.data_ptr() if weighted else None,
        cos_sin.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
    )
    return out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    chunked: bool = False,
    tree_mask: Tensor | None = None,
    seen_ends: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of each sequence's last rows over its blocks -> [num_tokens, num_q_heads, head_dim]. A
    cache of another dtype uses the reference; query_start is required."""
    code = DTYPES.get(q.dtype)
    if code is None or k_cache.dtype is not q.dtype:
        return reference.paged_attention(
            q,
            k_cache,
            v_cache,
            block_tables,
            query_start,
            seq_lens,
            scale,
            sliding_window,
            sinks,
            softcap,
            chunked,
            tree_mask,
            seen_ends=seen_ends,
        )
    assert sliding_window or not chunked
    assert block_tables.dtype is query_start.dtype is seq_lens.dtype is torch.int32
    assert block_tables.stride(1) == 1
    assert sinks is None or (sinks.dtype is torch.float32 and sinks.is_contiguous())
    assert tree_mask is None or (tree_mask.dtype is torch.int64 and tree_mask.is_contiguous())
    assert seen_ends is None or (seen_ends.dtype is torch.int32 and seen_ends.is_contiguous())
    assert dense(q, k_cache, v_cache, query_start, seq_lens)
    num_q_heads, head_dim = q.size(1), q.size(2)
    out = calls.empty_like(q)
    calls.paged_attention(
        code,
        block_tables.size(0),
        num_q_heads,
        k_cache.size(2),
        head_dim,
        k_cache.size(1),
        block_tables.stride(0),
        sliding_window,
        chunked,
        scale,
        softcap,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        None if tree_mask is None else tree_mask.data_ptr(),
        None if seen_ends is None else seen_ends.data_ptr(),
        out.data_ptr(),
    )
    return out


def sample(logits: Tensor, *columns: Tensor | None) -> Tensor:
    """Samples one token per row of dense float32 logits [num_rows, vocab_size]: int32 [num_rows]. `columns`:
    temperature, filters, seeds and positions in the reference's order; None disables a filter, no temperature is
    greedy."""
    if logits.dtype is not torch.float32:
        return reference.sample(logits, *columns)
    seeds, positions = columns[-2:]
    rows, size = logits.shape
    assert seeds.dtype is torch.int64
    assert positions.dtype is torch.int32
    assert dense(logits, seeds, positions)
    out = calls.empty(rows, dtype=torch.int32)
    calls.sample(
        rows,
        size,
        logits.data_ptr(),
        *(None if column is None else column.data_ptr() for column in columns),
        out.data_ptr(),
    )
    return out


def mask_logits(
    logits: Tensor, rows: Tensor | None, masks: Tensor, places: Tensor | None = None, first: int = 0
) -> None:
    """Sets logits of tokens whose bit in `masks` is 0 to minus infinity, in place. A part of the vocabulary uses the
    reference."""
    vocab_size = logits.size(1)
    if first or masks.size(1) != -(-vocab_size // 32):  # a part of the vocabulary
        return reference.mask_logits(logits, rows, masks, places, first)
    assert logits.dtype is torch.float32
    assert masks.dtype is torch.int32
    assert dense(logits, masks)
    count = len(masks if places is None else places)
    for indices in (rows, places):
        assert indices is None or (indices.dtype is torch.int64 and indices.is_contiguous() and len(indices) == count)
    calls.mask_logits(
        count,
        vocab_size,
        logits.data_ptr(),
        None if rows is None else rows.data_ptr(),
        masks.data_ptr(),
        None if places is None else places.data_ptr(),
    )
