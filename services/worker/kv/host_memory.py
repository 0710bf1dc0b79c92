"""KV blocks in host memory, copied to and from the device concurrently with steps.

On CUDA the memory is pinned and a separate stream copies after the steps launched before; waiting for a copy does not
block the launching thread. On the CPU a copy has finished when it has been started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.kv.kv_memory import GIB, BlockShape, free_host_bytes
from quire.services.worker.kv.page_names import names_of
from quire.services.worker.step.plan_violation import require
from quire.shared import columns
from quire.shared.columns import U32
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.worker_limits import MAX_BLOCKS

log = logger("worker.host_memory")

STAGED_BYTES = 64 << 20  # staged on the device at a time: copying it over PCIe takes about a millisecond


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A transfer of whole blocks between the device and distinct places in host memory."""

    to_host: bool
    blocks: U32
    places: U32
    names: list[bytes]  # contents, as in shared/kv/block_hash.py

    @classmethod
    def of(cls, order: pb.Transfer, num_blocks: int, num_places: int, num_groups: int = 1) -> BlockMove:
        """Parses and validates an order: equal counts, ids in range and distinct, known groups. Raises
        PlanViolation."""
        blocks, places = columns.u32(order.block_ids), columns.u32(order.place_ids)
        names = names_of(order, num_groups)
        counts = (len(blocks), len(places), len(names))
        require(len(set(counts)) == 1 and len(blocks) > 0, lambda: f"a transfer of {counts} blocks, places and hashes")
        for what, ids, first, end in (("block", blocks, 1, num_blocks), ("place", places, 0, num_places)):
            inside = bool(ids.min() >= first and ids.max() < end)
            require(inside, lambda: f"transfer: {what} ids are not all in {first}..{end - 1}: {ids}")  # noqa: B023
            once = len(np.unique(ids)) == len(ids)
            require(once, lambda: f"transfer: {what} ids come more than once: {ids}")  # noqa: B023
        return cls(order.to_host, blocks, places, names)


class PendingCopy(Protocol):
    """A copy that has been started."""

    def wait(self) -> None:
        """Blocks until the copy has finished. Callable from any thread."""


class PersistentRegion(Protocol):
    """Host memory with a table of entries by place that outlives the worker process."""

    @property
    def content(self) -> npt.NDArray[np.uint8]:
        """Memory of all places, [num_places, block_bytes]."""

    @property
    def restored(self) -> Mapping[int, bytes]:
        """Names by place left by an earlier process, oldest first."""

    def clear(self, place: int) -> None:
        """Clears the entry of a place before it is written."""

    def commit(self, place: int, name: bytes) -> None:
        """Sets the entry of a place that is completely written."""

    def reset(self, identity: bytes) -> None:
        """Clears all entries; later entries belong to `identity`."""


