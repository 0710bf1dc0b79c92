"""Streams without readers: how long they have been unread, and whether this frontend still needs their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.services.frontend.streams.local_stream import LocalStream
from quire.services.frontend.streams.store import StreamStore
from quire.services.frontend.streams.stream import Stream


@contextmanager
def count_reader(stream: Stream, wake: Callable[[], None], clock: Callable[[], float]) -> Iterator[None]:
    """Counts a reader of the stream for the duration of the `with`. `wake`: has remote streams polled at once, now that
    one is awaited; `clock`: monotonic seconds, from which the stream is unread afterwards."""
    stream.num_readers += 1
    wake()
    try:
        yield
    finally:
        stream.num_readers -= 1
        stream.unread_since_s = clock()


def update_unread(stream: Stream, local: LocalStream | None, now: float) -> float:
    """Returns the seconds for which no frontend has read the stream, and restarts them where it has a reader here or,
    as its producer knows, elsewhere. `local`: the stream's producer, if it is here; `now`: monotonic seconds."""
    is_read_elsewhere = local is not None and local.producer.has_remote_reader
    if stream.num_readers or stream.unread_since_s is None or is_read_elsewhere:
        stream.unread_since_s = now
    return now - stream.unread_since_s


def is_stored_whole(stream: Stream, store: StreamStore) -> bool:
    """Returns whether a shared store has every message of an ended stream that has no reader here."""
    return store.is_shared and stream.num_stored == len(stream.entries) and not stream.num_readers
