"""Blocks return from host memory unchanged, and the record knows their contents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.block_contents import BlockContents
from quire.services.worker.kv.host_memory import BlockMove, HostMemory, count_places
from quire.services.worker.kv.kv_memory import GIB, BlockShape, free_host_bytes
from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared import columns
from quire.shared.errors import InvalidArgument
from quire.shared.kv.block_hash import block_hash, split
from quire.shared.pb.worker.v1 import worker_pb2 as pb

SHAPE = BlockShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
LATENT = BlockShape(num_layers=3, block_size=4, num_kv_heads=1, head_dim=20, dtype=torch.bfloat16, num_parts=1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def order(
    blocks: list[int], places: list[int], *, to_host: bool, hashes: bytes | None = None, groups: Sequence[int] = ()
) -> pb.Transfer:
    return pb.Transfer(
        transfer_id=1,
        to_host=to_host,
        block_ids=columns.u32_bytes(blocks),
        place_ids=columns.u32_bytes(places),
        block_hashes=b"".join(bytes([block]) * 32 for block in blocks) if hashes is None else hashes,
        block_groups=columns.u32_bytes(groups),
    )


def move(memory: HostMemory, blocks: list[int], places: list[int], *, to_host: bool) -> None:
    memory.start_move(BlockMove.of(order(blocks, places, to_host=to_host), 20, 10)).wait()


@pytest.mark.parametrize("shape", [SHAPE, LATENT], ids=["full", "latent"])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_return_to_other_places(device: str, shape: BlockShape) -> None:
    check_that_blocks_return(device, shape)


def check_that_blocks_return(device: str, shape: BlockShape, **limits: int) -> None:
    """Moves blocks to host memory and back to other places, within `limits`."""
    caches = kv_cache.allocate(shape, 20, torch.device(device))
    parts = [part for cache in caches for part in cache.parts]
    for part in parts:
        part.copy_(torch.randn(part.shape))
    before = [part.clone() for part in parts]
    memory = HostMemory(caches, 10, **limits)
    assert memory.block_bytes == shape.num_bytes
    move(memory, [3, 7, 19], [9, 0, 4], to_host=True)
    for part in parts:
        part.zero_()
    move(memory, [5, 1], [4, 9], to_host=False)
    for part, was in zip(parts, before, strict=True):
        assert torch.equal(part[5], was[19])
        assert torch.equal(part[1], was[3])
        assert not part[[2, 3, 7, 19]].any()
    assert memory.contents() == {9: bytes([3]) * 32, 0: bytes([7]) * 32, 4: bytes([19]) * 32}
    memory.reset(b"")
    assert memory.contents() == {}


@pytest.mark.gpu
def test_many_blocks_are_moved_in_portions() -> None:
    check_that_blocks_return("cuda", SHAPE, staged_bytes=1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (order([0, 1], [0, 1], to_host=True), "block ids are not all in 1..19"),
        (order([1, 20], [0, 1], to_host=True), "block ids are not all in 1..19"),
        (order([1, 2], [0, 10], to_host=False), "place ids are not all in 0..9"),
        (order([1, 1], [0, 1], to_host=False), "block ids come more than once"),
        (order([1, 2], [3, 3], to_host=True), "place ids come more than once"),
        (order([1, 2], [3], to_host=True), "a transfer of (2, 1, 2) blocks, places and hashes"),
        (order([], [], to_host=True), "a transfer of (0, 0, 0) blocks, places and hashes"),
        (order([1], [1], to_host=True, hashes=bytes(33)), "a transfer with 33 bytes of hashes"),
        (order([1, 2], [1, 2], to_host=True, groups=[1]), "a transfer of 2 hashes and 1 groups"),
        (order([1, 2], [1, 2], to_host=True, groups=[1, 3]), "a transfer of blocks of group 3, of 3"),
    ],
)
def test_invalid_orders_are_violations(wrong: pb.Transfer, said: str) -> None:
    with pytest.raises(PlanViolation) as refused:
        BlockMove.of(wrong, 20, 10, num_groups=3)
    assert said in str(refused.value)


def test_the_size_is_refused_by_name_and_value() -> None:
    with pytest.raises(InvalidArgument, match="kv_offloading_size: 1e-09 GiB holds 0 blocks of 768 bytes"):
        count_places(1e-9, SHAPE)
    with pytest.raises(InvalidArgument, match=r"kv_offloading_size: 2000.0 GiB is more than the .* this host has free"):
        count_places(2000.0, BlockShape(3, 4, 2, 1 << 20, torch.bfloat16))


def test_ranks_on_several_hosts_need_their_share_of_it_on_each() -> None:
    shape, gib = BlockShape(3, 4, 2, 1 << 20, torch.bfloat16), 1.5 * free_host_bytes() / GIB
    with pytest.raises(InvalidArgument, match=r"is more than the .* GiB that this host has free"):
        count_places(gib, shape, num_ranks=8)
    assert count_places(gib, shape, num_ranks=8, num_hosts=4) > 0
    with pytest.raises(InvalidArgument, match="of which 1/4 lies on each host, is more than"):
        count_places(10 * gib, shape, num_ranks=8, num_hosts=4)


def test_restored_blocks_are_reported_and_continued() -> None:
    """The hash is known without the tokens, so hash chains continue after it."""
    held = BlockContents(num_blocks=8, block_size=2)
    held.allocate(np.array([3]), np.array([0]), {3: b"r" * 32})
    held.record_tokens(np.array([6, 7], dtype=np.int32), np.array([1, 2], dtype=np.int32))
    held.commit(np.array([3, 4]), [b"a" * 32, b"b" * 32])
    held.allocate(np.array([5]), np.array([4]), {})
    held.record_tokens(np.array([10, 11], dtype=np.int32), np.array([8, 9], dtype=np.int32))
    report = held.report()
    digests = {block: report.hashes[32 * i : 32 * i + 32] for i, block in enumerate(report.block_ids)}
    assert digests[3] == b"a" * 32, "and nothing of what it held before"
    assert digests[4] == b"b" * 32
    assert 5 in digests
    held.allocate(np.array([4]), np.array([0]), {4: b"r" * 32})
    assert held.report().block_ids == [3], "the chain behind the other one is broken"


def test_a_place_whose_copy_failed_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(kv_cache.allocate(SHAPE, 20, torch.device("cpu")), 10)
    move(memory, [3, 4], [1, 2], to_host=True)

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(memory, "_copy", fails)
    with pytest.raises(MemoryError):
        move(memory, [5], [2], to_host=True)
    with pytest.raises(MemoryError):
        move(memory, [6], [1], to_host=False)
    assert memory.contents() == {1: bytes([3]) * 32}


def test_blocks_whose_copy_failed_are_not_reported() -> None:
    held = BlockContents(num_blocks=8, block_size=2)
    held.commit(np.array([3, 4]), [b"a" * 32, b"b" * 32])
    held.invalidate(np.array([3]))
    assert held.report().block_ids == [4]


def test_copies_of_restored_blocks_are_not_reported() -> None:
    held = BlockContents(num_blocks=8, block_size=2)
    held.commit(np.array([3]), [b"a" * 32])
    held.allocate(np.array([5]), np.array([0]), {5: b"r" * 32})
    held.record_copies(np.array([3]), np.array([5]))
    assert held.report().block_ids == [3]


def test_restored_pages_of_several_groups_are_reported_with_their_groups() -> None:
    """A chain continues within its group, also after a block that is reallocated meanwhile."""
    move = BlockMove.of(order([3, 4], [0, 1], to_host=False, groups=[0, 1]), 8, 2, num_groups=2)
    held = BlockContents(num_blocks=8, block_size=2, windows=True)
    held.invalidate(move.blocks)
    held.commit(move.blocks, move.names)
    held.allocate(np.array([5, 6]), np.array([3, 4]), {}, np.array([0, 1]))
    held.record_tokens(np.array([10, 11, 12, 13], dtype=np.int32), np.array([8, 9, 8, 9], dtype=np.int32))
    expected = {3: (0, bytes([3]) * 32), 4: (1, bytes([4]) * 32)}
    expected |= {
        block: (group, block_hash(parent, TOKENS)) for block, group, parent in ((5, 0, b"\3" * 32), (6, 1, b"\4" * 32))
    }
    assert reported(held) == expected
    held.invalidate(np.array([4]))
    held.commit(np.array([4]), [bytes([7]) * 32])
    assert reported(held) == expected | {4: (0, bytes([7]) * 32)}, "the one behind it has its hash still"


TOKENS = columns.i32_bytes([8, 9])


def reported(held: BlockContents) -> dict[int, tuple[int, bytes]]:
    """Group and hash by block."""
    report = held.report()
    digests = split(report.hashes)
    return {
        block: (group, digest) for block, group, digest in zip(report.block_ids, report.groups, digests, strict=True)
    }
