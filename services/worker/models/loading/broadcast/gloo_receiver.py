"""Child process that is a member of a gloo group and writes broadcasts to memory shared with a worker.

Runs as a script with the descriptor of that memory. Requests arrive on stdin as JSON lines, each answered by one on
stdout: the rank in the group, keys for its store, the size of the next broadcast.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

LOOK_S, LISTEN_S = 0.0005, 0.05  # polling intervals for the broadcast and for failures of other members
ABORTED = -signal.SIGABRT  # gloo aborts when more bytes arrive than expected
MARK_BYTES = 16
LEAST_MARKED = 8  # bytes; shorter tensors may equal the mark by chance


def failed_key(name: str) -> str:
    """Returns the store key of the first failure, whose value is in hexadecimal digits."""
    return f"{name}/failed"


class Failures:
    """Failures of one group published in the store by other members."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._key = store, failed_key(name)
        self._next_at = 0.0

    def poll(self, *, at_once: bool = False) -> str:
        """Returns a published failure in hexadecimal digits; empty: none, or polled less than LISTEN_S ago.

        `at_once`: reads regardless of the last poll. Raises RuntimeError if the trainer has exited.
        """
        if (now := time.monotonic()) < self._next_at and not at_once:
            return ""
        self._next_at = now + LISTEN_S
        return self._store.get(self._key).decode() if self._store.check([self._key]) else ""

    def reason_for(self, error: RuntimeError) -> str:
        """Returns the failure that caused `error`, which other members notice first. Raises `error` if none was
        published."""
        with contextlib.suppress(RuntimeError):
            if said := self.poll(at_once=True):
                return said
        raise error


class GlooReceiver:
    """Member of one gloo group in the child process; writes broadcasts to the shared memory."""

    def __init__(self, memory: int, place: dict[str, Any]) -> None:
        """Joins the group described by `place` (host, port, name, rank, size, timeout); returns when all members have
        joined.

        `memory`: descriptor of the shared memory. Raises RuntimeError, OSError.
        """
        from torch import distributed
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self._memory = memory
        host, port, name, size = place["host"], place["port"], place["name"], place["size"]
        timeout = timedelta(seconds=place["timeout_s"])
        self._store = TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
        self.announce(f"{name}/joining/{place['rank']}")  # a trainer may wait for this key
        # Keys that torch.distributed uses for a group of this name on a prefixed store.
        prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_address_towards(host, port))]
        options._timeout = timeout
        self._group = gloo(prefixed, place["rank"], size, options)
        self._failures, self._name, self._gone = Failures(self._store, name), name, place["gone"]
        self._unfinished: Any = None

    def announce(self, key: str) -> None:
        self._store.set(key, "1")

    def end(self) -> None:
        """Publishes in the store that the worker has exited, unless another failure is there. Thread-safe."""
        self._store.compare_set(failed_key(self._name), "", self._gone)

    def receive(self, num_bytes: int, timeout_s: float) -> dict[str, str]:
        """Receives one broadcast into the shared memory.

        Returns {} or {"failed"} with the failure of another member, or {"wrong"} if too few bytes came, which gloo
        accepts: a mark at the end of the memory is then still there.
        """
        import torch
        from torch.distributed import BroadcastOptions

        memory = mmap.mmap(self._memory, num_bytes)
        content = torch.frombuffer(memory, dtype=torch.uint8)
        end, mark = content[-MARK_BYTES:], torch.randint(256, (min(MARK_BYTES, num_bytes),), dtype=torch.uint8)
        end.copy_(mark)
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=timeout_s)
        work = self._group.broadcast([content], options)
        while not work.is_completed():
            if failed := self._failures.poll():
                self._unfinished = memory, work  # still writes to this memory
                return {"failed": failed}
            time.sleep(LOOK_S)
        try:
            work.wait(options.timeout)
        except RuntimeError as error:
            return {"failed": self._failures.reason_for(error)}
        is_short = num_bytes >= LEAST_MARKED and bool((end == mark).all())
        del content, end, work
        memory.close()
        return {"wrong": "the trainer has sent fewer bytes than it has announced"} if is_short else {}


def _address_towards(host: str, port: int) -> str:
    """Returns this machine's address as seen from `host`. Sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(address)
        return str(towards.getsockname()[0])


class RequestReader:
    """Reads requests from stdin on a thread, so that a closed pipe is noticed while joining; the process then exits."""

    def __init__(self) -> None:
        self.receiver: GlooReceiver | None = None
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield json.loads(self._lines.get())

    def _read(self) -> None:
        """Queues the lines of stdin; at its end reports to the group that the worker is gone and exits the process."""
        for line in sys.stdin.buffer:
            self._lines.put(line)
        if self.receiver is not None:
            with contextlib.suppress(RuntimeError):
                self.receiver.end()
        os._exit(0)


def _responses(memory: int, questions: RequestReader) -> Iterator[dict[str, str]]:
    """Answers the requests in order: the first joins the group, later ones announce a key or receive a broadcast.

    Errors of the group become {"error"} responses.
    """
    for question in questions:
        try:
            if questions.receiver is None:
                questions.receiver = GlooReceiver(memory, question)
                yield {}
            elif "key" in question:
                questions.receiver.announce(question["key"])
                yield {}
            else:
                yield questions.receiver.receive(question["num_bytes"], question["timeout_s"])
        except (RuntimeError, OSError) as error:
            yield {"error": str(error) or type(error).__name__}


def main() -> None:
    """Answers requests of stdin on stdout, one JSON line each, until stdin ends; argv[1] is the descriptor of the
    shared memory."""
    for answer in _responses(int(sys.argv[1]), RequestReader()):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
