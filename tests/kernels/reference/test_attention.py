"""paged_attention and the preparation of its inputs against textbook formulas in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from quire.kernels.reference import paged_attention, qk_norm_rope_store
from quire.kernels.reference.attention.decode_parts import GATHERED_BYTES, decode_parts

MAX_ERROR = 2e-6  # float32 against double, values of magnitude 1


def textbook(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, *, chunked: bool = False
) -> torch.Tensor:
    """Computes attention of one sequence by loops in double precision: q [rows, q_heads, dim], k and v [length,
    kv_heads, dim]."""
    rows, q_heads, _dim = q.shape
    group = q_heads // k.size(1)
    out = torch.zeros_like(q, dtype=torch.float64)
    for row in range(rows):
        position = k.size(0) - rows + row
        first = max(0, position - window + 1) if window else 0
        if chunked:
            first = position - position % window
        for head in range(q_heads):
            keys, values = (t[first : position + 1, head // group].double() for t in (k, v))
            out[row, head] = (keys @ q[row, head].double() * scale).softmax(0) @ values
    return out


def paged(
    lengths: list[int], rows: list[int], block_size: int, heads: tuple[int, int], dim: int
) -> tuple[dict[str, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Scatters sequences over blocks; unowned positions are NaN."""
    generator = torch.Generator().manual_seed(3)
    q_heads, kv_heads = heads
    needed = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
    caches = [torch.full((sum(needed) + 1, block_size, kv_heads, dim), math.nan) for _ in range(2)]
    tables = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
    sequences = []
    for i, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[i, :count] = torch.tensor(blocks)
        kv = tuple(torch.randn(length, kv_heads, dim, generator=generator) for _ in range(2))
        for cache, values in zip(caches, kv, strict=True):
            for position in range(length):
                cache[blocks[position // block_size], position % block_size] = values[position]
        sequences.append(kv)
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    arguments = {
        "q": torch.randn(sum(rows), q_heads, dim, generator=generator),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_tables": tables,
        "query_start": starts,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
    }
    return arguments, sequences


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 4)])
@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([1], [1]),
        ([7, 1, 16, 33], [1, 1, 1, 1]),
        ([9], [9]),
        ([5, 20, 17, 8], [5, 1, 6, 8]),
    ],
)
def test_attention(lengths: list[int], rows: list[int], heads: tuple[int, int], block_size: int, window: int) -> None:
    arguments, sequences = paged(lengths, rows, block_size, heads, dim=8)
    found = paged_attention(**arguments, scale=0.3, sliding_window=window)
    starts = arguments["query_start"].tolist()
    for i, (k, v) in enumerate(sequences):
        part = slice(starts[i], starts[i + 1])
        expected = textbook(arguments["q"][part], k, v, 0.3, window)
        assert (found[part] - expected).abs().max() < MAX_ERROR


