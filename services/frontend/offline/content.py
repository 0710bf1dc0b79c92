"""An answer out of a file that is open: whoever deletes the file meanwhile cuts nothing off."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import BinaryIO

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

CHUNK_BYTES = 1 << 18


class Content(StreamingResponse):
    """Owns the file."""

    media_type = "application/octet-stream"

    def __init__(self, file: BinaryIO) -> None:
        num_bytes = os.fstat(file.fileno()).st_size
        super().__init__(_chunks(file), headers={"content-length": str(num_bytes)})
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield chunk
