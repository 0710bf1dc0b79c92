"""Response with the content of an open file, which stays complete if the file is deleted meanwhile."""

from __future__ import annotations

from typing import BinaryIO

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send


class OpenFileResponse(FileResponse):
    """Response that owns the file and supports ranges (Range)."""

    media_type = "application/octet-stream"

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(f"/proc/self/fd/{file.fileno()}")  # leads to the file also after it was deleted
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)
