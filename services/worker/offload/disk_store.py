"""KV blocks on disk, below host memory; background threads write and read the files concurrently with steps.

A disk may be full, fail, be slow or hang. A block that cannot be written is not on disk; one that cannot be read, is
corrupt or arrives too late is lost and recomputed. A transfer is answered in bounded time; what a thread does with it
afterwards has no effect."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.services.worker.offload import block_file
from quire.services.worker.offload.block_file import BlockMismatch
from quire.services.worker.offload.disk_moves import DiskMove, OnMoved, PendingDiskMove
from quire.services.worker.offload.folder import BlockFolder, file_of, remove
from quire.shared.logs import logger

log = logger("worker.offload")

MOVE_TIMEOUT_S = 5.0  # recomputing the blocks of a transfer rarely takes longer
NUM_THREADS = {"write": 2, "read": 4}
MAX_QUEUED = 4096  # blocks; far more than a scheduler has in flight
WRITER_NICENESS = 10  # below the computing threads
LOG_EVERY = 1000  # log the first failure of a kind and every 1000th

Task = Callable[[], None]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class HostPlaces(Protocol):
    """Places in host memory that the disk reads and writes."""

    @property
    def block_bytes(self) -> int: ...

    def row(self, place: int) -> npt.NDArray[np.uint8]:
        """Returns the bytes of a place, [block_bytes], without copying."""

    def put(self, place: int, name: bytes, content: bytearray) -> None: ...


class DiskObserver(Protocol):
    """Callbacks for metrics of disk operations, on any thread; wrote() and on_read() count bytes of blocks."""

    def wrote(self, num_bytes: int) -> None: ...

    def on_read(self, num_bytes: int) -> None: ...

    def failed(self, what: str, reason: str) -> None:
        """Counts a failure. `what`: write or read; `reason`: full, error, wrong, late or busy."""


class _NoObserver:
    def wrote(self, num_bytes: int) -> None: ...

    def on_read(self, num_bytes: int) -> None: ...

    def failed(self, what: str, reason: str) -> None: ...


NO_OBSERVER: DiskObserver = _NoObserver()


class DiskStore:
    """Owns the files and their threads. Methods are callable from any thread and never wait for the disk."""

    def __init__(
        self,
        folder: BlockFolder,
        identity: bytes,
        about: Mapping[str, object],
        memory: HostPlaces,
        num_places: int,
        *,
        observer: DiskObserver,
        timeout_s: float = MOVE_TIMEOUT_S,
    ) -> None:
        """Finds the blocks of `identity` in `folder` and starts the threads. `about`: readable description of the
        identity, stored in the folder; `memory`: places in host memory; `num_places`: places on disk; `timeout_s`:
        after it a transfer is answered."""
        self.num_places = num_places
        self._folder, self._identity, self._memory, self._observer = folder, identity, memory, observer
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # held at most while copying one block in memory
        self._epoch = 0
        self._pending_moves: set[PendingDiskMove] = set()
        found = folder.open(identity, about, num_places, memory.block_bytes)
        self._content = {block.place: block.name for block in found}
        self._generation = folder.current
        self._names = itertools.count()
        self._failures: dict[tuple[str, str], int] = {}
        self._active: dict[str, list[PendingDiskMove]] = {kind: [] for kind in NUM_THREADS}
        self._tasks: dict[str, queue.SimpleQueue[Task | None]] = {kind: queue.SimpleQueue() for kind in NUM_THREADS}
        self._overdue = threading.Condition(self._lock)
        self._closed = False
        kinds = [kind for kind, count in NUM_THREADS.items() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), name=f"disk-{kind}-{number}", daemon=True)
            for number, kind in enumerate(kinds)
        ]
        self._threads.append(threading.Thread(target=self._watch, name="disk-watch", daemon=True))
        for thread in self._threads:
            thread.start()

    # Callable from any thread.

    def contents(self) -> dict[int, bytes]:
        """Returns names by place, least recently written first."""
        with self._lock:
            return dict(self._content)

    def start_move(self, move: DiskMove, answer: OnMoved) -> None:
        """Queues the blocks of a transfer for the disk threads; `answer` gets the indices of lost blocks and the
        duration, from another thread by `timeout_s`, or at once with all blocks lost if too much is queued or all
        threads hang."""
        kind = _kind(move)
        pending = PendingDiskMove(move, answer, self._epoch, time.perf_counter_ns())
        with self._lock:
            num_stuck = sum(at_work.answered for at_work in self._active[kind])
            busy = self._tasks[kind].qsize() > MAX_QUEUED or num_stuck == NUM_THREADS[kind]
            if not busy:
                self._pending_moves.add(pending)
                self._overdue.notify()
        if busy:
            for _ in move.names:
                self._failed(kind, "busy")
            answer([*range(len(move.names))], 0)
            return
        for number in range(len(move.names)):
            self._tasks[kind].put(functools.partial(self._move, pending, number))

    def end_epoch(self) -> dict[int, bytes]:
        """Discards pending transfers without answering them, as their attachment has ended; returns the contents."""
        with self._lock:
            self._end_moves()
            return dict(self._content)

    def reset(self, identity: bytes) -> None:
        """Discards all contents and pending transfers; later blocks belong to `identity`. The files are removed in the
        background."""
        with self._lock:
            self._end_moves()
            self._content.clear()
            self._identity = identity
            old = self._folder.start_generation(identity)
            self._generation = self._folder.current
        self._tasks["write"].put(functools.partial(remove, old))

    def close(self, timeout_s: float) -> None:
        """Stops the threads, as far as they end in time, and unlocks the folder."""
        with self._lock:
            self._end_moves()
            self._closed = True
            self._overdue.notify()
        for kind, count in NUM_THREADS.items():
            for _ in range(count):
                self._tasks[kind].put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._folder.close()

    def _end_moves(self) -> None:
        """Marks all pending transfers as answered, so that their threads discard the blocks. Called with the lock
        held."""
        self._epoch += 1
        for pending in self._pending_moves:
            pending.answered = True
        self._pending_moves.clear()

    # On the disk threads.

    def _run(self, kind: str) -> None:
        """Thread body: runs tasks of one kind until None; writers have a lower priority. An error of a task is logged
        and affects one block."""
        if kind == "write":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        while (task := self._tasks[kind].get()) is not None:
            try:
                task()
            except Exception:  # affects one block only
                log.exception("a disk task failed")

    def _move(self, pending: PendingDiskMove, number: int) -> None:
        """Task of a disk thread: writes or reads one block of a transfer. A failure is counted and the block lost; does
        nothing if the transfer is answered already."""
        if pending.answered:
            return
        kind, done = _kind(pending.move), False
        with self._lock:
            self._active[kind].append(pending)
        try:
            done = self._write(pending, number) if pending.move.to_disk else self._read(pending, number)
        except BlockMismatch as wrong:
            self._failed(kind, "wrong", str(wrong))
        except OSError as error:
            self._failed(kind, "full" if error.errno in FULL else "error", f"{error.strerror}")
        finally:
            with self._lock:
                self._active[kind].remove(pending)
            self._finish(pending, number, lost=not done)

    def _write(self, pending: PendingDiskMove, number: int) -> bool:
        """Writes a block under a temporary name, renames it and records its name, after removing the place's old block;
        returns False, leaving no file, if its transfer has been answered meanwhile. Raises OSError."""
        move = pending.move
        place, name = move.disk_places[number], move.names[number]
        with self._lock:
            generation, identity = self._generation, self._identity
            old = None if pending.answered else self._content.pop(place, None)
        if old is not None:
            file_of(generation, place, old).unlink(missing_ok=True)
        path = file_of(generation, place, name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{next(self._names)}.new")
        content = self._memory.row(move.places[number]).data
        block_file.write(temporary, block_file.header(identity, name, content), content)
        with self._lock:  # the place in host memory is reserved until the answer
            is_wanted = not pending.answered
        if not is_wanted:
            temporary.unlink(missing_ok=True)
            return False
        temporary.replace(path)
        with self._lock:
            is_wanted = not pending.answered
            if is_wanted:
                self._content[place] = name
        if not is_wanted:
            path.unlink(missing_ok=True)
            return False
        self._observer.wrote(len(content))
        return True

    def _read(self, pending: PendingDiskMove, number: int) -> bool:
        """Reads a block into host memory; returns False if its transfer has been answered meanwhile. Raises OSError or
        BlockMismatch, after removing the file."""
        move = pending.move
        place, name = move.disk_places[number], move.names[number]
        with self._lock:
            generation, identity = self._generation, self._identity
        path, content = file_of(generation, place, name), bytearray(self._memory.block_bytes)
        try:
            block_file.read_into(path, identity, name, content)
        except BlockMismatch:
            remove(path)
            raise
        with self._lock:
            if pending.answered:
                return False
            self._memory.put(move.places[number], name, content)
        self._observer.on_read(len(content))
        return True

    def _finish(self, pending: PendingDiskMove, number: int, *, lost: bool) -> None:
        """Marks a block of a transfer as done or lost and answers the transfer after its last block. A lost block is no
        longer on disk."""
        with self._lock:
            if pending.answered:
                return
            pending.remaining.discard(number)
            if lost:
                pending.lost.append(number)
                self._content.pop(pending.move.disk_places[number], None)
            if pending.remaining:
                return
            pending.answered = True
            self._pending_moves.discard(pending)
        self._answer(pending)

    def _answer(self, pending: PendingDiskMove) -> None:
        """Calls the transfer's `answer` with the sorted indices of lost blocks and the duration."""
        took_us = (time.perf_counter_ns() - pending.begun_ns) // 1000
        pending.answer(sorted(pending.lost), took_us)

    # On the watching thread.

    def _watch(self) -> None:
        """Thread body: answers overdue transfers, with their unfinished blocks lost, until the store is closed."""
        while not self._closed:
            for pending in self._take_overdue():
                for _ in pending.remaining:
                    self._failed(_kind(pending.move), "late")
                self._answer(pending)

    def _take_overdue(self) -> list[PendingDiskMove]:
        """Waits for overdue transfers, marks them as answered with their remaining blocks lost, and returns them;
        returns [] when closed."""
        patience_ns = int(self._timeout_s * 1e9)
        with self._lock:
            while not self._closed:
                now = time.perf_counter_ns()
                overdue = [move for move in self._pending_moves if now - move.begun_ns >= patience_ns]
                if overdue:
                    break
                first = min((move.begun_ns for move in self._pending_moves), default=None)
                self._overdue.wait(None if first is None else (first + patience_ns - now) / 1e9)
            else:
                return []
            for pending in overdue:
                pending.answered = True
                pending.lost += pending.remaining
                self._pending_moves.discard(pending)
            return overdue

    def _failed(self, what: str, reason: str, why: str = "") -> None:
        """Counts a failure at the observer and logs the first and every LOG_EVERY-th of its kind."""
        self._observer.failed(what, reason)
        count = self._failures[what, reason] = self._failures.get((what, reason), 0) + 1
        if count % LOG_EVERY == 1:
            log.warning(
                "disk tier for KV: operations failed",
                failed=what,
                reason=reason,
                why=why,
                count=count,
                folder=str(self._folder.current),
            )


def _kind(move: DiskMove) -> str:
    return "write" if move.to_disk else "read"
