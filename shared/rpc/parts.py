"""Splits stream messages that exceed the size limit of a gRPC message into parts (common/v1/part.proto)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1.part_pb2 import Part
from quire.shared.rpc.channel import SERVICE_MESSAGE_BYTES

MAX_PART_BYTES = SERVICE_MESSAGE_BYTES - 1024  # of data, leaving room for the enclosing message
# A link of 13 KB/s carries one part before the receiver, which sees only complete parts, considers the peer lost.
PART_BYTES = 64 * 1024
MAX_BYTES = 256 * 1024 * 1024  # of a complete message: a worker with a million blocks reports 36 MB of hashes


class CallStream(Protocol):
    """Common interface of grpc.aio.ServicerContext and grpc.aio.StreamStreamCall."""

    async def read(self) -> Any: ...

    async def write(self, message: Any) -> None: ...


async def _ignore() -> None: ...


class PartStream:
    """Stream that joins and splits parts transparently. One task reads and one writes, as gRPC requires."""

    def __init__(self, stream: CallStream, max_bytes: int = MAX_BYTES) -> None:
        self.stream, self.max_bytes = stream, max_bytes
        self.on_part: Callable[[], Awaitable[None]] = _ignore
        """Called for each part but the last."""

    async def read(self) -> Any:
        """Returns a complete message. Raises InvalidArgument for malformed parts."""
        message = await self.stream.read()
        return await self._whole(message) if _is_part(message) else message

    async def write(self, message: Any) -> None:
        """Writes a message, in parts if it exceeds PART_BYTES."""
        if message.ByteSize() <= PART_BYTES:
            await self.stream.write(message)
            return
        data, kind = memoryview(message.SerializeToString()), type(message)
        for start in range(0, len(data), PART_BYTES):
            end = start + PART_BYTES
            await self.stream.write(kind(part=Part(data=bytes(data[start:end]), last=end >= len(data))))

    async def _whole(self, message: Any) -> Any:
        """Reads the remaining parts of a message and returns the parsed whole; calls `on_part` after each part but
        the last. Raises InvalidArgument if it exceeds `max_bytes` or another message interrupts it."""
        kind, data = type(message), bytearray()
        while _is_part(message):
            data += message.part.data
            if len(data) > self.max_bytes:
                raise InvalidArgument(f"part: the message exceeds the limit of {self.max_bytes} bytes", field="part")
            if message.part.last:
                return _parsed(kind, bytes(data))
            await self.on_part()
            message = await self.stream.read()
        raise InvalidArgument("part: another message before the last part", field="part")


def _is_part(message: Any) -> bool:
    return hasattr(message, "part") and message.HasField("part")


def _parsed(kind: type[Any], data: bytes) -> Any:
    """Parses a joined message. Raises InvalidArgument for malformed bytes."""
    try:
        return kind.FromString(data)
    except Exception as error:  # protobuf's own errors have no common class in all its implementations
        raise InvalidArgument(f"part: not a {kind.DESCRIPTOR.full_name}: {error}", field="part") from None