class HostMemory:
    """Owns the places in host memory. Copies run in the order in which they are started."""

    def __init__(
        self,
        caches: Sequence[LayerCache],
        num_places: int,
        region: PersistentRegion | None = None,
        *,
        staged_bytes: int = STAGED_BYTES,
    ) -> None:
        """Allocates the places, pinned if the device is a GPU, or uses `region`, memory that outlives the worker, with
        the blocks that it restores. `staged_bytes`: most that is staged on a GPU at a time. Raises InvalidArgument if
        CUDA cannot pin the region."""
        self._staged_bytes = staged_bytes
        whole = caches[0].all_layers
        self._parts = _parts_of(caches) if whole is None else list(whole)  # [num_blocks, words of a block] each
        self._whole = whole
        self.num_places = num_places
        words = self._parts[0].size(1)
        self.block_bytes = len(self._parts) * words * self._parts[0].element_size()
        size = (num_places, len(self._parts), words)
        dtype = self._parts[0].dtype
        if region is not None:
            self._memory = torch.from_numpy(region.content).view(dtype).view(size)
        elif whole is None:  # the kernel allocates pages on first use
            self._memory = torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype)
        else:
            self._memory = torch.empty(size, dtype=dtype, pin_memory=True)
        if region is not None and whole is not None:
            _pin(self._memory)
        self._stream = None if whole is None else torch.cuda.Stream()
        self._region, self._lock = region, threading.Lock()
        self._content = {} if region is None else dict(region.restored)  # names, by place
        self._writes = [0] * num_places  # writes started, by place
        self._bytes = self._memory.view(num_places, -1).view(torch.uint8).numpy()

    def row(self, place: int) -> npt.NDArray[np.uint8]:
        """Returns the bytes of a place, [block_bytes], without copying."""
        found: npt.NDArray[np.uint8] = self._bytes[place]
        return found

    def put(self, place: int, name: bytes, content: bytearray) -> None:
        """Writes a block into a place that no copy uses. Callable from any thread."""
        writes = self._invalidate([place])
        self._bytes[place] = np.frombuffer(content, dtype=np.uint8)
        self._content[place] = name
        self._commit([place], writes, [name])

    def start_move(self, move: BlockMove) -> PendingCopy:
        """Starts a copy after the launched steps and the started copies, and records the contents of written places. If
        torch raises, the places' contents are unknown."""
        places = move.places.tolist()
        if not move.to_host:
            return self._start_copy(move, places)
        writes = self._invalidate(places)
        pending = self._start_copy(move, places)
        self._content.update(zip(places, move.names, strict=True))
        return (
            pending
            if self._region is None
            else _CommittedCopy(pending, lambda: self._commit(places, writes, move.names))
        )

    def _invalidate(self, places: list[int]) -> list[int]:
        """Marks places as empty until they are written again; returns the write counts to pass to _commit()."""
        with self._lock:
            for place in places:
                self._content.pop(place, None)
                self._writes[place] += 1
                if self._region is not None:
                    self._region.clear(place)
            return [self._writes[place] for place in places]

    def _commit(self, places: list[int], writes: list[int], names: list[bytes]) -> None:
        """Marks places as written in the persistent region, except those with newer writes. Without a region it does
        nothing."""
        if self._region is None:
            return
        with self._lock:
            for place, write, name in zip(places, writes, names, strict=True):
                if self._writes[place] == write:
                    self._region.commit(place, name)

    def _start_copy(self, move: BlockMove, places: list[int]) -> PendingCopy:
        """Copies at once on the CPU; on CUDA enqueues copies of at most `staged_bytes` on the separate stream, after
        the steps launched so far."""
        if self._stream is None:
            self._copy(move)
            return _FinishedCopy()
        steps = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(steps)
            most = max(1, self._staged_bytes // self.block_bytes)
            for start in range(0, len(places), most):
                self._copy_staged(move.to_host, move.blocks[start : start + most], places[start : start + most])
            done = torch.cuda.Event()
            done.record(self._stream)
        return _EventCopy(done)

    def contents(self) -> dict[int, bytes]:
        """Waits for all copies and returns names by place."""
        if self._stream is not None:
            self._stream.synchronize()
        return dict(self._content)

    def reset(self, identity: bytes) -> None:
        """Discards all contents and makes copies in flight uncommittable; later contents belong to `identity`, a
        model's weights."""
        with self._lock:
            self._content.clear()
            self._writes = [write + 1 for write in self._writes]
            if self._region is not None:
                self._region.reset(identity)

    def _copy(self, move: BlockMove) -> None:
        """Copies blocks on the CPU, synchronously, for each layer's keys and values."""
        blocks, places = (torch.from_numpy(ids.astype(np.int64)) for ids in (move.blocks, move.places))
        for index, part in enumerate(self._parts):
            host_part = self._memory[:, index]
            if move.to_host:
                host_part.index_copy_(0, places, part.index_select(0, blocks))
            else:
                part.index_copy_(0, blocks, host_part.index_select(0, places))

    def _copy_staged(self, to_host: bool, blocks: U32, places: list[int]) -> None:
        """Enqueues a copy through a device buffer that gathers a block's layers, so that a block is one copy over the
        bus."""
        whole = self._whole
        assert whole is not None, "CUDA's KV memory is contiguous"
        ids = upload(blocks, whole.device, np.int64)
        if to_host:
            staged = whole.index_select(1, ids).transpose(0, 1).contiguous()
            for place, block in zip(places, staged, strict=True):
                self._memory[place].copy_(block, non_blocking=True)
            return
        staged = torch.empty((len(places), *self._memory.shape[1:]), dtype=whole.dtype, device=whole.device)
        for place, block in zip(places, staged, strict=True):
            block.copy_(self._memory[place], non_blocking=True)
        whole.index_copy_(1, ids, staged.transpose(0, 1))


def count_places(gib: float, shape: BlockShape, already: int = 0, num_ranks: int = 1, num_hosts: int = 1) -> int:
    """Returns how many blocks `gib` GiB hold, `already` bytes of which are allocated. Each of `num_ranks` stores its
    share of a block; each host has the same number of ranks. Raises InvalidArgument."""
    num_places, free = int(gib * GIB) // (shape.num_bytes * num_ranks), free_host_bytes() + already
    if not 1 <= num_places <= MAX_BLOCKS:
        raise InvalidArgument(
            f"kv_offloading_size: {gib} GiB holds {num_places} blocks of {shape.num_bytes} bytes; it must hold 1 "
            f"to {MAX_BLOCKS}",
            field="kv_offloading_size",
        )
    if num_places * shape.num_bytes * num_ranks // num_hosts > free:
        part = "" if num_hosts == 1 else f", of which 1/{num_hosts} lies on each host,"
        raise InvalidArgument(
            f"kv_offloading_size: {gib} GiB{part} is more than the {free / GIB:.1f} GiB that this host has free",
            field="kv_offloading_size",
        )
    return num_places


def open_host_memory(
    caches: Sequence[LayerCache], num_places: int, region: PersistentRegion | None = None
) -> HostMemory:
    """Opens host memory for KV and logs its size, restored blocks and duration. Raises as HostMemory()."""
    started = time.perf_counter()
    memory = HostMemory(caches, num_places, region)
    found, took_s = len(memory.contents()), round(time.perf_counter() - started, 2)
    log.info("host memory for KV allocated", blocks=num_places, found=found, seconds=took_s)
    return memory


def _pin(memory: Tensor) -> None:
    """Pins existing memory so that the device can copy it by DMA. Raises InvalidArgument if CUDA refuses."""
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0))
    if error:
        raise InvalidArgument(f"kv_offloading_region: CUDA cannot pin it (error {error})", field="kv_offloading_region")


@dataclass(frozen=True, slots=True)
class _CommittedCopy:
    """A copy whose completion is recorded by `note`."""

    pending: PendingCopy
    note: Callable[[], None]

    def wait(self) -> None:
        self.pending.wait()
        self.note()


class _FinishedCopy:
    def wait(self) -> None:
        """No-op: the copy has finished."""


@dataclass(frozen=True, slots=True)
class _EventCopy:
    """Copy on a CUDA stream that has finished when `event` has passed."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


def _parts_of(caches: Sequence[LayerCache]) -> list[Tensor]:
    """Returns the keys and values of every layer as bytes [num_blocks, bytes of a block]."""
    return [part.view(part.size(0), -1).view(torch.uint8) for cache in caches for part in cache.parts]
