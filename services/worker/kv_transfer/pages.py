"""A worker's blocks as bytes, read for other workers and written from them, concurrently with steps.

On CUDA a separate stream copies after the steps launched before, and the device thread does not wait. On the CPU a copy
has finished when it has been started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.kv.host_memory import PendingCopy
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.kv_transfer.layout import with_version
from quire.services.worker.kv_transfer.peer_pages import PeerBlocks, PeerPages, SharedPages
from quire.shared.columns import U32

# Bytes copied at a time: about a millisecond on either device; on the CPU steps wait for it.
PIECE_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}


@dataclass(frozen=True, slots=True)
class ReadPages:
    """Pages being copied to host memory, uint8 [num_blocks, bytes of a page]; complete when `pending` has finished."""

    content: Tensor
    pending: PendingCopy


class Pages:
    """Byte access to blocks in one contiguous device tensor, or in one tensor per layer."""

    def __init__(self, caches: Sequence[LayerCache], layout: bytes) -> None:
        """Opens byte access to `caches`; on CUDA creates a stream and exports the memory to other processes where
        possible. `layout`: digest of what the bytes mean (layout.py)."""
        self._whole = caches[0].all_layers
        self._parts = _parts_of(caches) if self._whole is None else [*self._whole.view(torch.uint8)]
        self._words = self._parts[0].size(1)  # bytes of one layer's keys (or values) in a block
        self._stream = None if self._whole is None else torch.cuda.Stream()
        self.peers = None if self._whole is None else PeerPages.of(self._whole)
        self._layout, self._weight_version = layout, _unchanged
        self.block_bytes = len(self._parts) * self._words
        self.blocks_per_piece = max(1, PIECE_BYTES[self._parts[0].device.type] // self.block_bytes)

    @property
    def wants_pinned(self) -> bool:
        """Returns whether written pages should be in pinned memory; otherwise the device thread copies them there."""
        return self._stream is not None

    @property
    def layout(self) -> bytes:
        """Current layout digest, 32 bytes."""
        return with_version(self._layout, self._weight_version())

    def set_weight_version(self, weight_version: Callable[[], str]) -> None:
        """Sets the source of the version of the weights that fill the pages."""
        self._weight_version = weight_version

    def read(self, blocks: U32) -> ReadPages:
        """Starts copying blocks to host memory, after the launched steps; on the CPU the copy has finished on
        return."""
        if self._whole is None or self._stream is None:
            ids = torch.from_numpy(blocks.astype(np.int64))
            content = torch.empty((len(blocks), len(self._parts), self._words), dtype=torch.uint8)
            for index, part in enumerate(self._parts):
                content[:, index] = part.index_select(0, ids)
            return ReadPages(content.view(len(blocks), -1), COMPLETED)
        steps = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(steps)
            ids = upload(blocks, self._whole.device, np.int64)
            staged = self._whole.index_select(1, ids).transpose(0, 1).contiguous()  # [blocks, parts, words]
            host = torch.empty(staged.shape, dtype=staged.dtype, pin_memory=True)
            host.copy_(staged, non_blocking=True)
            return ReadPages(host.view(len(blocks), -1).view(torch.uint8), self._recorded(self._stream))

    def wait_filled(self) -> ReadPages:
        """Returns an empty read that finishes with the launched steps; copies nothing."""
        return ReadPages(torch.empty(0, dtype=torch.uint8), self._recorded(torch.cuda.current_stream()))

    def write(self, blocks: U32, content: Tensor | PeerBlocks) -> PendingCopy:
        """Starts writing blocks after the launched steps; readers must wait for the result. `content`: uint8
        [num_blocks, bytes of a page] in host memory, or blocks of another GPU."""
        if isinstance(content, PeerBlocks):
            return self._copy(blocks, content)
        if self._whole is None or self._stream is None:
            ids = torch.from_numpy(blocks.astype(np.int64))
            pages = content.view(len(blocks), len(self._parts), self._words)
            for index, part in enumerate(self._parts):
                part.index_copy_(0, ids, pages[:, index])
            return COMPLETED
        steps = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(steps)
            ids = upload(blocks, self._whole.device, np.int64)
            pinned = content if content.is_pinned() else content.pin_memory()
            staged = pinned.view(torch.int64).to(self._whole.device, non_blocking=True)
            self._whole.index_copy_(1, ids, staged.view(len(blocks), len(self._parts), -1).transpose(0, 1))
            return self._recorded(self._stream, pinned)

    def _copy(self, blocks: U32, content: PeerBlocks) -> PendingCopy:
        """Starts copying blocks from another GPU's memory after the launched steps, and keeps that memory open until
        the copy has finished. Raises PeerMemoryError, with no copy running."""
        assert self.peers is not None, "peer blocks come from an open peer"
        assert self._stream is not None
        self.peers.acquire(content.pages)
        try:
            self._stream.wait_stream(torch.cuda.current_stream())
            self.peers.copy(content, blocks, self._stream.cuda_stream)
            return _PeerCopy(self._recorded(self._stream), self.peers, content.pages)
        except Exception:
            self._stream.synchronize()  # part of the copy may be running, and the blocks will be reallocated
            self.peers.release(content.pages)
            raise

    def synchronize(self) -> None:
        """Waits until no copy is running."""
        if self._stream is not None:
            self._stream.synchronize()

    def _recorded(self, stream: torch.cuda.Stream, kept: Tensor | None = None) -> _EventCopy:
        """Returns a copy that finishes when `stream` has passed this point. `kept`: source tensor to keep alive until
        then."""
        done = torch.cuda.Event()
        done.record(stream)
        return _EventCopy(done, kept)


class NoPages:
    """Replaces Pages where blocks cannot be exchanged with other workers; no page order may reach it."""

    layout = b""
    block_bytes = 0

    def set_weight_version(self, weight_version: Callable[[], str]) -> None:
        """No-op: there is no layout digest."""

    def read(self, blocks: U32) -> ReadPages:
        raise AssertionError("no page is asked for")

    def wait_filled(self) -> ReadPages:
        raise AssertionError("no page is asked for")

    def write(self, blocks: U32, content: Tensor | PeerBlocks) -> PendingCopy:
        raise AssertionError("no page is written")

    def synchronize(self) -> None:
        """No-op: there are no copies."""


def _unchanged() -> str:
    return ""


class _FinishedCopy:
    def wait(self) -> None:
        """No-op: the copy has finished."""


COMPLETED: PendingCopy = _FinishedCopy()


@dataclass(frozen=True, slots=True)
class _EventCopy:
    """Copy that has finished when the stream has passed `event`."""

    event: torch.cuda.Event
    kept: Tensor | None  # source of the copy, kept alive until it has finished

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True, slots=True)
class _PeerCopy:
    """A copy from another worker's memory, which stays open until the copy has finished."""

    copying: PendingCopy
    peers: PeerPages
    pages: SharedPages

    def wait(self) -> None:
        self.copying.wait()
        self.peers.release(self.pages)


def _parts_of(caches: Sequence[LayerCache]) -> list[Tensor]:
    """Returns the keys and values of every layer, [num_blocks, bytes] each."""
    return [part.view(part.size(0), -1).view(torch.uint8) for cache in caches for part in cache.parts]
