"""Store of responses that clients may refer to; in this process only, with a size limit."""

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
    """Response as its client got it, and the conversation up to its end."""

    tenant: str
    body: dict[str, Any]
    inputs: Sequence[Item]  # inputs of this response only
    conversation: Sequence[Item]  # the whole conversation: inputs and outputs

    @property
    def num_bytes(self) -> int:
        return len(orjson.dumps(self.body)) + len(orjson.dumps(list(self.conversation)))


class ResponseStore:
    """LRU cache of the tenants' responses."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()  # by tenant and id
        self._num_bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """Stores a response; replaces the tenant's response of the same id, since clients choose the ids of background
        responses."""
        self._drop((stored.tenant, stored.body["id"]))
        num_bytes = stored.num_bytes
        if num_bytes > self._max_bytes:
            return
        self._found[stored.tenant, stored.body["id"]] = stored, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._found.popitem(last=False)[1][1]

    def get(self, response_id: str, tenant: str, field: str = "") -> StoredResponse:
        """Returns the response; raises NotFound, also for another tenant's.

        `field`: the field that named the response.
        """
        if not self._max_bytes and field:
            raise InvalidArgument(
                f"{field}: this server stores no responses; start it with --response-store-mb", field=field
            )
        stored = self.find(response_id, tenant)
        if stored is None:
            raise NotFound(
                f"Response with id {response_id!r} not found: it was not stored here, or was evicted. Send the "
                "items of the conversation as input instead.",
                field=field,
            )
        return stored

    def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        """Returns the tenant's response, None if it is not stored, and marks it as the most recently used."""
        key = tenant, response_id
        if key not in self._found:
            return None
        self._found.move_to_end(key)
        return self._found[key][0]

    def delete(self, response_id: str, tenant: str) -> None:
        self.get(response_id, tenant)
        self.discard(response_id, tenant)

    def discard(self, response_id: str, tenant: str) -> None:
        """Deletes the response, if stored."""
        self._drop((tenant, response_id))

    def _drop(self, key: tuple[str, str]) -> None:
        if key in self._found:
            self._num_bytes -= self._found.pop(key)[1]
