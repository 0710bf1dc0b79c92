from __future__ import annotations

import torch

from quire.kernels.triton.step_edges import begin_step, end_step


def ints(device, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_a_step_feeds_given_or_last_tokens_and_writes_new_blocks(device):
    tables, last = torch.zeros(4, 5, dtype=torch.int32, device=device), ints(device, 10, -1, 12, 13)
    slots, given = ints(device, 2, 0, 1, 3), ints(device, -1, 7, -1, -1)
    places, block_ids = ints(device, 3, 11, 19, 19), ints(device, 40, 41, 0, 0)
    assert begin_step(slots, given, places, block_ids, last, tables).tolist() == [12, 7, 0, 13]
    assert tables.tolist() == [[0, 0, 0, 40, 0], [0] * 5, [0, 41, 0, 0, 0], [0] * 5]


def test_sampled_tokens_are_kept_by_slot(device):
    last = torch.zeros(300, dtype=torch.int32, device=device)
    slots = torch.randperm(300)[:200].int().to(device)
    tokens = torch.randint(-1, 1000, (200,), dtype=torch.int32).to(device)
    end_step(slots, tokens, last)
    assert torch.equal(last[slots.long()], tokens)
    assert int(last.count_nonzero()) == int(tokens.count_nonzero())
