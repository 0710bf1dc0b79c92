"""Calls of every kernel that a model's steps call, on tensors of host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from triton.runtime import driver

from quire.kernels.reference.linear import LinearWeight
from quire.kernels.triton import batch_invariant, step_edges
from quire.kernels.triton.activation import silu_mul
from quire.kernels.triton.attention import shared_prefix
from quire.kernels.triton.attention.attention_inputs import qk_norm_rope_store
from quire.kernels.triton.attention.chunk_attention import chunk_attention
from quire.kernels.triton.attention.combine import WIDTHS, combine
from quire.kernels.triton.attention.decode_attention import decode_attention
from quire.kernels.triton.batch_invariant import attention as invariant_attention
from quire.kernels.triton.precompile.adapter_jobs import adapter_jobs
from quire.kernels.triton.precompile.expert_jobs import expert_jobs
from quire.kernels.triton.precompile.latent_jobs import latent_jobs
from quire.kernels.triton.precompile.packed_jobs import packed_jobs
from quire.kernels.triton.precompile.precompile import ModelShape
from quire.kernels.triton.rms_norm import add_rms_norm, rms_norm
from quire.kernels.triton.sampling.digit_sums import digit_sums
from quire.kernels.triton.sampling.part_sampling import best_of_part, best_of_parts
from quire.kernels.triton.sampling.sampling import sample
from quire.kernels.triton.sampling.token_mask import mask_logits
from quire.kernels.triton.single_row.row_attention import row_attention
from quire.kernels.triton.single_row.row_linear import RowNorm, row_linear


def jobs(shape: ModelShape) -> Iterator[Callable[[], object]]:
    """Calls, those that take longest first."""
    dtype, kv_dtype = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype)
    hidden, heads, kv_heads, head_dim = shape.hidden_size, shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    q_size, qkv_size = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    many = shape.max_num_seqs

    def of(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    caches = [of(16, shape.block_size, kv_heads, head_dim, dtype=kv_dtype) for _ in range(2)]
    scale, width = head_dim**-0.5, 16
    norm = of(head_dim) if shape.qk_norm else None
    sinks = torch.empty(heads) if shape.attention_sinks else None
    cos_sin = torch.empty(shape.block_size * width, head_dim)
    floats = torch.empty(many)
    keys = torch.zeros(many, dtype=torch.int64), ints(many)
    logits = of(many, shape.vocab_size)

    def decode(rows: int, *, ordered: bool, chunked: bool = False) -> None:
        order = ints(rows) if ordered else None
        rest = scale, int(chunked), order, sinks, shape.softcap, chunked
        decode_attention(of(rows, heads, head_dim), *caches, ints(rows, width), ints(rows), *rest)

    def shared(rows: int) -> None:
        per_tile = shared_prefix.rows_per_tile(heads, kv_heads)
        tiles = ints(4, per_tile), ints(4), ints(4), ints(rows)
        shared_prefix.shared_prefix_attention(
            of(rows, heads, head_dim),
            *caches,
            ints(rows, width),
            ints(rows),
            shared_prefix.SharedPrefixes(*tiles),
            scale,
            ints(rows),
        )

    def combines() -> None:
        """How many parts there are to join depends on the number of heads."""
        for width in WIDTHS:
            parts, logs = (torch.empty(heads, width, *size) for size in ((head_dim,), ()))
            combine(parts, logs, of(heads, head_dim))

    def chunk(*, chunked: bool = False, trees: bool = False) -> None:
        masks = torch.zeros(100, dtype=torch.int64) if trees else None
        rest = scale, int(chunked), sinks, shape.softcap, chunked, masks
        chunk_attention(of(100, heads, head_dim), *caches, ints(2, width), ints(3), ints(2), *rest)

    def in_chunks() -> Iterator[Callable[[], object]]:
        """Some layers' windows do not slide."""
        if shape.batch_invariant:
            yield lambda: invariant_chunk(chunked=True)
            for rows in (2, many):
                yield lambda rows=rows: invariant_decode(rows, ordered=True, chunked=True)
                yield lambda rows=rows: invariant_decode(rows, ordered=False, chunked=True)
            return
        yield lambda: chunk(chunked=True)
        for rows, ordered in ((many, True), (8, True), (many, False), (2, False)):
            yield lambda rows=rows, ordered=ordered: decode(rows, ordered=ordered, chunked=True)

    def attend_row() -> None:
        row_attention(
            of(1, qkv_size), norm, norm, 1e-6, cos_sin, ints(1), *caches, ints(1, width), ints(1), heads, scale, 0,
            pdl=capability_has_pdl(),
        )  # fmt: skip

    def multiply_row(in_features: int, out_features: int, *, gated: bool = False, added: bool = False) -> None:
        weight = LinearWeight(of(out_features * (2 if gated else 1), in_features), None)
        row_linear(
            of(1, in_features),
            weight,
            norm=None if added else RowNorm(of(in_features), 1e-6),
            gated=gated,
            residual=of(1, out_features) if added else None,
            pdl=capability_has_pdl(),
        )

    def choose(rows: int, temperature: bool, filtered: bool = False) -> None:
        filters = (ints(rows), floats[:rows], floats[:rows]) if filtered else (None, None, None)
        rest = keys[0][:rows], keys[1][:rows]
        sample(logits[:rows], floats[:rows] if temperature else None, *filters, *rest)

    def choose_of_part(rows: int, temperature: bool, filtered: bool = False) -> None:
        """Filters leave float32."""
        of_rows = torch.empty(rows, shape.vocab_size) if filtered else logits[:rows]
        best_of_part(of_rows, floats[:rows] if temperature else None, keys[0][:rows], keys[1][:rows], 0)

    def between_ranks() -> None:
        best_of_parts(ints(2, 8, 3))
        values, known = torch.empty(8, shape.vocab_size), torch.zeros(8, 1, dtype=torch.int64)
        digit_sums(values, None, known, 24)
        digit_sums(values, torch.empty(8, 1), known, 24)

    def choices() -> Iterator[Callable[[], object]]:
        if shape.is_whole:
            yield lambda: choose(many, True)
            yield lambda: choose(8, True)
            yield lambda: choose(8, False)
        else:
            yield lambda: choose_of_part(8, True)
            yield lambda: choose_of_part(8, False)
            yield lambda: choose_of_part(8, True, filtered=True)
            yield between_ranks

    def norms() -> None:
        rms_norm(of(8, hidden), of(hidden), 1e-6)
        add_rms_norm(of(8, hidden), of(8, hidden), of(hidden), 1e-6)

    def gate() -> None:
        silu_mul(of(8, 2 * shape.intermediate_size))

    def store() -> None:
        qk_norm_rope_store(of(8, qkv_size), norm, norm, 1e-6, cos_sin, ints(8), ints(8), *caches, heads, kv_heads)

    def edges() -> None:
        step_edges.begin_step(*(ints(8) for _ in range(5)), ints(8, width))
        step_edges.end_step(ints(8), ints(8), ints(8))

    def masks(chosen: torch.Tensor | None) -> None:
        words = ints(8, -(-shape.vocab_size // 32))
        full, half, ids = torch.empty(8, shape.vocab_size), of(8, shape.vocab_size), keys[0][:8]
        for masked, places in ((full, None), (full, ids), (half, ids)):
            mask_logits(masked, chosen, words, places)

    def common() -> Iterator[Callable[[], object]]:
        yield norms
        yield gate
        yield edges
        yield lambda: masks(None)
        yield lambda: masks(keys[0][:8])

    def invariant_linear(in_features: int, out_features: int) -> None:
        weight = LinearWeight(of(out_features, in_features), None)
        batch_invariant.linear(of(2, in_features), weight)

    def invariant_decode(rows: int, *, ordered: bool, chunked: bool = False) -> None:
        invariant_attention.decode_attention(
            of(rows, heads, head_dim),
            *caches,
            ints(rows, 4096),
            ints(rows),
            scale,
            int(chunked),
            ints(rows) if ordered else None,
            sinks,
            shape.softcap,
            chunked,
        )

    def invariant_chunk(*, chunked: bool = False) -> None:
        rest = scale, int(chunked), sinks, shape.softcap, chunked
        batch_invariant.paged_attention(of(100, heads, head_dim), *caches, ints(2, width), ints(3), ints(2), *rest)

    def invariant_choice() -> None:
        if shape.is_whole:
            batch_invariant.sample(logits[:2], None, None, None, None, keys[0][:2], keys[1][:2])
        else:
            choose_of_part(2, False)
        batch_invariant.log_softmax(torch.empty(2, shape.vocab_size))

    if shape.chunked_windows:
        yield from in_chunks()
    if shape.experts is not None:
        yield from expert_jobs(shape, shape.experts, capability_has_pdl)
    if shape.batch_invariant:
        yield invariant_choice
        yield invariant_chunk
        for few_or_many in (2, many):
            yield lambda rows=few_or_many: invariant_decode(rows, ordered=True)
            yield lambda rows=few_or_many: invariant_decode(rows, ordered=False)
        yield from common()
        yield store
        yield lambda: invariant_linear(hidden, qkv_size)
        yield lambda: invariant_linear(q_size, hidden)
        yield lambda: invariant_linear(hidden, 2 * shape.intermediate_size)
        yield lambda: invariant_linear(shape.intermediate_size, hidden)
        yield lambda: invariant_linear(hidden, shape.vocab_size)
        return
    if shape.packed is not None:
        yield from packed_jobs(shape, shape.packed, capability_has_pdl)
    if shape.num_adapters:
        yield from adapter_jobs(shape, capability_has_pdl)
    if shape.is_whole:
        yield lambda: choose(many, True, filtered=True)
    if shape.latent is not None:
        yield from latent_jobs(shape, shape.latent)
    else:
        yield lambda: shared(many)
        if shape.single_row:
            yield attend_row
        yield combines
        yield chunk
        if shape.has_trees:
            yield lambda: chunk(trees=True)
        yield lambda: decode(many, ordered=True)
        yield lambda: decode(8, ordered=True)
        yield lambda: decode(many, ordered=False)
        yield lambda: decode(2, ordered=False)
        yield lambda: shared(8)
        yield store
    yield from choices()
    yield from common()
    if shape.single_row:
        if shape.packed is None:
            yield lambda: multiply_row(hidden, qkv_size)
            yield lambda: multiply_row(q_size, hidden, added=shape.is_whole)
            yield lambda: multiply_row(hidden, shape.intermediate_size, gated=True)
            yield lambda: multiply_row(shape.intermediate_size, hidden, added=shape.is_whole)
        yield lambda: multiply_row(hidden, shape.vocab_size)


def capability_has_pdl() -> bool:
    return driver.active.get_current_target().arch >= 90