@pytest.mark.parametrize("chunk", [1, 5, 8, 40])
@pytest.mark.parametrize(("lengths", "rows"), [([7, 1, 16, 17], [1, 1, 1, 1]), ([5, 20, 17], [5, 1, 11])])
def test_rows_see_their_own_chunk_only(lengths: list[int], rows: list[int], chunk: int) -> None:
    arguments, sequences = paged(lengths, rows, 4, (6, 2), dim=8)
    found = paged_attention(**arguments, scale=0.3, sliding_window=chunk, chunked=True)
    starts = arguments["query_start"].tolist()
    for i, (k, v) in enumerate(sequences):
        part = slice(starts[i], starts[i + 1])
        expected = textbook(arguments["q"][part], k, v, 0.3, chunk, chunked=True)
        assert (found[part] - expected).abs().max() < MAX_ERROR


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "chunked"), [(0, False), (6, False), (6, True)])
@pytest.mark.parametrize("places", [1, 34, 40, 70, 1000])
def test_decode_in_several_pieces(
    places: int, window: int, chunked: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is too large to gather at once is sorted by length, and its rows are returned in their order."""
    arguments, sequences = paged([7, 1, 16, 33, 2, 33, 9], [1] * 7, 4, (6, 2), 8)
    rest = {"scale": 0.3, "sliding_window": window, "chunked": chunked, "sinks": torch.randn(6) if sinks else None}
    alone = [paged_attention(**{**arguments, **of_row(arguments, row)}, **rest)[0] for row in range(len(sequences))]
    monkeypatch.setitem(GATHERED_BYTES, "cpu", places * 2 * 8 * 4)
    torch.testing.assert_close(paged_attention(**arguments, **rest), torch.stack(alone))


def of_row(arguments: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    return {name: arguments[name][row : row + 1] for name in ("q", "block_tables", "seq_lens")}


@pytest.mark.parametrize("places", [1, 20, 1000])
def test_rows_of_trees_in_several_pieces(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, _ = paged([7, 12, 3], [1] * 3, 4, (4, 2), 8)
    arguments["tree_mask"] = torch.tensor([0b1, 0b101, -1])
    whole = paged_attention(**arguments, scale=0.3, sliding_window=0)
    for row in range(3):
        seen = int(arguments["seq_lens"][row])
        wanted = [p for p in range(seen) if int(arguments["tree_mask"][row]) >> (seen - 1 - p) & 1]
        keys, values = ((x.flatten(0, 1)[places_of(arguments, row)][wanted]) for x in caches(arguments))
        expected = textbook(arguments["q"][row : row + 1], keys, values, 0.3, 0)
        assert (whole[row] - expected[0]).abs().max() < MAX_ERROR
    monkeypatch.setitem(GATHERED_BYTES, "cpu", places * 2 * 8 * 4)
    torch.testing.assert_close(paged_attention(**arguments, scale=0.3, sliding_window=0), whole)


def caches(arguments: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return arguments["k_cache"], arguments["v_cache"]


def places_of(arguments: dict[str, torch.Tensor], row: int) -> list[int]:
    """Returns the cache positions of a sequence, in order."""
    blocks, block_size = arguments["block_tables"][row].tolist(), arguments["k_cache"].size(1)
    return [blocks[p // block_size] * block_size + p % block_size for p in range(int(arguments["seq_lens"][row]))]


@pytest.mark.parametrize("window", [0, 5])
def test_without_lengths_on_the_host(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is not synchronized, rows are padded to the width of the block tables."""
    arguments, _ = paged([7, 1, 16, 33, 2], [1] * 5, 4, (6, 2), 8)
    expected = paged_attention(**arguments, scale=0.3, sliding_window=window)
    tables, lens = arguments["block_tables"], arguments["seq_lens"]
    monkeypatch.delitem(GATHERED_BYTES, "cpu")
    parts = decode_parts(tables, lens, arguments["k_cache"], torch.float32, window)
    assert [part.seen.size(3) for part in parts.parts] == [window or tables.size(1) * 4]
    found = paged_attention(**arguments, scale=0.3, sliding_window=window, parts=parts)
    torch.testing.assert_close(found, expected)


def prepared(num_tokens: int, dim: int, norms: bool) -> dict[str, object]:
    generator = torch.Generator().manual_seed(4)
    angles = torch.rand(50, dim // 2, generator=generator) * 6
    weights = [torch.rand(dim, generator=generator) + 0.5 for _ in range(2)] if norms else [None, None]
    return {
        "qkv": torch.randn(num_tokens, (4 + 2 * 2) * dim, generator=generator),
        "q_weight": weights[0],
        "k_weight": weights[1],
        "eps": 1e-5,
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1),
        "positions": torch.randint(50, (num_tokens,), generator=generator, dtype=torch.int32),
        "slot_mapping": (torch.randperm(5 * 4, generator=generator)[:num_tokens] + 4).int(),
        "k_cache": torch.zeros(6, 4, 2, dim),
        "v_cache": torch.zeros(6, 4, 2, dim),
        "num_q_heads": 4,
        "num_kv_heads": 2,
    }


@pytest.mark.parametrize("norms", [False, True])
def test_queries_and_keys_are_normed_rotated_and_stored(norms: bool) -> None:
    arguments = prepared(9, 8, norms)
    q = qk_norm_rope_store(**arguments)  # type: ignore[arg-type]
    heads = arguments["qkv"].view(9, 8, 8).double()  # type: ignore[attr-defined]
    for token in range(9):
        position, place = int(arguments["positions"][token]), int(arguments["slot_mapping"][token])  # type: ignore[index]
        for head in range(6):
            weight = arguments["q_weight" if head < 4 else "k_weight"]
            expected = rotated(normed(heads[token, head], weight), arguments["cos_sin"][position])  # type: ignore[index, arg-type]
            stored = arguments["k_cache"].view(-1, 2, 8)[place, head - 4] if head >= 4 else q[token, head]  # type: ignore[attr-defined]
            assert (stored - expected).abs().max() < MAX_ERROR
        values = arguments["v_cache"].view(-1, 2, 8)[place]  # type: ignore[attr-defined]
        assert torch.equal(values.double(), heads[token, 6:])


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else x / (x.square().mean() + 1e-5).sqrt() * weight.double()


def rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotates elements i and i + half as one complex number by e^(i angle)."""
    half = len(x) // 2
    turned = torch.complex(x[:half], x[half:]) * torch.complex(cos_sin[:half].double(), cos_sin[half:].double())
    return torch.cat((turned.real, turned.imag))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("lengths", "rows"), [([7, 1, 16], [1, 1, 1]), ([5, 20, 17], [5, 1, 6])])
def test_sinks_take_their_share(lengths: list[int], rows: list[int], window: int) -> None:
    """A sink acts as one more key of that score whose value is zero."""
    arguments, sequences = paged(lengths, rows, 4, (6, 2), dim=8)
    sinks = torch.linspace(-2, 3, 6)
    plain = paged_attention(**arguments, scale=0.3, sliding_window=window)
    found = paged_attention(**arguments, scale=0.3, sliding_window=window, sinks=sinks)
    starts = arguments["query_start"].tolist()
    for i, (k, _) in enumerate(sequences):
        for row in range(rows[i]):
            last = k.size(0) - rows[i] + row + 1
            keys = k[max(0, last - window) if window else 0 : last].double()
            q = arguments["q"][starts[i] + row].double()
            for head in range(6):
                total = (keys[:, head // 3] @ q[head] * 0.3).exp().sum()
                want = plain[starts[i] + row, head] * total / (total + sinks[head].exp())
                assert (found[starts[i] + row, head] - want).abs().max() < MAX_ERROR


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("lengths", "rows"), [([7, 1, 16], [1, 1, 1]), ([5, 20, 17], [5, 1, 6])])
def test_scores_are_capped(lengths: list[int], rows: list[int], window: int) -> None:
    arguments, sequences = paged(lengths, rows, 4, (6, 2), dim=8)
    found = paged_attention(**arguments, scale=0.9, sliding_window=window, softcap=1.5)
    starts = arguments["query_start"].tolist()
    for i, (k, v) in enumerate(sequences):
        for row in range(rows[i]):
            last = k.size(0) - rows[i] + row + 1
            seen = slice(max(0, last - window) if window else 0, last)
            q = arguments["q"][starts[i] + row].double()
            for head in range(6):
                scores = k[seen, head // 3].double() @ q[head] * 0.9
                want = (1.5 * (scores / 1.5).tanh()).softmax(0) @ v[seen, head // 3].double()
                assert (found[starts[i] + row, head] - want).abs().max() < MAX_ERROR
