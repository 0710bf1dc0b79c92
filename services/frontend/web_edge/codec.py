"""Encoding of messages as protobuf bytes and as protobuf's JSON."""

from __future__ import annotations

from dataclasses import replace

from google.protobuf import json_format
from google.protobuf.message import Message

from quire.services.frontend.bounds import messages
from quire.services.frontend.bounds.bodies import json_scan
from quire.services.frontend.bounds.bodies.heavy_work import HeavyWorkLimiter, in_steps
from quire.services.frontend.grpc_edge.bounded_messages import BoundedMessages
from quire.shared.errors import InvalidArgument
from quire.shared.settings.request_limits import RequestLimits

# JSON is read field by field in Python: conversations with this many values take 16 ms, texts of this many bytes 19 ms.
# Longer ones must be sent as bytes.
MOST_JSON_VALUES = 8192
MOST_JSON_BYTES = 1 << 20


class Codec:
    """Reader of messages within the limits of a request."""

    def __init__(self, bounded: BoundedMessages, limits: RequestLimits) -> None:
        self._bounded = bounded
        self._limits = limits
        self._json_limits = replace(limits, max_values=min(limits.max_values, MOST_JSON_VALUES))
        self._heavy = HeavyWorkLimiter()

    async def parse(self, data: bytes, kind: type[Message], *, is_json: bool) -> Message:
        """Parses a message of type `kind` within its limits of bytes, depth and items; JSON has limits of its own.
        Raises InvalidArgument for a message that is malformed or too large."""
        if not is_json:
            return await self._bounded.parse(data, kind)
        if len(data) > MOST_JSON_BYTES:
            text = (
                f"a message in JSON has at most {MOST_JSON_BYTES} bytes, got {len(data)}: send it as application/proto"
            )
            raise InvalidArgument(text, field="message")
        async with self._heavy.slot(len(data)):
            await in_steps(json_scan.check(data, self._json_limits))
            message = _parsed(data, kind)
            messages.check(message, self._limits)
            return message


def _parsed(data: bytes, kind: type[Message]) -> Message:
    """Parses protobuf's JSON as a message of `kind`; raises InvalidArgument for JSON that does not fit."""
    try:
        return json_format.Parse(data, kind())
    except (json_format.ParseError, ValueError, RecursionError) as error:
        text = f"the message is not a {kind.DESCRIPTOR.full_name}: {error}"
        raise InvalidArgument(text, field="message") from None


def serialize(message: Message, *, is_json: bool) -> bytes:
    return json_format.MessageToJson(message, indent=None).encode() if is_json else message.SerializeToString()
