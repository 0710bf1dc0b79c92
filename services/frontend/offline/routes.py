"""/v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict

from services.frontend.http import headers
from services.frontend.http.body import BodyBounds
from services.frontend.http.headers import CALL
from services.frontend.http.router import Router
from services.frontend.offline import upload
from services.frontend.offline.batch import Batch
from services.frontend.offline.batches import BatchStore
from services.frontend.offline.content import Content
from services.frontend.offline.files import FileStore, StoredFile
from shared import batch_lines
from shared.errors import InvalidArgument, NotFound, Unavailable, Unimplemented
from shared.logs import logger

log = logger("batches")

FILES, BATCHES = "/v1/files", "/v1/batches"
WINDOW = "24h"
MOST_LISTED = 10_000
WRITE_BYTES = 1 << 20
RETRY_MS = 10_000
FORM = {
    "requestBody": {
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"purpose": {"type": "string"}, "file": {"type": "string", "format": "binary"}},
                    "required": ["purpose", "file"],
                }
            }
        }
    }
}

Listed = TypeVar("Listed", StoredFile, Batch)


class NewBatchBody(BaseModel):
    """POST /v1/batches"""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: str
    completion_window: str = WINDOW
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


class OfflineRoutes:
    """Files in, batches begun, files out."""

    def __init__(
        self, files: FileStore | None, batches: BatchStore | None, bounds: BodyBounds, tell: Callable[[], None]
    ) -> None:
        """`files`, `batches`: None where there is no folder for them. `tell`: whoever runs batches."""
        self._held_files, self._held_batches = files, batches
        self._tell = tell
        self.router = Router(tags=["batches"])
        self.router.add_api_route(FILES, self.upload, methods=["POST"], openapi_extra=FORM)
        self.router.add_api_route(FILES, self.list_files, methods=["GET"])
        self.router.add_api_route(f"{FILES}/{{file_id}}", self.get_file, methods=["GET"])
        self.router.add_api_route(f"{FILES}/{{file_id}}", self.delete_file, methods=["DELETE"])
        self.router.add_api_route(
            f"{FILES}/{{file_id}}/content", self.content, methods=["GET"], status_code=200, response_class=Content
        )
        new = Router(route_class=bounds.route(at_once=False))
        new.add_api_route(BATCHES, self.create, methods=["POST"])
        self.router.include_router(new)
        self.router.add_api_route(BATCHES, self.list_batches, methods=["GET"])
        self.router.add_api_route(f"{BATCHES}/{{batch_id}}", self.get_batch, methods=["GET"])
        self.router.add_api_route(f"{BATCHES}/{{batch_id}}/cancel", self.cancel, methods=["POST"])

    @property
    def _files(self) -> FileStore:
        if self._held_files is None:
            raise Unimplemented("files and batches are not offered by this server: it has no --batch-folder")
        return self._held_files

    @property
    def _batches(self) -> BatchStore:
        assert self._files is self._held_files
        assert self._held_batches is not None
        return self._held_batches

    async def upload(self, http: Request) -> dict[str, Any]:
        """Keeps a file, sent as a form."""
        files, tenant = self._files, headers.tenant(http)
        boundary = upload.boundary_of(http.headers.get("content-type", ""))
        form, target = files.scratch(), files.scratch()
        announced = int(http.headers.get("content-length", files.max_file_bytes))
        with files.arriving(min(announced, files.max_file_bytes)), _kept():
            await asyncio.to_thread(files.check_room)
            try:
                await _receive(http, form)
                taken = await asyncio.to_thread(upload.take_apart, form, boundary, target)
                purpose = taken.fields.get("purpose", "")
                return (await asyncio.to_thread(files.keep, target, tenant, taken.filename, purpose)).told()
            finally:
                await asyncio.to_thread(_forget, form, target)

    async def list_files(
        self, http: Request, purpose: str = "", after: str = "", limit: int = MOST_LISTED, order: str = "desc"
    ) -> dict[str, Any]:
        found = await asyncio.to_thread(self._files.of, headers.tenant(http))
        wanted = [file for file in found if purpose in ("", file.purpose)]
        return _page(wanted if order == "desc" else wanted[::-1], after, limit)

    async def get_file(self, file_id: str, http: Request) -> dict[str, Any]:
        return (await asyncio.to_thread(self._files.get, file_id, headers.tenant(http))).told()

    async def content(self, file_id: str, http: Request) -> Content:
        return Content(await asyncio.to_thread(self._files.open, file_id, headers.tenant(http)))

    async def delete_file(self, file_id: str, http: Request) -> dict[str, Any]:
        await asyncio.to_thread(self._files.delete, file_id, headers.tenant(http))
        return {"id": file_id, "object": "file", "deleted": True}

    async def create(self, body: NewBatchBody, http: Request) -> dict[str, Any]:
        """Begins to answer the calls in a file, which are looked at first."""
        tenant, caller = headers.tenant(http), http.scope[CALL].caller
        if body.endpoint not in batch_lines.ENDPOINTS:
            names = ", ".join(batch_lines.ENDPOINTS)
            raise InvalidArgument(f"endpoint must be one of {names}, got {body.endpoint[:64]!r}", field="endpoint")
        if body.completion_window != WINDOW:
            raise InvalidArgument(f"completion_window must be {WINDOW}", field="completion_window")
        if body.output_expires_after is not None:
            raise Unimplemented("output_expires_after is not offered: files stay", field="output_expires_after")
        try:
            await asyncio.to_thread(self._files.get, body.input_file_id, tenant)
        except NotFound as error:
            raise InvalidArgument(error.message, field="input_file_id") from None
        with _kept():
            batch = await asyncio.to_thread(
                self._batches.create,
                tenant,
                "" if caller is None else caller.key.name,
                endpoint=body.endpoint,
                input_file_id=body.input_file_id,
                metadata=body.metadata,
            )
        self._tell()
        return batch.told()

    async def list_batches(self, http: Request, after: str = "", limit: int = 20) -> dict[str, Any]:
        return _page(await asyncio.to_thread(self._batches.of, headers.tenant(http)), after, limit)

    async def get_batch(self, batch_id: str, http: Request) -> dict[str, Any]:
        batches = self._batches
        batch = await asyncio.to_thread(batches.get, batch_id, headers.tenant(http))
        return batch.told(is_cancelled=await asyncio.to_thread(batches.is_cancelled, batch_id))

    async def cancel(self, batch_id: str, http: Request) -> dict[str, Any]:
        """Lines that are under way are still answered."""
        batch = await asyncio.to_thread(self._batches.cancel, batch_id, headers.tenant(http))
        return batch.told(is_cancelled=True)


@contextmanager
def _kept() -> Iterator[None]:
    """A disk that is full, read-only or gone is no fault of ours, and may be mended."""
    try:
        yield
    except OSError as error:
        log.warning("files cannot be kept", reason=str(error))
        raise Unavailable(f"nothing can be kept here at present: {error.strerror}", retry_after_ms=RETRY_MS) from None


async def _receive(http: Request, target: Path) -> None:
    kept = bytearray()
    async for chunk in http.stream():
        kept += chunk
        if len(kept) >= WRITE_BYTES:
            await asyncio.to_thread(_append, target, bytes(kept))
            kept.clear()
    await asyncio.to_thread(_append, target, bytes(kept))


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _forget(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _page(found: Sequence[Listed], after: str, limit: int) -> dict[str, Any]:
    """`after`: the id of the last one of the page before."""
    if not 1 <= limit <= MOST_LISTED:
        raise InvalidArgument(f"limit must be in 1 to {MOST_LISTED}, got {limit}", field="limit")
    ids = [one.id for one in found]
    start = ids.index(after) + 1 if after in ids else 0
    shown = found[start : start + limit]
    return {
        "object": "list",
        "data": [one.told() for one in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + limit < len(found),
    }
