"""A process that is a member of a gloo group and puts what is broadcast into memory that it shares with a worker.

Run as a script, with the descriptor of that memory. Questions come on stdin as lines of JSON, each is answered by one
on stdout: the place in the group, keys for its store, and how many bytes the next broadcast has.
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

LOOK_S, LISTEN_S = 0.0005, 0.05  # for what comes, and whether another member has failed
ABORTED = -signal.SIGABRT  # what gloo does when more comes than there is room for
MARK_BYTES = 16
LEAST_MARKED = 8  # bytes: of fewer the right ones may be those of the mark


def failed_key(name: str) -> str:
    """Under which the first member that fails says why, as hexadecimal digits."""
    return f"{name}/failed"


class Failures:
    """Those of the other members."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._key = store, failed_key(name)
        self._next_at = 0.0

    def poll(self, *, at_once: bool = False) -> str:
        """What one has said; empty: none has, or it is too soon to look again. Raises RuntimeError once the trainer is
        gone."""
        if (now := time.monotonic()) < self._next_at and not at_once:
            return ""
        self._next_at = now + LISTEN_S
        return self._store.get(self._key).decode() if self._store.check([self._key]) else ""

    def reason_for(self, error: RuntimeError) -> str:
        """What one has said before it left, which is what others hear first. Raises the error if none has."""
        with contextlib.suppress(RuntimeError):
            if said := self.poll(at_once=True):
                return said
        raise error


class GlooReceiver:
    """Of one group."""

    def __init__(self, memory: int, place: dict[str, Any]) -> None:
        """Returns when all members are there. Raises RuntimeError, OSError."""
        from torch import distributed
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self._memory = memory
        host, port, name, size = place["host"], place["port"], place["name"], place["size"]
        timeout = timedelta(seconds=place["timeout_s"])
        self._store = TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
        self.announce(f"{name}/joining/{place['rank']}")  # to a trainer that waits for it
        # The keys that torch.distributed gives a group of this name on a store that is prefixed with it.
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
        """Whoever asked is gone: the others hear of it. Any thread may call."""
        self._store.compare_set(failed_key(self._name), "", self._gone)

    def receive(self, num_bytes: int, timeout_s: float) -> dict[str, str]:
        """Returns what is wrong with what has come, or what another member has said. Its memory has a mark at its end,
        to see whether the trainer has sent so much: gloo fills as much as comes."""
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
                self._unfinished = memory, work  # which still writes there
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
    """Of this machine, as seen from there. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(address)
        return str(towards.getsockname()[0])


class RequestReader:
    """On stdin. Whoever asks may be gone while the group is waited for."""

    def __init__(self) -> None:
        self.receiver: GlooReceiver | None = None
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield json.loads(self._lines.get())

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._lines.put(line)
        if self.receiver is not None:
            with contextlib.suppress(RuntimeError):
                self.receiver.end()
        os._exit(0)


def _responses(memory: int, questions: RequestReader) -> Iterator[dict[str, str]]:
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
    for answer in _responses(int(sys.argv[1]), RequestReader()):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
