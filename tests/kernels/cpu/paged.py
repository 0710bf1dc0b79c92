"""Paged sequences for attention tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NAN = float("nan")


@dataclass
class Paged:
    """Sequences with all their queries; unowned cache positions are NaN."""

    q: list[torch.Tensor]  # per sequence [seq_len, num_q_heads, head_dim]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: list[list[int]]

    def step(self, rows: list[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
        """Returns the arguments for rows [begin, end) of each (sequence, begin, end)."""
        q = torch.cat([self.q[seq][begin:end] for seq, begin, end in rows])
        width = max(len(self.tables[seq]) for seq, _, _ in rows) + 1
        tables = torch.zeros(len(rows), width, dtype=torch.int32)
        for i, (seq, _, _) in enumerate(rows):
            tables[i, : len(self.tables[seq])] = torch.tensor(self.tables[seq])
        counts = torch.tensor([0] + [end - begin for _, begin, end in rows])
        lens = torch.tensor([end for _, _, end in rows])
        return q, self.k_cache, self.v_cache, tables, counts.cumsum(0).int(), lens.int()


def paged(
    seq_lens: list[int], q_heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> Paged:
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    ids = (torch.randperm(sum(counts) + 3) + 1).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    caches = [torch.full((sum(counts) + 5, block_size, kv_heads, head_dim), NAN, dtype=dtype) for _ in range(2)]
    for table, seq_len in zip(tables, seq_lens, strict=True):
        for cache in caches:
            places = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(seq_len)])
            cache.view(-1, kv_heads, head_dim)[places] = torch.randn(seq_len, kv_heads, head_dim).to(dtype)
    q = [(2 * torch.randn(seq_len, q_heads, head_dim)).to(dtype) for seq_len in seq_lens]
    return Paged(q, *caches, tables)


def exact(
    case: Paged,
    rows: list[tuple[int, int, int]],
    scale: float,
    window: int,
    *,
    chunked: bool = False,
    seen_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention in float64."""
    _, kv_heads, head_dim = case.k_cache.shape[1:]
    device = case.k_cache.device
    out = []
    for seq, begin, end in rows:
        blocks = torch.tensor(case.tables[seq], device=device)
        k, v = (c[blocks].view(-1, kv_heads, head_dim)[:end].double() for c in (case.k_cache, case.v_cache))
        q = case.q[seq][begin:end].double()
        k, v = (t.repeat_interleave(q.size(1) // kv_heads, 1) for t in (k, v))
        row, key = torch.arange(begin, end, device=device).unsqueeze(1), torch.arange(end, device=device)
        first = row // window * window if chunked else row - window + 1 if window else 0
        last = row
        if seen_ends is not None:
            last, seen_ends = torch.maximum(row, seen_ends[: end - begin, None] - 1), seen_ends[end - begin :]
        seen = (key <= last) & (key >= first)
        scores = torch.einsum("rhd,khd->hrk", q, k) * scale
        out.append(torch.einsum("hrk,khd->rhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(out)


def picture_ends(rows: list[tuple[int, int, int]], pictures: dict[int, list[tuple[int, int]]]) -> torch.Tensor:
    """Returns the positions after the last one that rows see, int32 [num_tokens]; 0 outside of pictures. `pictures`:
    first and last position + 1 of each, by sequence."""
    ends = []
    for seq, begin, end in rows:
        of_row = torch.zeros(end, dtype=torch.int32)
        for first, last in pictures.get(seq, []):
            of_row[first:last] = last
        ends.append(of_row[begin:])
    return torch.cat(ends)


def random_tree(num_nodes: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Returns masks of a row and the tree nodes after it, int64 [1 + num_nodes], and the rows visible to each."""
    paths = [[0]]
    for node in range(1, num_nodes + 1):
        paths.append([*paths[int(torch.randint(node, ()))], node])
    masks = [sum(1 << node - row for row in path) - (1 << node + 1) for node, path in enumerate(paths)]
    return torch.tensor(masks), paths


def exact_path(case: Paged, seq: int, first: int, path: list[int], scale: float) -> torch.Tensor:
    """Computes the last row of `path` in float64; rows are counted from position `first` on."""
    _, kv_heads, head_dim = case.k_cache.shape[1:]
    places = torch.tensor([*range(first), *(first + row for row in path)])
    blocks = torch.tensor(case.tables[seq])
    k, v = (c[blocks].view(-1, kv_heads, head_dim)[places].double() for c in (case.k_cache, case.v_cache))
    q = case.q[seq][first + path[-1]].double()
    k, v = (t.repeat_interleave(q.size(0) // kv_heads, 1) for t in (k, v))
    return torch.einsum("hk,khd->hd", (torch.einsum("hd,khd->hk", q, k) * scale).softmax(-1), v)
