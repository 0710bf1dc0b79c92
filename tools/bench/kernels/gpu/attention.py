"""Attention over blocks in random order, 8 KV heads of 128 bfloat16 elements: decodes, chunks, drafts, shared
prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire.kernels.triton.attention.chunk_attention import chunk_attention
from quire.kernels.triton.attention.decode_attention import decode_attention
from quire.kernels.triton.attention.shared_prefix import SharedPrefixes, rows_per_tile, shared_prefix_attention
from tools.bench.kernels.gpu.timing import BF16_FLOP_PER_US, READ_BYTES_PER_US, copies_beyond_cache, graph_us
from tools.bench.kernels.timing import BenchRow

KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 64
SCALE = HEAD_DIM**-0.5
BYTES_PER_POSITION = 2 * KV_HEADS * HEAD_DIM * 2
Q_HEADS = (16, 32)

DECODES = [(1, 512), (1, 2048), (1, 8192), (8, 2048), (16, 2048), (32, 2048), (64, 2048), (256, 512), (256, 2048)]
RAGGED = [(32, 8192), (64, 8192), (256, 4096)]  # lengths uniform in 16 to this
CHUNKS = {
    "1 x 4096": ([4096], [4096]),
    "4 x 4096": ([4096] * 4, [4096] * 4),
    "16 x 1024": ([1024] * 16, [1024] * 16),
    "2048 behind 6144": ([2048], [8192]),
    "256 rows of 1024 and a chunk of 512": ([1] * 256 + [512], [1024] * 256 + [512]),
}

DRAFTS = [(1, 9, 8192), (16, 9, 2048), (64, 9, 2048)]  # sequences, rows of each, length


@dataclass(frozen=True)
class Pool:
    """KV memory, and block tables in random order."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, positions: int) -> Pool:
        size = (positions // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        return cls(*(torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)))

    def tables(self, seqs: int, longest: int, sets: int) -> list[torch.Tensor]:
        width = -(-longest // BLOCK_SIZE)
        ids = torch.cat([torch.randperm(self.k.size(0)) for _ in range(-(-sets * seqs * width // self.k.size(0)))])
        return list(ids[: sets * seqs * width].view(sets, seqs, width).int().cuda())


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def queries(rows: int, q_heads: int) -> torch.Tensor:
    return torch.randn(rows, q_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")


def bench() -> Iterator[BenchRow]:
    """Yields rows for decodes, ragged decodes, chunks, drafts and shared prefixes, per number of query heads."""
    pool = Pool.of(1 << 20)
    for q_heads in Q_HEADS:
        for rows, length in DECODES:
            yield decode(pool, q_heads, [length] * rows, f"{rows} x {length}")
        for rows, longest in RAGGED:
            lengths = torch.randint(16, longest, (rows,), generator=torch.Generator().manual_seed(3)).tolist()
            yield decode(pool, q_heads, lengths, f"{rows} x 16..{longest}")
        for name, (counts, lengths) in CHUNKS.items():
            yield chunks(pool, q_heads, counts, lengths, name)
        for seqs, rows, length in DRAFTS:
            yield drafts(pool, q_heads, seqs, rows, length)
        yield shared(pool, q_heads)


def decode(pool: Pool, q_heads: int, lengths: list[int], name: str) -> BenchRow:
    """Measures one query row for each length; copies of the block table read different blocks, so that KV comes from
    memory."""
    num_bytes = sum(lengths) * BYTES_PER_POSITION
    q, lens = queries(len(lengths), q_heads), ints(lengths)
    order = lens.argsort(descending=True).int()
    tables = pool.tables(len(lengths), max(lengths), copies_beyond_cache(num_bytes, most=16))
    us = graph_us([lambda t=t: decode_attention(q, pool.k, pool.v, t, lens, SCALE, 0, order) for t in tables])
    times = {"triton": us, "bytes at 4.55 TB/s": num_bytes / READ_BYTES_PER_US}
    return BenchRow("attention", f"decode {q_heads} heads {name}", times, num_bytes / us / 1e3, "GB/s")


def chunks(pool: Pool, q_heads: int, counts: list[int], lengths: list[int], name: str) -> BenchRow:
    """Measures prefill chunks: `counts` new rows of sequences that have `lengths` positions in total."""
    flop = sum(4 * HEAD_DIM * q_heads * (n * (m - n) + n * (n + 1) / 2) for n, m in zip(counts, lengths, strict=True))
    q, lens, start = queries(sum(counts), q_heads), ints(lengths), ints([0, *counts]).cumsum(0).int()
    table = pool.tables(len(counts), max(lengths), 1)[0]
    us = graph_us([lambda: chunk_attention(q, pool.k, pool.v, table, start, lens, SCALE, 0)] * 3)
    times = {"triton": us, "FLOP at 787 T/s": flop / BF16_FLOP_PER_US}
    return BenchRow("attention", f"chunk {q_heads} heads {name}", times, flop / us / 1e6, "TFLOP/s")


def drafts(pool: Pool, q_heads: int, seqs: int, rows: int, length: int) -> BenchRow:
    """Measures the verification of `rows` draft rows per sequence, as chains and as trees in which each row has a
    sibling."""
    q, lens, start = queries(seqs * rows, q_heads), ints([length] * seqs), ints([0, *[rows] * seqs]).cumsum(0).int()
    table = pool.tables(seqs, length, 1)[0]
    siblings = [
        -1,
        *(1 | -1 << row for row in range(1, rows)),
    ]  # bit mask: itself, and everything before the previous row
    masks = torch.tensor(siblings * seqs, device="cuda")
    rest = table, start, lens, SCALE, 0, None, 0.0, False
    times = {
        name: graph_us([lambda m=mask: chunk_attention(q, pool.k, pool.v, *rest, m)] * 3)
        for name, mask in (("trees", masks), ("chains", None))
    }
    return BenchRow("attention", f"drafts {q_heads} heads {seqs} x {rows} of {length}", times, 0, "")


def shared(pool: Pool, q_heads: int, rows: int = 256, prefix: int = 2048, own: int = 96) -> BenchRow:
    """Measures a decode whose rows share a prefix, read once per tile, against attention that reads it for each row."""
    q, lens = queries(rows, q_heads), ints([prefix + own] * rows)
    table = pool.tables(rows, prefix + own, 1)[0]
    table[:, : prefix // BLOCK_SIZE] = table[0, : prefix // BLOCK_SIZE]
    per_tile = rows_per_tile(q_heads, KV_HEADS)
    tiles = rows // per_tile
    members = torch.arange(rows, dtype=torch.int32, device="cuda").view(tiles, per_tile)
    prefixes = SharedPrefixes(members, ints([0] * tiles), ints([prefix] * tiles), ints([prefix] * rows))
    together = lambda: shared_prefix_attention(q, pool.k, pool.v, table, lens, prefixes, SCALE)  # noqa: E731
    apart = lambda: decode_attention(q, pool.k, pool.v, table, lens, SCALE, 0)  # noqa: E731
    times = {"shared": graph_us([together] * 5), "each row": graph_us([apart] * 5)}
    return BenchRow("attention", f"decode {q_heads} heads {rows} x ({prefix} shared + {own})", times, 0, "")
