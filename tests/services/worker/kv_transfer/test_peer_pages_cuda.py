"""A process copies pages out of another process's GPU: pytest -m gpu."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.kv_memory import BlockShape
from quire.services.worker.kv_transfer.pages import Pages
from quire.services.worker.kv_transfer.peer_pages import PeerBlocks

pytestmark = pytest.mark.gpu

SHAPE = BlockShape(num_layers=3, block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
BLOCKS = np.array([3, 4, 5, 19, 1], dtype=np.uint32)
TARGETS = np.array([7, 8, 9, 10, 2], dtype=np.uint32)


def pages(num_blocks: int, device: torch.device) -> tuple[list[torch.Tensor], Pages]:
    caches = kv_cache.allocate(SHAPE, num_blocks, device)
    for index, part in enumerate(part for cache in caches for part in cache.parts):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1000 * num_blocks + index)))
    return [part for cache in caches for part in cache.parts], Pages(caches, b"l" * 32)


def _giver(device: int, told: Connection) -> None:
    torch.cuda.set_device(device)
    _parts, made = pages(20, torch.device("cuda", device))
    assert made.peers is not None
    made.wait_filled().pending.wait()
    told.send(made.peers.own)
    told.recv()


@pytest.mark.parametrize("there", [0, 1])
async def test_blocks_of_another_process_are_the_same_bytes(there: int) -> None:
    if there >= torch.cuda.device_count():
        pytest.skip("one GPU")
    mine, theirs = multiprocessing.Pipe()
    giver = multiprocessing.get_context("spawn").Process(target=_giver, args=(there, theirs), daemon=True)
    giver.start()
    try:
        assert mine.poll(120), "no answer"
        shared = mine.recv()
        torch.cuda.set_device(0)  # whatever tests before have left
        parts, taker = pages(12, torch.device("cuda", 0))
        was = [part.clone() for part in parts]
        assert taker.peers is not None
        async with taker.peers.opened(shared) as reason:
            assert not reason
            copying = taker.write(TARGETS, PeerBlocks(shared, BLOCKS))
        await taker.peers.close()  # the fetch is cancelled, and the copy continues
        copying.wait()
        wanted, _ = pages(20, torch.device("cuda", 0))
        sources, targets = BLOCKS.astype(np.int64), TARGETS.astype(np.int64)
        others = [block for block in range(12) if block not in targets]
        for part, before, gave in zip(parts, was, wanted, strict=True):
            assert torch.equal(part[targets], gave[sources])
            assert torch.equal(part[others], before[others])
        await taker.peers.close()
        mine.send("done")
    finally:
        giver.kill()
        giver.join()
