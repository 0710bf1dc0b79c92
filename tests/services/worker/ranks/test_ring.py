"""Commands reach every reader whole and in order, however long they are and however late they are read."""

from __future__ import annotations

import random
import threading

from quire.services.worker.ranks.ring import HEAD, Ring

PATIENCE_S = 60.0


def read_all(ring: Ring, number: int, count: int) -> list[bytes]:
    reader = ring.reader(number)
    return [reader.read() for _ in range(count)]


def test_commands_of_any_length_wrap_around_the_memory() -> None:
    choose = random.Random(4)
    sent = [choose.randbytes(choose.choice((0, 1, 7, 60, 64, 65, 400))) for _ in range(300)]
    ring = Ring(2, capacity=64)
    found: dict[int, list[bytes]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: read_all(ring, n, len(sent))}), daemon=True)
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for command in sent:
        assert ring.write(command, PATIENCE_S) is None
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == {0: sent, 1: sent}
    ring.close()


def test_commands_wait_for_a_late_reader() -> None:
    ring = Ring(1)
    for command in (b"one", b"", b"three"):
        assert ring.write(command, 0.0) is None
    assert read_all(ring, 0, 3) == [b"one", b"", b"three"]
    ring.close()


def test_a_reader_that_never_reads_is_named_when_there_is_no_room_left() -> None:
    ring = Ring(2, capacity=HEAD.size + 4)
    assert ring.write(b"full", 0.0) is None
    assert read_all(ring, 0, 1) == [b"full"]
    assert ring.write(b"more", 0.0) == 1
    ring.close()


def test_reader_sends_heartbeats() -> None:
    ring = Ring(2)
    reader = ring.reader(1)
    before = ring.heartbeat(1)
    reader.send_heartbeat()
    assert ring.heartbeat(1) > before
    assert ring.heartbeat(0) == 0
    ring.close()
