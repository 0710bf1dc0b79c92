"""A process that is a member of a gloo group and puts what is broadcast into memory that it shares with a worker.

Run as a script, with the descriptor of that memory. Questions come on stdin as lines of JSON, each is answered by one
on stdout: the place in the group, keys for its store, and how many bytes the next broadcast has.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

ABORTED = -signal.SIGABRT  # what gloo does when more comes than there is room for
MARK_BYTES = 16
LEAST_MARKED = 8  # bytes: of fewer the right ones may be those of the mark


class Receiver:
    """Of one group."""

    def __init__(self, memory: int, place: dict[str, Any]) -> None:
        """Returns when all members are there. Raises RuntimeError, OSError."""
        from torch import distributed
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self._memory = memory
        host, port, name, size = place["host"], place["port"], place["name"], place["size"]
        timeout = timedelta(seconds=place["timeout_s"])
        self._store = TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
        self.say(f"{name}/joining/{place['rank']}")  # to a trainer that waits for it
        # The keys that torch.distributed gives a group of this name on a store that is prefixed with it.
        prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_address_towards(host, port))]
        options._timeout = timeout
        self._group = gloo(prefixed, place["rank"], size, options)

    def say(self, key: str) -> None:
        self._store.set(key, "1")

    def receive(self, num_bytes: int, timeout_s: float) -> str:
        """Returns what is wrong with what has come. Its memory has a mark at its end, to see whether the trainer has
        sent so much: gloo fills as much as comes."""
        import torch
        from torch.distributed import BroadcastOptions

        with closing(mmap.mmap(self._memory, num_bytes)) as memory:
            content = torch.frombuffer(memory, dtype=torch.uint8)
            end, mark = content[-MARK_BYTES:], torch.randint(256, (min(MARK_BYTES, num_bytes),), dtype=torch.uint8)
            end.copy_(mark)
            options = BroadcastOptions()
            options.rootRank, options.timeout = 0, timedelta(seconds=timeout_s)
            self._group.broadcast([content], options).wait(options.timeout)
            is_short = num_bytes >= LEAST_MARKED and bool((end == mark).all())
            del content, end
        return "the trainer has sent fewer bytes than it has announced" if is_short else ""


def _address_towards(host: str, port: int) -> str:
    """Of this machine, as seen from there. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(address)
        return str(towards.getsockname()[0])


def _answers(memory: int, questions: Iterator[dict[str, Any]]) -> Iterator[dict[str, str]]:
    receiver: Receiver | None = None
    for question in questions:
        try:
            if receiver is None:
                receiver = Receiver(memory, question)
                yield {}
            elif "key" in question:
                receiver.say(question["key"])
                yield {}
            else:
                wrong = receiver.receive(question["num_bytes"], question["timeout_s"])
                yield {"wrong": wrong} if wrong else {}
        except (RuntimeError, OSError) as error:
            yield {"error": str(error) or type(error).__name__}


def _until_end() -> Iterator[dict[str, Any]]:
    """Whoever asks may be gone while the group is waited for."""
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def main() -> None:
    for answer in _answers(int(sys.argv[1]), _until_end()):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
