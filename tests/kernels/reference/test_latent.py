"""Latent attention in absorbed form against attention over each head's keys and values in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.reference import head_linear, latent_attention, latent_store, prepare_head_linear
from quire.kernels.reference.attention.decode_parts import GATHERED_BYTES
from tests.kernels.latents import latents, stored

MAX_ERROR = 5e-6  # float32 against double, values of magnitude 1


def test_absorbed_projections_equal_separate_keys_and_values() -> None:
    """A cache of latent vectors gives the same result as a cache of every head's keys and values."""
    torch.manual_seed(0)
    heads, still, value, rank, rope = 6, 10, 14, 24, 8
    case = latents([9, 30, 17], heads, rank, rope, 4, torch.float32)
    makes_keys, makes_values = (torch.randn(heads, size, rank) * rank**-0.5 for size in (still, value))
    rows = [(0, 0, 9), (1, 29, 30), (2, 3, 17)]
    _, rotated, cache, *where = case.step(rows)
    q = torch.randn(rotated.size(0), heads, still)
    absorbed = head_linear(q, prepare_head_linear(makes_keys.transpose(1, 2)))
    found = latent_attention(absorbed, rotated, cache, *where, 0.2)
    got = head_linear(found, prepare_head_linear(makes_values))
    first = 0
    for seq, begin, end in rows:
        count = end - begin
        vectors = cache[case.tables[seq]].view(-1, rank + rope)[:end].double()
        keys = torch.einsum("hdr,kr->khd", makes_keys.double(), vectors[:, :rank])
        values = torch.einsum("hdr,kr->khd", makes_values.double(), vectors[:, :rank])
        scores = torch.einsum("qhd,khd->hqk", q[first : first + count].double(), keys)
        scores += torch.einsum("qhd,kd->hqk", rotated[first : first + count].double(), vectors[:, rank:])
        seen = torch.arange(end) <= torch.arange(begin, end).unsqueeze(1)
        weights = (scores * 0.2).masked_fill(~seen, -torch.inf).softmax(-1)
        want = torch.einsum("hqk,khd->qhd", weights, values)
        assert (got[first : first + count] - want).abs().max() < MAX_ERROR
        first += count


@pytest.mark.parametrize("places", [1, 80, 1000])
@pytest.mark.parametrize("rows", [[(0, 0, 1), (1, 32, 33), (2, 15, 16)], [(1, 0, 33)], [(0, 0, 1), (1, 20, 33)]])
def test_decodes_and_chunks(rows: list[tuple[int, int, int]], places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes decode steps that are too large to gather at once."""
    monkeypatch.setitem(GATHERED_BYTES, "cpu", places * (12 + 4) * 4)
    torch.manual_seed(1)
    case = latents([1, 33, 16], 5, 12, 4, 4, torch.float32)
    found = latent_attention(*case.step(rows), 0.3)
    assert (found - case.exact(rows, 0.3)).abs().max() < MAX_ERROR


def test_vectors_are_normed_and_rotated_as_they_are_stored() -> None:
    torch.manual_seed(2)
    given: dict[str, Any] = stored(9, 3, 6, 12, 4, torch.float32)
    before, cache_before = given["q"].clone(), given["cache"].clone()
    latent_store(**given)
    flat = given["cache"].view(-1, 16)
    for token in range(9):
        compressed, turned = given["latent"][token].double().split((12, 4))
        cos, sin = given["cos_sin"][given["positions"][token]].double().chunk(2)
        angle = torch.complex(cos, sin)
        normed = compressed / (compressed.square().mean() + 1e-6).sqrt() * given["weight"].double()
        want = torch.cat((normed, _turn(turned, angle)))
        assert (flat[given["slot_mapping"][token]] - want).abs().max() < MAX_ERROR
        for head in range(3):
            still, rest = before[token, head].split((6, 4))
            assert torch.equal(given["q"][token, head, :6], still)
            assert (given["q"][token, head, 6:] - _turn(rest.double(), angle)).abs().max() < MAX_ERROR
    untouched = torch.ones(len(flat), dtype=torch.bool)
    untouched[given["slot_mapping"].long()] = False
    assert torch.equal(flat[untouched], cache_before.view(-1, 16)[untouched])


def _turn(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    turned = torch.complex(*x.chunk(2)) * angle
    return torch.cat((turned.real, turned.imag))
