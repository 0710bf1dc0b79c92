"""Sums of two ranks' many rows, beside the products that make them: copy engines bring the parts over.

A kernel that adds up takes multiprocessors from the products beside it, which costs as much as it hides. So here a
product is made in pieces of rows, a copy engine writes each into the other rank's memory while the next is made, and
the other's stream waits for a number that is written behind it, which is no kernel's work either. In the end both add
up what they have and what has come, piece by piece, beside the copy of the last one.

Nobody says that a place may be written over. A sum has one half of the memory and the next sum the other: a rank writes
into a half only behind its own wait for all of the sum before, and the other sent that behind adding up the one before
it, which is the last that lay there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.services.worker.device.peer_driver import PeerDriver

HALF_BYTES = 64 << 20  # 8,192 rows of 4,096 elements of 2 bytes; of more, a half is added up before the next is begun
FLAG_BYTES = ALIGNED = 256
_GREETING = 1


@dataclass(frozen=True, slots=True)
class RowPieces:
    """Of rows that are made and added up one after the other."""

    min_rows: int  # of a piece
    max_pieces: int

    def of(self, num_rows: int) -> list[range]:
        """One if they are too few; all as long, but for the last."""
        count = max(1, min(self.max_pieces, num_rows // self.min_rows))
        size = max(1, -(-num_rows // count))
        return [range(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


# Nothing is computed beside the last piece's copy; a product of fewer rows does not fill a GPU.
PIECES = RowPieces(min_rows=1024, max_pieces=4)


class DriverStreams(Protocol):
    """Of a rank's products, and of its copies. Handles of the driver."""

    def computing(self) -> int: ...

    def copying(self) -> int:
        """Behind what has been launched on the other so far."""

    def join(self) -> None:
        """What is computed next waits for the copies."""


class GpuStreams:
    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)

    def computing(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def copying(self) -> int:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        return self._side.cuda_stream

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)


@dataclass(frozen=True, slots=True)
class _SentPiece:
    number: int
    part: Tensor  # kept until it is added up: the copy reads it
    theirs: Tensor  # where the other's comes
    out: Tensor


class CopyEngineSums:
    """Both ranks make the same sums in the same order."""

    def __init__(
        self, driver: PeerDriver, region: Tensor, peer: int, streams: DriverStreams, pieces: RowPieces = PIECES
    ) -> None:
        """`region`: uint8 [region_bytes()] of this rank, zeros; `peer`: where the other's is, for this one."""
        self.pieces = pieces
        self._driver, self._region, self._peer, self._streams = driver, region, peer, streams
        self._half_bytes = (region.numel() - FLAG_BYTES) // 2
        self._half = 0
        self._number = _GREETING  # of the last piece

    def probe_peer(self) -> None:
        """Raises PeerMemoryError where this GPU and its driver do not do what sums need."""
        stream, own = self._streams.copying(), self._region.data_ptr()
        self._driver.write_value_async(own + 4, _GREETING, stream)
        self._driver.wait_value_async(own + 4, _GREETING, stream)
        self._driver.write_value_async(self._peer, _GREETING, stream)
        self._driver.synchronize()

    def is_peer_ready(self) -> bool:
        """By the other, which has returned from probe_peer()."""
        return int(self._region[:4].view(torch.int32).item()) == _GREETING

    def cuts(self, num_rows: int) -> list[range]:
        """A graph would have the numbers of one call in it: what it records is not cut."""
        is_recorded = self._region.is_cuda and torch.cuda.is_current_stream_capturing()
        return [range(num_rows)] if is_recorded else self.pieces.of(num_rows)

    def overlapped_all_reduce(self, rows: Tensor, cuts: list[range], make: Callable[[Tensor], Tensor]) -> Tensor:
        """As Collectives.overlapped_all_reduce, of rows that are cut so."""
        sums, sent, used = rows, list[_SentPiece](), 0
        for cut in cuts:
            made = make(rows[cut.start : cut.stop]).contiguous()
            if cut.start == 0:
                sums = made.new_empty(rows.size(0), *made.shape[1:])
            size = self._most_rows(made)
            for part, out in zip(made.split(size), sums[cut.start : cut.stop].split(size), strict=True):
                if used + part.nbytes > self._half_bytes:
                    self._finish(sent)
                    sent, used = [], 0
                sent.append(self._send(part, out, used))
                used += -(-part.nbytes // ALIGNED) * ALIGNED
        self._finish(sent)
        return sums

    def _most_rows(self, made: Tensor) -> int:
        """Of what fits into a half."""
        row = made[:1].nbytes
        assert row <= self._half_bytes
        return self._half_bytes // row

    def _send(self, part: Tensor, out: Tensor, used: int) -> _SentPiece:
        at = FLAG_BYTES + self._half * self._half_bytes + used
        theirs = self._region[at : at + part.nbytes].view(part.dtype).view(part.shape)
        self._number = self._number + 1 & 0xFFFFFFFF
        stream = self._streams.copying()
        self._driver.copy_async(part.data_ptr(), self._peer + at, part.nbytes, stream)
        self._driver.write_value_async(self._peer, self._number, stream)
        return _SentPiece(self._number, part, theirs, out)

    def _finish(self, sent: list[_SentPiece]) -> None:
        stream = self._streams.computing()
        for piece in sent:
            self._driver.wait_value_async(self._region.data_ptr(), piece.number, stream)
            torch.add(piece.part, piece.theirs, out=piece.out)  # of two, either order has the same bits
        self._streams.join()
        self._half = 1 - self._half


def region_bytes() -> int:
    return FLAG_BYTES + 2 * HALF_BYTES
