"""Streams of weights: relays pieces from one call to the calls of several workers, a few pieces at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager

from quire.shared.errors import InvalidArgument, NotFound
from quire.shared.pb.common.v1.weights_stream_pb2 import WeightsPiece
from quire.shared.tensor_headers import DEFAULT_GROUP

MAX_WAITING = 4  # queued pieces per worker
ID_BYTES = 16

Pieces = asyncio.Queue[WeightsPiece | None]  # None: end of the stream


class WeightStream:
    """Stream to some workers, each of which fetches it once."""

    def __init__(self, workers: Iterable[str]) -> None:
        self.id = secrets.token_bytes(ID_BYTES)
        self.queues: dict[str, Pieces] = {worker: asyncio.Queue(MAX_WAITING) for worker in workers}
        self.group = ""  # trainer group that broadcasts the content; then no content passes through the stream

    async def pump(self, pieces: AsyncIterator[WeightsPiece]) -> None:
        """Relays pieces as fast as the slowest worker takes them. Raises InvalidArgument if the stream ends without an
        end piece."""
        ended = False
        async for piece in pieces:
            ended = piece.HasField("end")
            if piece.HasField("broadcast"):
                self.group = piece.broadcast.group_name or DEFAULT_GROUP
            for queue in self.queues.values():
                await queue.put(piece)
        if not ended:
            raise InvalidArgument("piece: the stream of weights ended without its last message", field="piece")

    def close(self) -> None:
        """Ends the stream for all workers; pieces that they have not fetched are dropped."""
        for queue in self.queues.values():
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)


class WeightStreams:
    """Open streams of weights by id, and access to each worker's copy of their pieces."""

    def __init__(self) -> None:
        self._open: dict[bytes, WeightStream] = {}

    @contextmanager
    def open(self, workers: Iterable[str]) -> Iterator[WeightStream]:
        """Context in which a new stream to these workers can be fetched by its id; on exit it is removed and ends
        for all of them."""
        stream = WeightStream(workers)
        self._open[stream.id] = stream
        try:
            yield stream
        finally:
            del self._open[stream.id]
            stream.close()

    async def pieces(self, worker_id: str, stream_id: bytes) -> AsyncIterator[WeightsPiece]:
        """Yields the pieces for one worker. Raises NotFound for an unknown or closed stream."""
        stream = self._open.get(stream_id)
        queue = None if stream is None else stream.queues.get(worker_id)
        if queue is None:
            raise NotFound("stream_id: no open stream of weights has this id", field="stream_id")
        while (piece := await queue.get()) is not None:
            yield piece
            if piece.HasField("end"):
                return
