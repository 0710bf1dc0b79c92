"""The jobs of jobs.py that models with latent attention have in place of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from quire.kernels.triton.attention.combine import WIDTHS, combine
from quire.kernels.triton.attention.latent_blocks import latent_chunk, latent_decode
from quire.kernels.triton.attention.latent_inputs import latent_store
from quire.kernels.triton.precompile.precompile import LatentShape, ModelShape

WIDTH = 16  # blocks of a table


def latent_jobs(model: ModelShape, shape: LatentShape) -> Iterator[Callable[[], object]]:
    dtype, kv_dtype = getattr(torch, model.dtype), getattr(torch, model.kv_dtype)
    heads, rank, rope = model.num_q_heads, shape.rank, shape.rope
    cache = torch.empty(16, model.block_size, 1, rank + rope, dtype=kv_dtype)

    def of(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def queries(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return of(rows, heads, rank), of(rows, heads, shape.still + rope)[..., shape.still :]

    def decode(rows: int, *, ordered: bool) -> None:
        order = ints(rows) if ordered else None
        latent_decode(*queries(rows), cache, ints(rows, WIDTH), ints(rows), 0.1, order)

    def chunk() -> None:
        latent_chunk(*queries(100), cache, ints(2, WIDTH), ints(3), ints(2), 0.1)

    def store() -> None:
        cos_sin = torch.empty(model.block_size * WIDTH, rope)
        q, latent, places = of(8, heads, shape.still + rope), of(8, rank + rope), (ints(8), ints(8))
        latent_store(q, latent, of(rank), 1e-6, cos_sin, *places, cache)

    def combines() -> None:
        for width in WIDTHS:
            parts, logs = (torch.empty(heads, width, *size) for size in ((rank,), ()))
            combine(parts, logs, of(heads, rank))

    yield chunk
    for rows in (model.max_num_seqs, 8, 2):
        yield lambda rows=rows: decode(rows, ordered=True)
        yield lambda rows=rows: decode(rows, ordered=False)
    yield combines
    yield store
