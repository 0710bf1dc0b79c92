"""Answers of a head and parts of bytes, as frontends send pixels and workers send rows: sizes, times and the checksum
are checked."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt

from quire.shared.errors import Unavailable
from quire.shared.rpc.parts import CallStream

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DownloadBounds:
    """Limits of one download."""

    max_bytes: int
    first_part_timeout_s: float
    next_part_timeout_s: float = 5.0
    min_bytes_per_s: int = 4 << 20  # of a whole download: bounds the time of a sender of little at a time


class Download:
    """One answer of a sender: a head, then parts."""

    def __init__(self, call: CallStream, bounds: DownloadBounds, sender: str, content: str) -> None:
        """`sender` and `content` (such as "pixels") are for error texts."""
        self._call, self._bounds = call, bounds
        self._sender, self._content = sender, content

    async def head(self) -> Any:
        """Returns the head, the first message. Raises Unavailable for any other."""
        message = await self._call.read()
        kind = "nothing" if message is grpc.aio.EOF else message.WhichOneof("message")
        if kind != "head":
            raise Unavailable(f"{self._sender} sent {kind} instead of the size of the {self._content}")
        return message.head

    async def receive(self, size: int, checksum: int) -> Bytes:
        """Returns the bytes of all parts, uint8 [size]. Raises Unavailable for another number of bytes than `size` and
        a wrong CRC-32; TimeoutError if a part or the whole is late. The caller has checked that `size` is allowed."""
        data, received = np.empty(size, dtype=np.uint8), 0
        async with asyncio.timeout(self._bounds.first_part_timeout_s + size / self._bounds.min_bytes_per_s):
            while (part := await self._part()) is not None:
                if not part or received + len(part) > size:
                    raise Unavailable(f"{self._sender} sent {received + len(part)} of {size} bytes")
                data[received : received + len(part)] = np.frombuffer(part, dtype=np.uint8)
                received += len(part)
        if received != size:
            raise Unavailable(f"{self._sender} sent {received} of {size} bytes")
        if await asyncio.to_thread(zlib.crc32, data.data) != checksum:
            raise Unavailable(f"the {self._content} of {self._sender} do not match their checksum")
        return data

    async def _part(self) -> bytes | None:
        """Returns the next bytes; None at the end. Raises Unavailable for other messages, TimeoutError if it is
        late."""
        async with asyncio.timeout(self._bounds.next_part_timeout_s):
            message = await self._call.read()
        if message is grpc.aio.EOF:
            return None
        if message.WhichOneof("message") != "part":
            kind = message.WhichOneof("message")
            raise Unavailable(f"{self._sender} sent {kind} instead of bytes of {self._content}")
        part: bytes = message.part
        return part
