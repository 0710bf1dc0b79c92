"""Blocks on disk: written, read back, found again, and lost in all the ways in which a disk loses things."""

from __future__ import annotations

import os
import queue
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quire.services.worker.offload.disk_moves import DiskMove
from quire.services.worker.offload.disk_store import NUM_THREADS, DiskStore
from quire.services.worker.offload.folder import BlockFolder, WorkerFolder
from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared import columns
from quire.shared.errors import InvalidArgument
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.offload.fake_host_memory import MOVE_TIMEOUT_S, DiskRecorder, FakeHostMemory, move, name

OURS, OTHERS = b"a" * 32, b"b" * 32


class Disk:
    """One life after the other in one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory, self.told = FakeHostMemory(), DiskRecorder()
        self.stores: list[DiskStore] = []

    def start(self, identity: bytes = OURS, num_places: int = 16, timeout_s: float = MOVE_TIMEOUT_S) -> DiskStore:
        if self.stores:
            self.stores[-1].close(MOVE_TIMEOUT_S)
        folder = BlockFolder(WorkerFolder(self.path, "worker-0", "kv_offloading_disk"))
        store = DiskStore(
            folder, identity, {"told": 1}, self.memory, num_places, observer=self.told, timeout_s=timeout_s
        )
        self.stores.append(store)
        return store

    def files(self) -> list[Path]:
        return sorted(self.path.glob("worker-0/*/*/*.kv"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "kv")
    yield disk
    disk.stores[-1].close(MOVE_TIMEOUT_S)


def patiently() -> Iterator[None]:
    deadline = time.monotonic() + MOVE_TIMEOUT_S
    while time.monotonic() < deadline:
        yield
        time.sleep(0.005)


def fill(disk: Disk) -> DiskStore:
    """Blocks 1, 2 and 3 in places 4, 5 and 6 of the disk."""
    disk.memory.rows[:3] = np.arange(1, 4, dtype=np.uint8)[:, None]
    store = disk.start()
    assert move(store, [0, 1, 2], [4, 5, 6], [1, 2, 3], to_disk=True) == []
    disk.memory.rows[:] = 0
    return store


def test_blocks_go_to_disk_and_come_back(disk: Disk) -> None:
    store = fill(disk)
    assert sorted(store.contents().items()) == [(4, name(1)), (5, name(2)), (6, name(3))]
    assert move(store, [7, 3], [6, 4], [3, 1], to_disk=False) == []
    assert (disk.memory.rows[7] == 3).all()
    assert (disk.memory.rows[3] == 1).all()
    assert disk.memory.names == {7: name(3), 3: name(1)}
    assert disk.told.num_bytes == {"write": 3 * 64, "read": 2 * 64}


def test_a_worker_that_is_started_again_finds_them(disk: Disk) -> None:
    fill(disk)
    store = disk.start()
    assert sorted(store.contents()) == [4, 5, 6]
    assert move(store, [0], [5], [2], to_disk=False) == []
    assert (disk.memory.rows[0] == 2).all()


def test_with_other_weights_nothing_is_found_nor_left(disk: Disk) -> None:
    fill(disk)
    assert disk.start(OTHERS).contents() == {}
    assert disk.files() == []
    assert disk.start().contents() == {}, "they did not come back either"


def test_a_smaller_disk_keeps_what_it_has_places_for(disk: Disk) -> None:
    fill(disk)
    assert disk.start(num_places=5).contents() == {4: name(1)}
    assert len(disk.files()) == 1


def test_another_block_takes_the_place_and_the_file_of_the_one_before(disk: Disk) -> None:
    store = fill(disk)
    assert move(store, [0], [5], [9], to_disk=True) == []
    assert store.contents()[5] == name(9)
    assert len(disk.files()) == 3
    assert move(store, [0], [5], [2], to_disk=False) == [0], "block 2 is gone"
    assert disk.told.failures == {("read", "error"): 1}


def test_torn_swapped_and_missing_files_cost_their_own_block_only(disk: Disk) -> None:
    store = fill(disk)
    first, second, third = disk.files()
    os.truncate(first, 200)
    second.write_bytes(third.read_bytes())
    assert move(store, [0, 1, 2], [4, 5, 6], [1, 2, 3], to_disk=False) == [0, 1]
    assert (disk.memory.rows[2] == 3).all()
    assert not disk.memory.rows[:2].any(), "nothing of them has come to host memory"
    assert disk.told.failures == {("read", "wrong"): 2}
    assert sorted(disk.start().contents()) == [6]


def test_what_a_killed_worker_left_half_written_is_not_believed(disk: Disk) -> None:
    fill(disk)
    whole = disk.files()[0]
    (whole.parent / "17.new").write_bytes(whole.read_bytes()[:100])
    (whole.parent / whole.name.replace("00000004", "00000009")).write_bytes(whole.read_bytes()[:100])
    assert sorted(disk.start().contents()) == [4, 5, 6]
    assert len(list(whole.parent.iterdir())) == 3


def test_a_full_disk_drops_what_it_cannot_take(disk: Disk) -> None:
    store = fill(disk)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert move(store, [0, 1], [4, 8], [7, 8], to_disk=True) == [0, 1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert disk.told.failures == {("write", "full"): 2}
    assert sorted(store.contents()) == [5, 6], "what was in the place is gone as well"
    assert not list(disk.path.glob("worker-0/*/*/*.new"))
    assert move(store, [0], [4], [7], to_disk=True) == [], "there is room again"


def test_a_disk_that_hangs_is_given_up_and_asked_again_once_it_answers(disk: Disk) -> None:
    fill(disk)
    store = disk.start(timeout_s=0.05)
    path = disk.files()[0]
    path.unlink()
    os.mkfifo(path)  # whoever opens it waits
    for _ in patiently():  # until no thread is left, and it says so at once
        assert move(store, [0], [4], [1], to_disk=False) == [0]
        if disk.told.failures["read", "busy"]:
            break
    assert disk.told.failures["read", "late"] >= NUM_THREADS["read"]
    with path.open("wb"):  # all of them come back
        pass
    for _ in patiently():
        if move(store, [1], [5], [2], to_disk=False) == []:
            break
    assert (disk.memory.rows[1] == 2).all()
    assert not disk.memory.rows[0].any()


def test_moves_of_an_attachment_that_is_over_change_nothing_any_more(disk: Disk) -> None:
    store, memory = fill(disk), disk.memory
    begun, over = threading.Event(), threading.Event()

    def slowly(place: int) -> npt.NDArray[np.uint8]:
        begun.set()
        over.wait(MOVE_TIMEOUT_S)
        return FakeHostMemory.row(memory, place)

    memory.row = slowly  # type: ignore[method-assign]
    answers: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    store.start_move(DiskMove(True, [0], [4], [name(7)]), lambda lost, _: answers.put(lost))
    assert begun.wait(MOVE_TIMEOUT_S)
    assert sorted(store.end_epoch()) == [5, 6]
    memory.rows[0] = 99  # another attachment's block
    over.set()
    del memory.row  # type: ignore[method-assign]
    assert move(store, [1], [9], [8], to_disk=True) == []
    assert move(store, [1], [10], [9], to_disk=True) == []
    assert answers.empty()
    assert sorted(store.contents()) == [5, 6, 9, 10]
    assert sorted(disk.start().contents()) == [5, 6, 9, 10]
    assert not list(disk.path.glob("worker-0/*/*/*.new"))


def test_a_forgotten_disk_is_empty_and_takes_blocks_at_once(disk: Disk) -> None:
    store = fill(disk)
    store.reset(OURS)
    assert store.contents() == {}
    assert move(store, [0], [4], [1], to_disk=True) == []
    assert disk.start().contents() == {4: name(1)}
    assert len(disk.files()) == 1


def test_blocks_of_weights_that_were_changed_are_never_found_again(disk: Disk) -> None:
    store = fill(disk)
    store.reset(OTHERS)
    assert move(store, [0], [4], [1], to_disk=True) == []
    assert move(store, [0], [4], [1], to_disk=False) == []
    assert disk.start().contents() == {}


def test_a_folder_has_one_worker(disk: Disk) -> None:
    disk.start()
    with pytest.raises(InvalidArgument, match=r"kv_offloading_disk: .* is in use by another process"):
        WorkerFolder(disk.path, "worker-0", "kv_offloading_disk")
    WorkerFolder(disk.path, "../worker/0", "kv_offloading_disk").close()
    assert sorted(path.name for path in disk.path.iterdir()) == ["..%2Fworker%2F0", "worker-0"]


@pytest.mark.parametrize(
    ("places", "on_disk", "hashes", "said"),
    [
        ([], [], b"", "0 places"),
        ([0], [1, 2], bytes(32), "1 places, places on disk and hashes|\\(1, 2, 1\\)"),
        ([8], [0], bytes(32), r"place ids are not all in 0..7"),
        ([0], [16], bytes(32), r"place on disk ids are not all in 0..15"),
        ([1, 1], [2, 3], bytes(64), "place ids come more than once"),
        ([1], [2], bytes(33), "a transfer with 33 bytes of hashes"),
    ],
)
def test_orders_that_cannot_be_meant(places: list[int], on_disk: list[int], hashes: bytes, said: str) -> None:
    order = pb.DiskTransfer(
        place_ids=columns.u32_bytes(places), disk_place_ids=columns.u32_bytes(on_disk), block_hashes=hashes
    )
    with pytest.raises(PlanViolation, match=said if places else r"\(0, 0, 0\)"):
        DiskMove.of(order, 8, 16)
