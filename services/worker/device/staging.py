"""Transfers of a step's arrays between host and device, one copy per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.services.worker.device.device import Device
from quire.shared.step_value import step_value

Array = npt.NDArray[Any]

WORDS_PER_ARRAY = 4  # arrays start at multiples of 16 bytes: kernels load whole vectors
RESULT_WORDS = 1024
RING = 4  # buffers: steps whose copies may be in flight before a buffer is reused


class Downloads(Protocol):
    """Tensors being copied to the host."""

    def arrays(self) -> list[Array]:
        """Returns the arrays once they have arrived. May be called once: the memory is reused."""


class Staging(Protocol):
    """Uploads arrays of integers that fit 32 bits (int32 on CUDA) and downloads result tensors, without waiting for the
    device. On the CPU tensors share the arrays' memory."""

    def download(self, tensors: list[Tensor]) -> Downloads: ...

    def upload(self, arrays: list[Array]) -> list[Tensor]: ...

    def upload_into(self, columns: Tensor, arrays: list[Array], padding: list[Array | int]) -> None:
        """Copies each array into its row of `columns` [len(arrays), stride]; `padding` fills the rest of each row."""


def staging_for(device: Device) -> Staging:
    """Returns zero-copy staging for the CPU, else staging through pinned buffers."""
    return InPlaceStaging() if device.is_synchronous else PinnedStaging(device.torch_device)


class InPlaceStaging:
    """Staging of the CPU: uploads and downloads are views of the same memory."""

    def upload(self, arrays: list[Array]) -> list[Tensor]:
        return list(map(torch.from_numpy, arrays))

    def upload_into(self, columns: Tensor, arrays: list[Array], padding: list[Array | int]) -> None:
        _fill(columns.numpy(), arrays, padding)

    def download(self, tensors: list[Tensor]) -> Downloads:
        return _HostDownload(tensors)


@step_value
class _HostDownload:
    tensors: list[Tensor]

    def arrays(self) -> list[Array]:
        return [tensor.numpy() for tensor in self.tensors]


@dataclass(slots=True)
class _Buffer:
    """Pinned staging buffer of one upload, reusable when `copied` has passed."""

    host: Tensor  # pinned int32
    words: Array  # the same memory
    copied: torch.cuda.Event  # recorded after the last copy out of the buffer


class PinnedStaging:
    """Staging of CUDA: one asynchronous copy for all arrays, out of a ring of pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._capacity = 0
        self._ring: list[_Buffer] = []
        self._next = 0
        self._spare: list[Tensor] = []  # recycled pinned int32 [RESULT_WORDS], shared by several threads

    def download(self, tensors: list[Tensor]) -> Downloads:
        """Starts copying to the host and returns at once. The first tensor (token ids, int32) goes to recycled memory,
        as pinning takes 10 us; all others to newly pinned memory. The caller waits for the device before arrays()."""
        first, *rest = tensors
        size = first.numel()
        memory = self._spare.pop() if self._spare and size <= RESULT_WORDS else _pinned(max(size, RESULT_WORDS))
        memory[:size].copy_(first.view(-1), non_blocking=True)
        others = [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in rest]
        return _PinnedDownload(memory, size, others, self._spare)

    def upload(self, arrays: list[Array]) -> list[Tensor]:
        """Copies all arrays to the device as one int32 copy and returns one view per array, each aligned to 16 bytes.
        Waits only if RING copies are in flight."""
        sizes = [aligned(array.size) for array in arrays]
        total = sum(sizes)
        buffer = self._next_buffer(total)
        words = buffer.words
        offset = 0
        for array, size in zip(arrays, sizes, strict=True):
            words[offset : offset + array.size] = array
            offset += size
        on_device = buffer.host[:total].to(self._device, non_blocking=True)
        buffer.copied.record()
        parts = on_device.split(sizes)
        return [part[: array.size] for part, array in zip(parts, arrays, strict=True)]

    def upload_into(self, columns: Tensor, arrays: list[Array], padding: list[Array | int]) -> None:
        """Stages the arrays and their padding in a pinned buffer and enqueues one copy to `columns`, the static input
        of a CUDA graph."""
        total = columns.numel()
        buffer = self._next_buffer(total)
        _fill(buffer.words[:total].reshape(columns.shape), arrays, padding)
        columns.view(-1).copy_(buffer.host[:total], non_blocking=True)
        buffer.copied.record()

    def _next_buffer(self, total: int) -> _Buffer:
        """Returns the ring's next buffer of at least `total` words, after the copy out of it has finished; a larger
        `total` reallocates the ring at twice its size."""
        if total > self._capacity:
            self._capacity = max(2 * self._capacity, total)
            self._ring = [self._new_buffer() for _ in range(RING)]
        buffer = self._ring[self._next]
        self._next = (self._next + 1) % RING
        buffer.copied.synchronize()  # returns at once unless RING steps are in flight
        return buffer

    def _new_buffer(self) -> _Buffer:
        host = _pinned(self._capacity)
        return _Buffer(host, host.numpy(), torch.cuda.Event())


@step_value
class _PinnedDownload:
    """Download into pinned memory; the first array is copied out so that its memory can be recycled."""

    memory: Tensor
    size: int
    others: list[Tensor]
    spare: list[Tensor]

    def arrays(self) -> list[Array]:
        first = self.memory.numpy()[: self.size].copy()
        if len(self.memory) == RESULT_WORDS:
            self.spare.append(self.memory)
        return [first, *(tensor.numpy() for tensor in self.others)]


def aligned(num_words: int) -> int:
    """Rounds a word count up so that the next array starts aligned."""
    return -(-num_words // WORDS_PER_ARRAY) * WORDS_PER_ARRAY


def _pinned(num_words: int) -> Tensor:
    return torch.empty(num_words, dtype=torch.int32, pin_memory=True)


def _fill(words: Array, arrays: list[Array], padding: list[Array | int]) -> None:
    """Writes each array to the start of its row and its filler to the rest of the row."""
    for row, array, filler in zip(words, arrays, padding, strict=True):
        row[: len(array)] = array
        row[len(array) :] = filler


def as_words(array: Array) -> npt.NDArray[np.int32]:
    """Returns the same bytes as int32, so that any column can travel in the one copy."""
    return np.ascontiguousarray(array).view(np.int32)


def upload(values: npt.ArrayLike, device: torch.device, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Copies values to the device without waiting: CUDA copies unpinned memory before the call returns."""
    return torch.from_numpy(np.asarray(values, dtype=dtype)).to(device, non_blocking=True)
