"""Host memory that outlives a worker: what a restarted worker finds, and what it must reject."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.host_memory import BlockMove, HostMemory
from quire.services.worker.kv.kv_memory import BlockShape
from quire.services.worker.offload import host_region
from quire.services.worker.offload.folder import WorkerFolder
from quire.services.worker.offload.host_region import BOOT_ID, FILE, PAGE, HostRegion
from quire.shared.errors import InvalidArgument
from tests.services.worker.offload.fake_host_memory import name

OURS, OTHERS = b"a" * 32, b"b" * 32
SHAPE = BlockShape(3, 4, 2, 8, torch.float32)


class Lives:
    """Successive processes that use one region."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self._folder: WorkerFolder | None = None
        self.boot_id = BOOT_ID
        self.caches = kv_cache.allocate(SHAPE, 20, torch.device("cpu"))
        for layer, cache in enumerate(self.caches):
            cache.k[:] = torch.arange(20).view(20, 1, 1, 1) + 100 * layer
            cache.v[:] = -cache.k

    def start(self, identity: bytes = OURS, num_places: int = 8) -> HostMemory:
        self.end()
        self._folder = WorkerFolder(self.parent, "worker-0.region", "kv_offloading_region")
        region = HostRegion(self._folder, identity, num_places, SHAPE.num_bytes, self.boot_id)
        return HostMemory(self.caches, num_places, region)

    def end(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    @property
    def file(self) -> Path:
        return self.parent / "worker-0.region" / FILE


@pytest.fixture
def lives() -> Iterator[Lives]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        lives = Lives(Path(parent))
        yield lives
        lives.end()


def move(blocks: list[int], places: list[int], *, to_host: bool) -> BlockMove:
    ids = [np.array(column, dtype=np.uint32) for column in (blocks, places)]
    return BlockMove(to_host, ids[0], ids[1], [name(block) for block in blocks])


def fill(lives: Lives) -> HostMemory:
    memory = lives.start()
    memory.start_move(move([3, 5, 7], [6, 0, 2], to_host=True)).wait()
    return memory


def test_restarted_process_finds_stored_blocks(lives: Lives) -> None:
    fill(lives)
    before = [cache.k.clone() for cache in lives.caches]
    memory = lives.start()
    assert list(memory.contents().items()) == [(6, name(3)), (0, name(5)), (2, name(7))]
    memory.start_move(move([11, 12], [0, 2], to_host=False)).wait()
    for cache, old in zip(lives.caches, before, strict=True):
        assert torch.equal(cache.k[11], old[5])
        assert torch.equal(cache.v[12], -old[7])
    assert lives.file.stat().st_mode & 0o777 == 0o600


def test_unfinished_writes_are_ignored(lives: Lives) -> None:
    memory = fill(lives)
    memory.start_move(move([9], [0], to_host=True))  # never waited for
    assert lives.start().contents() == {6: name(3), 2: name(7)}


def test_late_copy_does_not_commit_a_newer_block(lives: Lives) -> None:
    memory = fill(lives)
    late = memory.start_move(move([9], [0], to_host=True))
    memory.start_move(move([8], [0], to_host=True)).wait()
    late.wait()
    assert lives.start().contents()[0] == name(8)


def test_blocks_read_from_disk_are_found(lives: Lives) -> None:
    memory = fill(lives)
    memory.put(4, name(1), bytearray(SHAPE.num_bytes))
    assert lives.start().contents()[4] == name(1)


def test_reset_blocks_are_not_found(lives: Lives) -> None:
    memory = fill(lives)
    memory.reset(OURS)
    assert memory.contents() == {}
    assert lives.start().contents() == {}


def test_blocks_of_weights_that_were_changed_are_not_found(lives: Lives) -> None:
    memory = fill(lives)
    memory.reset(OTHERS)
    memory.start_move(move([9], [0], to_host=True)).wait()
    assert lives.start(OURS).contents() == {}


def test_other_weights_and_other_sizes_are_another_region(lives: Lives) -> None:
    fill(lives)
    assert lives.start(OTHERS).contents() == {}
    fill(lives)
    assert lives.start(num_places=9).contents() == {}


def test_a_machine_that_was_booted_since_is_another(lives: Lives) -> None:
    fill(lives)
    lives.boot_id = lives.parent / "boot_id"
    lives.boot_id.write_text("another")
    assert lives.start().contents() == {}


@pytest.mark.parametrize(("place", "left"), [(9, 0), (PAGE - 1, 0), (PAGE + 5, 2), (PAGE + 33, 2), (PAGE + 71, 2)])
def test_a_changed_bit_of_header_or_table_is_noticed(lives: Lives, place: int, left: int) -> None:
    fill(lives)
    lives.end()
    content = bytearray(lives.file.read_bytes())
    content[place] ^= 1
    lives.file.write_bytes(content)
    assert len(lives.start().contents()) == left


def test_truncated_file_is_recreated(lives: Lives) -> None:
    fill(lives)
    lives.end()
    lives.file.write_bytes(lives.file.read_bytes()[:-1])
    memory = lives.start()
    assert memory.contents() == {}
    memory.start_move(move([3], [7], to_host=True)).wait()
    assert lives.start().contents() == {7: name(3)}


def test_folder_outside_memory_is_refused(tmp_path: Path) -> None:
    if host_region.file_system(tmp_path) == "tmpfs":
        pytest.skip("here it is memory")
    folder = WorkerFolder(tmp_path, "w", "kv_offloading_region")
    with pytest.raises(InvalidArgument, match=r"kv_offloading_region: .* choose one in memory, as /dev/shm"):
        HostRegion(folder, OURS, 8, 64)
    folder.close()


def test_a_region_that_has_no_room_is_refused(lives: Lives) -> None:
    folder = WorkerFolder(lives.parent, "w", "kv_offloading_region")
    with pytest.raises(InvalidArgument, match=r"kv_offloading_region: 1024.1 GiB in .*: No space left"):
        HostRegion(folder, OURS, 1 << 20, 1 << 20)
    folder.close()
