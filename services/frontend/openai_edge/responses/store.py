"""Responses that clients may come back to. In this process only, as many as fit: an old one gives way to a new one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from quire.services.frontend.openai_edge.responses.messages import Item
from quire.shared.errors import InvalidArgument, NotFound


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its client got it, and the conversation up to its end."""

    tenant: str
    body: dict[str, Any]
    inputs: Sequence[Item]  # of this response, without those before
    conversation: Sequence[Item]  # all of it: inputs and outputs

    @property
    def num_bytes(self) -> int:
        return len(orjson.dumps(self.body)) + len(orjson.dumps(list(self.conversation)))


class ResponseStore:
    """The least recently used one goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()  # by tenant and id
        self._num_bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """In place of what its tenant has under the same id: ids of those in the background are the clients' own."""
        self._drop((stored.tenant, stored.body["id"]))
        num_bytes = stored.num_bytes
        if num_bytes > self._max_bytes:
            return
        self._found[stored.tenant, stored.body["id"]] = stored, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._found.popitem(last=False)[1][1]

    def get(self, response_id: str, tenant: str, field: str = "") -> StoredResponse:
        """`field`: which named it. What belongs to another tenant is as if it were not there."""
        if not self._max_bytes and field:
            raise InvalidArgument(f"{field}: this server stores no responses (response_store_mb=0)", field=field)
        found = self.find(response_id, tenant)
        if found is None:
            raise NotFound(
                f"Response with id {response_id!r} not found: it was not stored here, or had to give way. Send the "
                "items of the conversation as input instead.",
                field=field,
            )
        return found

    def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        """What get() would return: it is in use again."""
        key = tenant, response_id
        if key not in self._found:
            return None
        self._found.move_to_end(key)
        return self._found[key][0]

    def delete(self, response_id: str, tenant: str) -> None:
        self.get(response_id, tenant)
        self.drop(response_id, tenant)

    def drop(self, response_id: str, tenant: str) -> None:
        """If it is there."""
        self._drop((tenant, response_id))

    def _drop(self, key: tuple[str, str]) -> None:
        if key in self._found:
            self._num_bytes -= self._found.pop(key)[1]
