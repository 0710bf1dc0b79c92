"""All-reduce of many rows for two ranks, overlapped with the matrix product that computes them, using copy engines.

An all-reduce kernel takes multiprocessors from a concurrent product, which costs as much as the overlap saves. Here a
product is computed in pieces of rows, a copy engine writes each piece into the other rank's memory while the next is
computed, and the other rank's stream waits for a flag that is written after the piece; no kernel is involved. Finally
both ranks add what they have and what they received, piece by piece, overlapped with the copy of the last one.

No acknowledgement is needed before memory is overwritten. Consecutive sums alternate between two halves of the memory:
a rank writes into a half only after its own wait for all pieces of the previous sum, which the other rank sent after
adding the sum before that, the last user of this half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.services.worker.device.peer_driver import PeerDriver

HALF_BYTES = 64 << 20  # 8,192 rows of 4,096 elements of 2 bytes; more rows are summed half by half
FLAG_BYTES = ALIGNED = 256
_GREETING = 1


@dataclass(frozen=True, slots=True)
class RowPieces:
    """Division of rows into pieces that are computed and summed one after the other."""

    min_rows: int  # per piece
    max_pieces: int

    def split(self, num_rows: int) -> list[range]:
        """Returns the pieces of `num_rows` rows, of equal size but the last; one piece if there are few rows."""
        count = max(1, min(self.max_pieces, num_rows // self.min_rows))
        size = max(1, -(-num_rows // count))
        return [range(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


# The last piece's copy overlaps with nothing; a product of fewer rows does not fill a GPU.
PIECES = RowPieces(min_rows=1024, max_pieces=4)


class DriverStreams(Protocol):
    """Driver handles of the streams of a rank's products and copies."""

    def computing(self) -> int: ...

    def copying(self) -> int:
        """Returns the copy stream, ordered after all work launched on the compute stream."""

    def join(self) -> None:
        """Makes later work on the compute stream wait for the copies."""


class GpuStreams:
    """Streams of one GPU: torch's current stream computes, a stream of its own copies."""

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
    """Rows whose copy to the other rank has been enqueued, until their sum is."""

    number: int
    part: Tensor  # read by the copy, kept until it is summed
    theirs: Tensor  # receives the other rank's part
    out: Tensor


class CopyEngineSums:
    """Overlapped all-reduce of two ranks, which make the same calls in the same order."""

    def __init__(
        self, driver: PeerDriver, region: Tensor, peer: int, streams: DriverStreams, pieces: RowPieces = PIECES
    ) -> None:
        """Stores the memory of both ranks; probe_peer() must follow. `region`: zeroed uint8 [region_bytes()] of this
        rank; `peer`: local address of the other rank's region."""
        self.pieces = pieces
        self._driver, self._region, self._peer, self._streams = driver, region, peer, streams
        self._half_bytes = (region.numel() - FLAG_BYTES) // 2
        self._half = 0
        self._number = _GREETING  # flag value of the last piece

    def probe_peer(self) -> None:
        """Tests the driver functions and signals the other rank. Raises PeerMemoryError if the GPU or driver lacks
        them."""
        stream, own = self._streams.copying(), self._region.data_ptr()
        self._driver.write_value_async(own + 4, _GREETING, stream)
        self._driver.wait_value_async(own + 4, _GREETING, stream)
        self._driver.write_value_async(self._peer, _GREETING, stream)
        self._driver.synchronize()

    def is_peer_ready(self) -> bool:
        """Returns whether the other rank has signalled; valid after it has returned from probe_peer()."""
        return int(self._region[:4].view(torch.int32).item()) == _GREETING

    def cuts(self, num_rows: int) -> list[range]:
        """Returns the pieces of the rows; one piece while a CUDA graph is captured, which would record one call's flag
        values."""
        is_recorded = self._region.is_cuda and torch.cuda.is_current_stream_capturing()
        return [range(num_rows)] if is_recorded else self.pieces.split(num_rows)

    def overlapped_all_reduce(self, rows: Tensor, cuts: list[range], make: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the sum over both ranks of make(rows), computed for one cut of rows after the other while the
        previous one is copied. `cuts`: consecutive row ranges from 0 on; `make`: maps rows [n, ...] to this rank's part
        [n, ...]."""
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
        """Returns how many rows of the size of those of `made` fit into a half of the memory; at least one must."""
        row = made[:1].nbytes
        assert row <= self._half_bytes
        return self._half_bytes // row

    def _send(self, part: Tensor, out: Tensor, used: int) -> _SentPiece:
        """Enqueues the copy of a part into the other rank's memory, at `used` bytes in the current half, and then the
        flag that announces it."""
        at = FLAG_BYTES + self._half * self._half_bytes + used
        theirs = self._region[at : at + part.nbytes].view(part.dtype).view(part.shape)
        self._number = self._number + 1 & 0xFFFFFFFF
        stream = self._streams.copying()
        self._driver.copy_async(part.data_ptr(), self._peer + at, part.nbytes, stream)
        self._driver.write_value_async(self._peer, self._number, stream)
        return _SentPiece(self._number, part, theirs, out)

    def _finish(self, sent: list[_SentPiece]) -> None:
        """Enqueues the sums of the sent pieces, each after the other rank's flag, and switches to the other half of the
        memory."""
        stream = self._streams.computing()
        for piece in sent:
            self._driver.wait_value_async(self._region.data_ptr(), piece.number, stream)
            torch.add(piece.part, piece.theirs, out=piece.out)  # the sum of two operands does not depend on their order
        self._streams.join()
        self._half = 1 - self._half


def region_bytes() -> int:
    return FLAG_BYTES + 2 * HALF_BYTES
