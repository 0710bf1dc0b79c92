"""Responses that clients may come back to. In this process only, as many as fit: an old one gives way to a new one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.frontend.openai_edge.responses.turns import Item
from shared.errors import InvalidArgument, NotFound


@dataclass(frozen=True, slots=True)
class Stored:
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
        self._found: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        self._num_bytes = 0

    def put(self, stored: Stored) -> None:
        num_bytes = stored.num_bytes
        if num_bytes > self._max_bytes:
            return
        self._found[stored.body["id"]] = stored, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._found.popitem(last=False)[1][1]

    def get(self, response_id: str, tenant: str, field: str = "") -> Stored:
        """`field`: which named it. What belongs to another tenant is as if it were not there."""
        if not self._max_bytes and field:
            raise InvalidArgument(f"{field}: this server stores no responses (response_store_mb=0)", field=field)
        found = self._found.get(response_id)
        if found is None or found[0].tenant != tenant:
            raise NotFound(
                f"Response with id {response_id!r} not found: it was not stored here, or had to give way. Send the "
                "items of the conversation as input instead.",
                field=field,
            )
        self._found.move_to_end(response_id)
        return found[0]

    def find(self, response_id: str, tenant: str) -> Stored | None:
        """What get() would return."""
        found = self._found.get(response_id)
        return None if found is None or found[0].tenant != tenant else found[0]

    def delete(self, response_id: str, tenant: str) -> None:
        self.get(response_id, tenant)
        self._num_bytes -= self._found.pop(response_id)[1]
