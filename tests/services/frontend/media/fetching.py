"""A worker's side of the MediaService, for tests."""

from __future__ import annotations

import zlib

import grpc.aio

from quire.services.frontend.media.service import SERVICE_NAME
from quire.shared.pb.frontend.v1 import media_pb2 as pb
from quire.shared.pb.frontend.v1 import media_pb2_grpc
from quire.shared.rpc.trust import Dialler


async def fetch_pixels(address: str, identifier: bytes, dialler: Dialler | None = None) -> tuple[pb.PixelsHead, bytes]:
    """Fetches the pixels of an item as a worker does; raises grpc.aio.AioRpcError."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = media_pb2_grpc.MediaServiceStub(channel).FetchMedia()
        if dialler is not None:
            await dialler.handshake(call, pb.FetchMediaRequest, SERVICE_NAME, address, known=False)
        await call.write(pb.FetchMediaRequest(media=pb.MediaRequest(identifier=identifier)))
        await call.done_writing()
        head, parts = pb.PixelsHead(), []
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.WhichOneof("message") == "head":
                head = message.head
            else:
                parts.append(message.part)
        pixels = b"".join(parts)
        assert zlib.crc32(pixels) == head.checksum
        assert len(pixels) == head.num_tiles * head.height * head.width * (4 if head.element else 3)
        return head, pixels
