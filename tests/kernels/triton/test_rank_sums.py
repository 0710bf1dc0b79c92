"""One-shot all-reduce: the other ranks' words are written in advance, so that ranks can run one after the other."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.reference.rank_sums import sum_of_ranks as reference
from quire.kernels.triton.normed_sums import normed_sum_of_ranks, normed_sum_takes
from quire.kernels.triton.rank_sums import BLOCK, RankMailbox, inbox_words, sum_of_ranks, sum_of_ranks_takes

SIXTEEN = torch.float16  # the interpreter truncates bfloat16
NUM_BLOCKS = 3


class Host:
    """Memory of all ranks in one process."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        shape = (2, num_ranks, NUM_BLOCKS * BLOCK)
        assert inbox_words(num_ranks, NUM_BLOCKS) == torch.Size(shape).numel()
        self.inboxes = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(num_ranks)]
        addresses = torch.tensor([inbox.data_ptr() for inbox in self.inboxes], device=device)
        self.mailboxes = [
            RankMailbox(rank, NUM_BLOCKS, addresses, torch.zeros(NUM_BLOCKS, dtype=torch.int32, device=device))
            for rank in range(num_ranks)
        ]

    def calls(self, before: int) -> None:
        for mailbox in self.mailboxes:
            mailbox.calls.fill_(before)

    def deliver(self, to: int, parts: list[torch.Tensor], call: int, block: int | None = None) -> None:
        """Writes the other ranks' words of all blocks, or of one."""
        for rank, part in enumerate(parts):
            if rank != to:
                words = part.view(-1).view(torch.int32).long() & 0xFFFFFFFF
                here = slice(words.numel()) if block is None else slice(block * BLOCK, (block + 1) * BLOCK)
                words = words[here]
                start = here.start or 0
                self.inboxes[to][call & 1, rank, start : start + words.numel()] = words | call << 32


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1030), (1, 2 * NUM_BLOCKS * BLOCK)])
@pytest.mark.parametrize("adds", [False, True])
def test_every_rank_gets_the_sum(device: torch.device, num_ranks: int, shape: tuple[int, int], adds: bool) -> None:
    host = Host(num_ranks, device)
    for call in (1, 2, 3):
        parts = [torch.randn(shape).to(device, SIXTEEN) for _ in range(num_ranks)]
        residual = torch.randn(shape).to(device, SIXTEEN) if adds else None
        want = reference(parts, residual.clone() if residual is not None else None)
        for rank, mailbox in enumerate(host.mailboxes):
            host.deliver(rank, parts, call)
            kept = None if residual is None else residual.clone()
            got = sum_of_ranks(parts[rank].clone(), mailbox, kept)
            assert torch.equal(got, want)
            assert kept is None or got is kept


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("shape", [(3, 2 * BLOCK), (1, 6 * BLOCK), (1, 4 * BLOCK)])
def test_rows_of_the_sum_are_normalised(device: torch.device, num_ranks: int, shape: tuple[int, int]) -> None:
    """Sums of other sizes alternate with it, each of which counts the calls of its own channels."""
    host, weight = Host(num_ranks, device), torch.randn(shape[1]).to(device, SIXTEEN)
    calls = [0] * NUM_BLOCKS
    for size in (shape, (1, 64), shape, (1, 2 * BLOCK + 2), shape):
        parts = [torch.randn(size).to(device, SIXTEEN) for _ in range(num_ranks)]
        residual = torch.randn(size).to(device, SIXTEEN)
        want = reference(parts, residual.clone())
        blocks = range(-(-parts[0].numel() // 2 // BLOCK))
        for block in blocks:
            calls[block] += 1
        for rank, mailbox in enumerate(host.mailboxes):
            for block in blocks:
                host.deliver(rank, parts, calls[block], block)
            kept = residual.clone()
            if size == shape:
                normed = normed_sum_of_ranks(parts[rank].clone(), mailbox, kept, weight, 1e-5)
                expected = torch.nn.functional.rms_norm(want.float(), shape[1:], weight.float(), 1e-5)
                torch.testing.assert_close(normed.float(), expected, rtol=2e-3, atol=1e-3)
            else:
                sum_of_ranks(parts[rank].clone(), mailbox, kept)
            assert torch.equal(kept, want)


def test_rows_sharing_a_channel_are_not_supported(device: torch.device) -> None:
    mailbox = Host(2, device).mailboxes[0]

    def takes(*shape: int, dtype: torch.dtype = SIXTEEN) -> bool:
        return normed_sum_takes(torch.zeros(shape, dtype=dtype), torch.zeros(shape[-1], dtype=SIXTEEN), mailbox)

    assert takes(2, 2 * BLOCK)
    assert not takes(2, BLOCK)
    assert not takes(NUM_BLOCKS + 1, 2 * BLOCK)
    assert not takes(2, 2 * BLOCK, dtype=torch.float32)


def test_ranks_wait_for_the_flags_of_others(device: torch.device) -> None:
    host, parts = Host(2, device), [torch.randn(1, 64).to(device, SIXTEEN) for _ in range(2)]
    host.deliver(0, parts, call=1)
    sum_of_ranks(parts[0].clone(), host.mailboxes[0])
    written = host.inboxes[1].clone()
    host.inboxes[1].zero_()
    host.deliver(1, parts, call=1)
    assert torch.equal(host.inboxes[1], written)


def test_call_numbers_wrap_around_without_zero(device: torch.device) -> None:
    host = Host(2, device)
    host.calls(before=-2)
    for call in (-1, 2, 3):
        parts = [torch.randn(1, 64).to(device, SIXTEEN) for _ in range(2)]
        host.deliver(0, parts, call)
        assert torch.equal(sum_of_ranks(parts[0].clone(), host.mailboxes[0]), reference(parts))


def test_large_or_other_tensors_are_not_supported(device: torch.device) -> None:
    mailbox = Host(2, device).mailboxes[0]
    most = mailbox.most_bytes // 2
    assert sum_of_ranks_takes(torch.zeros(most, dtype=SIXTEEN), mailbox)
    assert not sum_of_ranks_takes(torch.zeros(most + 2, dtype=SIXTEEN), mailbox)
    assert not sum_of_ranks_takes(torch.zeros(4, dtype=torch.float32), mailbox)
    assert not sum_of_ranks_takes(torch.zeros(3, dtype=SIXTEEN), mailbox)
    assert not sum_of_ranks_takes(torch.zeros(0, dtype=SIXTEEN), mailbox)
