"""Sequences of compressed vectors in blocks, for latent attention tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NAN = float("nan")
Rows = list[tuple[int, int, int]]  # rows [begin, end) of each (sequence, begin, end)


@dataclass
class Latents:
    """Sequences whose unowned cache positions are NaN; the second part of queries is not contiguous in memory."""

    q: list[torch.Tensor]  # per sequence [seq_len, num_heads, other + rope + rank]
    cache: torch.Tensor
    tables: list[list[int]]
    rank: int
    rope: int

    def step(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """Returns the arguments of latent_attention except scale."""
        q = torch.cat([self.q[seq][begin:end] for seq, begin, end in rows])
        width = max(len(self.tables[seq]) for seq, _, _ in rows) + 1
        tables = torch.zeros(len(rows), width, dtype=torch.int32)
        for i, (seq, _, _) in enumerate(rows):
            tables[i, : len(self.tables[seq])] = torch.tensor(self.tables[seq])
        counts = torch.tensor([0] + [end - begin for _, begin, end in rows])
        lens = torch.tensor([end for _, _, end in rows])
        other = q.size(2) - self.rank - self.rope
        _, rotated, compressed = q.split((other, self.rope, self.rank), dim=2)
        return compressed.contiguous(), rotated, self.cache, tables, counts.cumsum(0).int(), lens.int()

    def exact(self, rows: Rows, scale: float) -> torch.Tensor:
        """Computes latent attention in float64."""
        out = []
        for seq, begin, end in rows:
            keys = self.cache[self.tables[seq]].view(-1, self.rank + self.rope)[:end].double()
            other = self.q[seq].size(2) - self.rank - self.rope
            _, rotated, compressed = self.q[seq][begin:end].double().split((other, self.rope, self.rank), dim=2)
            scores = torch.einsum("rhd,kd->hrk", torch.cat((compressed, rotated), dim=2), keys) * scale
            seen = torch.arange(end) <= torch.arange(begin, end).unsqueeze(1)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out.append(torch.einsum("hrk,kd->rhd", weights, keys[:, : self.rank]))
        return torch.cat(out)


def latents(
    seq_lens: list[int], num_heads: int, rank: int, rope: int, block_size: int, dtype: torch.dtype, *, other: int = 3
) -> Latents:
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    ids = (torch.randperm(sum(counts) + 3) + 1).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    cache = torch.full((sum(counts) + 5, block_size, 1, rank + rope), NAN, dtype=dtype)
    for table, seq_len in zip(tables, seq_lens, strict=True):
        places = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(seq_len)])
        cache.view(-1, rank + rope)[places] = torch.randn(seq_len, rank + rope).to(dtype)
    q = [(2 * torch.randn(seq_len, num_heads, other + rope + rank)).to(dtype) for seq_len in seq_lens]
    return Latents(q, cache, tables, rank, rope)


def stored(rows: int, num_heads: int, still: int, rank: int, rope: int, dtype: torch.dtype) -> dict[str, object]:
    """Returns arguments of latent_store."""
    angles = torch.arange(200).unsqueeze(1) * 10000 ** (-torch.arange(rope // 2) / (rope // 2))
    return {
        "q": torch.randn(rows, num_heads, still + rope).to(dtype),
        "latent": torch.randn(rows, rank + rope).to(dtype),
        "weight": torch.rand(rank).to(dtype) + 0.5,
        "eps": 1e-6,
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1),
        "positions": torch.randint(0, 200, (rows,), dtype=torch.int32),
        "slot_mapping": 7 + torch.randperm(9 * 7 - 7)[:rows].int(),
        "cache": torch.randn(9, 7, 1, rank + rope).to(dtype),
    }
