"""Two ranks as threads, whose GPUs are host memory; streams execute and wait synchronously."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from quire.services.worker.device.peer_driver import PeerDriver, PeerMemoryError
from quire.services.worker.ranks.collectives.copy_engine_sums import FLAG_BYTES, CopyEngineSums, RowPieces
from tests.services.worker.kv_transfer.peer_memory import Library

HALF = 1024  # bytes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LATE_S = 60.0
Work = Callable[[int, CopyEngineSums], object]


class Machine(Library):
    def __init__(self) -> None:
        super().__init__()
        self._written = threading.Condition()

    def cuStreamWriteValue32_v2(
        self, _stream: object, address: ctypes.c_uint64, number: ctypes.c_uint32, _flags: object
    ) -> int:
        with self._written:
            _word(address).value = number.value
            self._written.notify_all()
        return 0

    def cuStreamWaitValue32_v2(
        self, _stream: object, address: ctypes.c_uint64, number: ctypes.c_uint32, flags: ctypes.c_uint
    ) -> int:
        assert flags.value == 0, "at least"
        with self._written:
            came = self._written.wait_for(
                lambda: ctypes.c_int32(_word(address).value - number.value).value >= 0, LATE_S
            )
        assert came, "the other rank has not sent it"
        return 0


def _word(address: ctypes.c_uint64) -> ctypes.c_uint32:
    assert address.value
    return ctypes.c_uint32.from_address(address.value)


class OneAfterTheOther:
    def computing(self) -> int:
        return 0

    def copying(self) -> int:
        return 0

    def join(self) -> None:
        pass


def pair(machine: Machine, half_bytes: int = HALF) -> list[CopyEngineSums]:
    regions = [torch.zeros(FLAG_BYTES + 2 * half_bytes, dtype=torch.uint8) for _ in range(2)]
    driver = PeerDriver(machine)
    return [CopyEngineSums(driver, regions[i], regions[1 - i].data_ptr(), OneAfterTheOther()) for i in range(2)]


def both(ranks: list[CopyEngineSums], work: Work) -> list[object]:
    with ThreadPoolExecutor(2) as threads:
        return [done.result() for done in [threads.submit(work, i, rank) for i, rank in enumerate(ranks)]]


def made(rank: int, seed: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2 * seed + rank)).to(dtype)


def added(sums: CopyEngineSums, part: Tensor) -> Tensor:
    return sums.overlapped_all_reduce(part, sums.pieces.split(part.size(0)), lambda rows: rows.clone())


def test_both_ranks_get_sums_of_all_sizes() -> None:
    """One piece, several, more than a half, and pieces larger than a half."""
    shapes = random.Random(1)
    calls = [
        (seed, (shapes.randrange(1, 200), shapes.choice((1, 3, 8, 64))), shapes.choice(DTYPES)) for seed in range(300)
    ]

    def work(rank: int, sums: CopyEngineSums) -> int:
        sums.pieces = RowPieces(min_rows=5, max_pieces=4)
        wrong = 0
        for seed, shape, dtype in calls:
            own, other = made(rank, seed, shape, dtype), made(1 - rank, seed, shape, dtype)
            wrong += not torch.equal(added(sums, own), (own.float() + other.float()).to(dtype))
        return wrong

    assert both(pair(Machine()), work) == [0, 0]


def test_a_rank_that_is_ahead_writes_over_nothing_that_is_not_read() -> None:
    """One rank reads nothing of the first sum until the other has sent all of the second."""
    machine, ahead = Machine(), threading.Event()
    wait, numbers = machine.cuStreamWaitValue32_v2, list[int]()

    def waiting(stream: object, address: ctypes.c_uint64, number: ctypes.c_uint32, flags: ctypes.c_uint) -> int:
        if threading.current_thread().name == "behind":
            assert ahead.wait(LATE_S)
        else:
            numbers.append(number.value)
            if len(numbers) == 3:  # of two pieces a sum
                ahead.set()
        return wait(stream, address, number, flags)

    machine.cuStreamWaitValue32_v2 = waiting  # type: ignore[method-assign]

    def work(rank: int, sums: CopyEngineSums) -> list[float]:
        threading.current_thread().name = ("ahead", "behind")[rank]
        sums.pieces = RowPieces(min_rows=4, max_pieces=2)
        return [float(added(sums, torch.full((8, 16), 10.0 * rank + i)).unique()) for i in range(6)]

    assert both(pair(machine), work) == [[10.0 + 2 * i for i in range(6)]] * 2


def test_flag_values_wrap_around() -> None:
    ranks = pair(Machine())
    for rank in ranks:
        rank._number = 0xFFFFFFFD
        rank._region[:4].view(torch.int32).fill_(-3)

    def work(rank: int, sums: CopyEngineSums) -> list[float]:
        sums.pieces = RowPieces(min_rows=1, max_pieces=2)
        return [float(added(sums, torch.full((2, 4), 1.0 + rank + i)).unique()) for i in range(4)]

    assert both(ranks, work) == [[3.0, 5.0, 7.0, 9.0]] * 2


def test_ranks_that_reach_each_other_are_greeted() -> None:
    first, second = pair(Machine())
    assert not second.is_peer_ready()
    first.probe_peer()
    assert second.is_peer_ready()
    assert not first.is_peer_ready()


@pytest.mark.parametrize("name", ["cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"])
def test_refusing_driver_is_detected_before_any_sum(name: str) -> None:
    machine = Machine()
    machine.refuses.add(name)
    with pytest.raises(PeerMemoryError, match=name):
        pair(machine)[0].probe_peer()


def test_a_driver_without_waiting_streams() -> None:
    with pytest.raises(PeerMemoryError, match="does not provide cuStreamW"):
        CopyEngineSums(PeerDriver(Library()), torch.zeros(1024, dtype=torch.uint8), 1, OneAfterTheOther()).probe_peer()
