"""An answer out of a file that is open: whoever deletes the file meanwhile cuts nothing off."""

from __future__ import annotations

from typing import BinaryIO

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send


class OpenFileResponse(FileResponse):
    """Owns the file. Parts of it are told as well (Range)."""

    media_type = "application/octet-stream"

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(f"/proc/self/fd/{file.fileno()}")  # which leads to the file, also when it has no name any more
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)
