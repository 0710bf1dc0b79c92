"""Latent attention over blocks in random order, vectors of 512 + 64 bfloat16 elements: decodes, chunks, tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quire.kernels import reference
from quire.kernels.triton.attention.latent_blocks import LatentTile, latent_chunk, latent_decode
from tools.bench.kernels.gpu.timing import BF16_FLOP_PER_US, READ_BYTES_PER_US, copies_beyond_cache, graph_us
from tools.bench.kernels.timing import BenchRow

RANK, ROPE, STILL, BLOCK_SIZE = 512, 64, 128, 64
SCALE = 192**-0.5
BYTES_PER_POSITION = (RANK + ROPE) * 2
HEADS = (16, 128)  # V2-Lite, and V3 on eight GPUs; V3 on one

DECODES = [(1, 512), (1, 2048), (1, 8192), (8, 2048), (32, 2048), (64, 8192), (256, 512), (256, 2048)]
CHUNKS = {
    "1 x 512": ([512], [512]),
    "1 x 4096": ([4096], [4096]),
    "2048 behind 6144": ([2048], [8192]),
    "256 rows of 1024 and a chunk of 512": ([1] * 256 + [512], [1024] * 256 + [512]),
}
TILES = [LatentTile(*sizes) for sizes in ((16, 4, 4), (32, 2, 4), (32, 4, 4), (32, 3, 8), (64, 2, 4), (64, 2, 8))]


def bench() -> Iterator[BenchRow]:
    """Yields rows for decodes, chunks and products with stacked weights, per number of heads."""
    cache = _cache(1 << 20)
    for heads in HEADS:
        for rows, length in DECODES:
            yield decode(cache, heads, rows, length, [None])
        for name in CHUNKS:
            yield chunk(cache, heads, name, [None])
        for rows in (1, 32, 256, 4096):
            yield multiply(heads, rows)


def tiles() -> Iterator[BenchRow]:
    """Yields the same attention with every tile shape of TILES, to choose those in use."""
    cache = _cache(1 << 20)
    for heads in HEADS:
        for rows, length in ((1, 8192), (32, 2048), (256, 2048)):
            yield decode(cache, heads, rows, length, TILES)
        for name in CHUNKS:
            yield chunk(cache, heads, name, TILES)


def _cache(positions: int) -> torch.Tensor:
    size = (positions // BLOCK_SIZE, BLOCK_SIZE, 1, RANK + ROPE)
    return torch.randn(size, dtype=torch.bfloat16, device="cuda")


def _tables(cache: torch.Tensor, seqs: int, longest: int, sets: int) -> list[torch.Tensor]:
    width, num_blocks = -(-longest // BLOCK_SIZE), cache.size(0)
    ids = torch.cat([torch.randperm(num_blocks) for _ in range(-(-sets * seqs * width // num_blocks))])
    return list(ids[: sets * seqs * width].view(sets, seqs, width).int().cuda())


def _queries(rows: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(rows, heads, RANK, dtype=torch.bfloat16, device="cuda")
    return q, torch.randn(rows, heads, STILL + ROPE, dtype=torch.bfloat16, device="cuda")[..., STILL:]


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def decode(cache: torch.Tensor, heads: int, rows: int, length: int, chosen: Sequence[LatentTile | None]) -> BenchRow:
    """Measures one query row per sequence with each tile of `chosen` (None: the one in use), next to the bounds of
    bandwidth and FLOP."""
    num_bytes, pairs = rows * length * BYTES_PER_POSITION, rows * length * heads
    q, rotated, lens = *_queries(rows, heads), _ints([length] * rows)
    tables = _tables(cache, rows, length, copies_beyond_cache(num_bytes, most=16))
    times = {}
    for tile in chosen:
        works = [lambda t=t, c=tile: latent_decode(q, rotated, cache, t, lens, SCALE, tile=c) for t in tables]
        times[_name(tile)] = _us(works)
    times["bytes at 4.55 TB/s"] = num_bytes / READ_BYTES_PER_US
    times["FLOP at 787 T/s"] = 2 * pairs * (2 * RANK + ROPE) / BF16_FLOP_PER_US
    return BenchRow("latent", f"decode {heads} heads {rows} x {length}", times, num_bytes / _first(times) / 1e3, "GB/s")


def chunk(cache: torch.Tensor, heads: int, name: str, chosen: Sequence[LatentTile | None]) -> BenchRow:
    """Measures the prefill chunks of CHUNKS[name] with each tile of `chosen` (None: the one in use)."""
    counts, lengths = CHUNKS[name]
    pairs = heads * sum(n * (m - n) + n * (n + 1) / 2 for n, m in zip(counts, lengths, strict=True))
    q, rotated = _queries(sum(counts), heads)
    lens, start = _ints(lengths), _ints([0, *counts]).cumsum(0).int()
    (table,) = _tables(cache, len(counts), max(lengths), 1)
    times = {}
    for tile in chosen:
        works = [lambda c=tile: latent_chunk(q, rotated, cache, table, start, lens, SCALE, tile=c)] * 3
        times[_name(tile)] = _us(works)
    flop = 2 * pairs * (2 * RANK + ROPE)
    times["FLOP at 787 T/s"] = flop / BF16_FLOP_PER_US
    return BenchRow("latent", f"chunk {heads} heads {name}", times, flop / _first(times) / 1e6, "TFLOP/s")


def multiply(heads: int, rows: int) -> BenchRow:
    """Measures the per-head product that computes queries for compressed vectors, by cuBLAS, for `rows` rows."""
    weight = torch.randn(heads, RANK, STILL, dtype=torch.bfloat16, device="cuda")
    packed = reference.prepare_head_linear(weight)
    x = torch.randn(rows, heads, STILL + ROPE, dtype=torch.bfloat16, device="cuda")[..., :STILL]
    us = graph_us([lambda: reference.head_linear(x, packed)] * 5)
    times = {"cuBLAS": us, "bytes at 4.55 TB/s": (weight.nbytes + rows * heads * 1280) / READ_BYTES_PER_US}
    return BenchRow("latent", f"heads' products, {heads} heads {rows} rows", times, 0, "")


def _name(tile: LatentTile | None) -> str:
    return "triton" if tile is None else f"{tile.keys} keys, {tile.stages} stages, {tile.warps} warps"


def _first(times: dict[str, float]) -> float:
    return next(iter(times.values()))


def _us(works: list) -> float:
    """Returns the time; infinite for a tile that does not fit this GPU."""
    try:
        return graph_us(works)
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return float("inf")
