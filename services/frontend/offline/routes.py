"""Routes of /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import BaseModel, ConfigDict, Field

from quire.services.frontend.http import headers
from quire.services.frontend.http.body import BodyReader
from quire.services.frontend.http.headers import CALL
from quire.services.frontend.http.router import Router
from quire.services.frontend.offline import upload
from quire.services.frontend.offline.file_response import OpenFileResponse
from quire.services.frontend.offline.files import PURPOSES
from quire.services.frontend.offline.operations import (
    MAX_LISTED,
    WINDOW,
    Listed,
    ListPage,
    OfflineOperations,
    write_chunks,
)
from quire.shared import batch_lines
from quire.shared.errors import Unimplemented

FILES, BATCHES = "/v1/files", "/v1/batches"
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"purpose": {"enum": [*PURPOSES]}, "file": {"type": "string", "format": "binary"}},
                    "required": ["purpose", "file"],
                }
            }
        },
    }
}
Most = Annotated[int, Query(json_schema_extra={"minimum": 1, "maximum": MAX_LISTED})]
Order = Literal["asc", "desc"]


class NewBatchBody(BaseModel):
    """Request body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: str = Field(json_schema_extra={"enum": [*batch_lines.ENDPOINTS]})
    completion_window: str = Field(WINDOW, json_schema_extra={"const": WINDOW})
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = Field(None, json_schema_extra={"type": "null"})


class OfflineRoutes:
    """Routes for uploading and downloading files and for batches."""

    def __init__(self, work: OfflineOperations, bounds: BodyReader) -> None:
        self._work = work
        self.router = Router(tags=["batches"], own_query=True)
        self.router.add_api_route(FILES, self.upload, methods=["POST"], openapi_extra=FORM)
        self.router.add_api_route(FILES, self.list_files, methods=["GET"])
        self.router.add_api_route(f"{FILES}/{{file_id}}", self.get_file, methods=["GET"])
        self.router.add_api_route(f"{FILES}/{{file_id}}", self.delete_file, methods=["DELETE"])
        self.router.add_api_route(
            f"{FILES}/{{file_id}}/content",
            self.content,
            methods=["GET"],
            status_code=200,
            response_class=OpenFileResponse,
        )
        new = Router(tags=["batches"], own_query=True, route_class=bounds.route(at_once=False))
        new.add_api_route(BATCHES, self.create, methods=["POST"])
        self.router.add(new)
        self.router.add_api_route(BATCHES, self.list_batches, methods=["GET"])
        self.router.add_api_route(f"{BATCHES}/{{batch_id}}", self.get_batch, methods=["GET"])
        self.router.add_api_route(f"{BATCHES}/{{batch_id}}/cancel", self.cancel, methods=["POST"])

    async def upload(self, http: Request) -> dict[str, Any]:
        """Stores a file that is uploaded as a multipart form with the parts `file` and `purpose`, and returns OpenAI's
        file object. The form is written to disk before it is parsed, within the reserved space. Raises InvalidArgument
        for an incomplete form or an unknown purpose, ResourceExhausted if the file store is full."""
        most = self._work.files.max_file_bytes
        boundary = upload.boundary_of(http.headers.get("content-type", ""))
        announced = int(http.headers.get("content-length", most))
        async with self._work.reserve(min(announced, most)) as (form, target):
            await write_chunks(http.stream(), form)
            uploaded = await asyncio.to_thread(upload.parse_form, form, boundary, target)
            purpose = uploaded.fields.get("purpose", "")
            return (await self._work.store(target, headers.tenant(http), uploaded.filename, purpose)).to_openai()

    async def list_files(
        self, http: Request, purpose: str = "", after: str = "", limit: Most = MAX_LISTED, order: Order = "desc"
    ) -> dict[str, Any]:
        """GET /v1/files: a page of the tenant's files, newest first unless order is asc."""
        oldest_first = order == "asc"
        return _list_object(
            await self._work.list_files(headers.tenant(http), purpose, after, limit, oldest_first=oldest_first)
        )

    async def get_file(self, file_id: str, http: Request) -> dict[str, Any]:
        return (await self._work.file(file_id, headers.tenant(http))).to_openai()

    async def content(self, file_id: str, http: Request) -> OpenFileResponse:
        return OpenFileResponse(await self._work.open(file_id, headers.tenant(http)))

    async def delete_file(self, file_id: str, http: Request) -> dict[str, Any]:
        await self._work.delete(file_id, headers.tenant(http))
        return {"id": file_id, "object": "file", "deleted": True}

    async def create(self, body: NewBatchBody, http: Request) -> dict[str, Any]:
        """Creates a batch from the calls in a file, which are validated first."""
        caller = http.scope[CALL].caller
        if body.output_expires_after is not None:
            raise Unimplemented(
                "output_expires_after is not supported: files do not expire", field="output_expires_after"
            )
        batch = await self._work.create(
            headers.tenant(http),
            "" if caller is None else caller.key.name,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            window=body.completion_window,
            metadata=body.metadata or {},
        )
        return batch.to_openai()

    async def list_batches(self, http: Request, after: str = "", limit: Most = 20) -> dict[str, Any]:
        return _list_object(await self._work.list_batches(headers.tenant(http), after, limit))

    async def get_batch(self, batch_id: str, http: Request) -> dict[str, Any]:
        batch, is_cancelled = await self._work.batch(batch_id, headers.tenant(http))
        return batch.to_openai(is_cancelled=is_cancelled)

    async def cancel(self, batch_id: str, http: Request) -> dict[str, Any]:
        """Cancels a batch; calls in progress are still answered."""
        return (await self._work.cancel(batch_id, headers.tenant(http))).to_openai(is_cancelled=True)


def _list_object(page: ListPage[Listed]) -> dict[str, Any]:
    """Returns the page as OpenAI's list object, with the ids of its first and last entry for paging."""
    return {
        "object": "list",
        "data": [one.to_openai() for one in page.shown],
        "first_id": page.shown[0].id if page.shown else None,
        "last_id": page.shown[-1].id if page.shown else None,
        "has_more": page.has_more,
    }
