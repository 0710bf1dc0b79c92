"""Takes over the blocks that a worker kept from an earlier attachment."""

from __future__ import annotations

import asyncio

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.kv_cache.block_tier import BlockTier
from quire.shared.columns import u32
from quire.shared.kv import block_hash
from quire.shared.pb.worker.v1 import worker_pb2 as pb

ADOPTED_AT_A_TIME = 10_000  # about 10 ms of the event loop


async def adopt(core: Core, hello: pb.WorkerHello) -> None:
    """Records the blocks that the worker kept from an earlier attachment (device, host memory, disk) in a new core,
    so that its cache is warm at once; yields to the event loop in between."""
    if not core.limits.caches_prefixes:
        return
    ids = u32(hello.held.block_ids).tolist()
    hashes = block_hash.split(hello.held.block_hashes)
    groups = u32(hello.held.block_groups).tolist() or [0] * len(ids)
    for start in range(0, len(ids), ADOPTED_AT_A_TIME):
        part = slice(start, start + ADOPTED_AT_A_TIME)
        for block, held, group in zip(ids[part], hashes[part], groups[part], strict=True):
            core.kv.pool.adopt(block, block_hash.page_name(held, group))
        await asyncio.sleep(0)
    if core.host_blocks is not None:
        names = block_hash.split_names(hello.held.host_place_hashes, hello.held.host_place_groups)
        await _adopt_tier(core.host_blocks.tier, hello.held.host_place_ids, names)
        if core.host_blocks.disk is not None:
            names = block_hash.split_names(hello.held.disk_place_hashes, hello.held.disk_place_groups)
            await _adopt_tier(core.host_blocks.disk.tier, hello.held.disk_place_ids, names)
            core.host_blocks.disk.offer(core.host_blocks.tier.held())


async def _adopt_tier(tier: BlockTier, place_ids: bytes, names: list[bytes]) -> None:
    """Records the blocks that the worker kept in one tier: `names` by place in the u32 column `place_ids`; yields to
    the event loop in between."""
    held = [*zip(u32(place_ids).tolist(), names, strict=True)]
    for start in range(0, len(held), ADOPTED_AT_A_TIME):
        tier.adopt(held[start : start + ADOPTED_AT_A_TIME])
        await asyncio.sleep(0)
