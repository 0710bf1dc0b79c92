"""Weights that pass through: from one call to the calls of several workers, a few pieces of it at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager

from quire.shared.errors import InvalidArgument, NotFound
from quire.shared.pb.common.v1.weights_stream_pb2 import WeightsPiece
from quire.shared.tensor_headers import DEFAULT_GROUP

MOST_WAITING = 4  # pieces, of each worker
ID_BYTES = 16

Pieces = asyncio.Queue[WeightsPiece | None]  # None: no more


class WeightStream:
    """To some workers, each of which fetches it once."""

    def __init__(self, workers: Iterable[str]) -> None:
        self.id = secrets.token_bytes(ID_BYTES)
        self.queues: dict[str, Pieces] = {worker: asyncio.Queue(MOST_WAITING) for worker in workers}
        self.group = ""  # in which the trainer broadcasts the content, of which nothing passes through then

    async def pump(self, pieces: AsyncIterator[WeightsPiece]) -> None:
        """As fast as the slowest takes it. Raises InvalidArgument if they end before their end."""
        ended = False
        async for piece in pieces:
            ended = piece.HasField("end")
            if piece.HasField("broadcast"):
                self.group = piece.broadcast.group_name or DEFAULT_GROUP
            for queue in self.queues.values():
                await queue.put(piece)
        if not ended:
            raise InvalidArgument("piece: the stream of weights ended before its end", field="piece")

    def close(self) -> None:
        """Nobody waits for more of it."""
        for queue in self.queues.values():
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)


class WeightStreams:
    """Those that are open."""

    def __init__(self) -> None:
        self._open: dict[bytes, WeightStream] = {}

    @contextmanager
    def open(self, workers: Iterable[str]) -> Iterator[WeightStream]:
        stream = WeightStream(workers)
        self._open[stream.id] = stream
        try:
            yield stream
        finally:
            del self._open[stream.id]
            stream.close()

    async def pieces(self, worker_id: str, stream_id: bytes) -> AsyncIterator[WeightsPiece]:
        """Of one worker. Raises NotFound for what is not, or no longer, there."""
        stream = self._open.get(stream_id)
        queue = None if stream is None else stream.queues.get(worker_id)
        if queue is None:
            raise NotFound("stream_id: no weights are to be fetched by it", field="stream_id")
        while (piece := await queue.get()) is not None:
            yield piece
            if piece.HasField("end"):
                return
