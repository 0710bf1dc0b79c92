"""Clients' messages: their fields are counted before they are parsed, and their lists before anybody converts them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from services.frontend.bounds import counts, wire_scan
from services.frontend.bounds.heavy import HeavyWork, in_steps
from services.frontend.calls import Calls
from services.frontend.grpc_edge.errors import Context, answering
from shared.errors import InvalidArgument, QuireError
from shared.metrics.frontend import FrontendMetrics
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.settings.request_limits import RequestLimits

Behaviour = Callable[[Any, Context], Awaitable[Any]]
REQUESTS: dict[str, type[Message]] = {
    f"/{service.full_name}/{method.name}": getattr(pb, method.input_type.name)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
NAMES = {"options": "choice"}  # of lists that clients know by another name
IDS = ("ids", "token_ids", "allowed_token_ids", "prompt_logprob_token_ids")


class BoundedMessages(grpc.aio.ServerInterceptor):
    """For the methods of InferenceService."""

    def __init__(self, limits: RequestLimits, calls: Calls, metrics: FrontendMetrics) -> None:
        self._limits = limits
        self._calls = calls
        self._metrics = metrics
        self._heavy = HeavyWork()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        kind = REQUESTS.get(handler_call_details.method)
        if handler is None or kind is None:
            return handler
        changed: dict[str, Any] = {"request_deserializer": None}
        name = "unary_stream" if handler.response_streaming else "unary_unary"
        method = handler_call_details.method.rpartition("/")[2]
        changed[name] = self._bounded(method, getattr(handler, name), kind)
        return handler._replace(**changed)

    def _bounded(self, method: str, behaviour: Behaviour, kind: type[Message]) -> Behaviour:
        async def parsed(data: bytes, context: Context) -> Any:
            try:
                message = await self._parse(data, kind)
            except QuireError as error:
                async with answering(method, context, self._metrics, self._calls):
                    raise error from None
            return await behaviour(message, context)

        return parsed

    async def _parse(self, data: bytes, kind: type[Message]) -> Message:
        async with self._heavy.turn(len(data)):
            await in_steps(wire_scan.check(data, kind.DESCRIPTOR, self._limits))
            try:
                message = kind.FromString(data)
            except Exception as error:  # protobuf's own errors have no common class in all its implementations
                text = f"the message is no {kind.DESCRIPTOR.full_name}: {error}"
                raise InvalidArgument(text, field="message") from None
            check_message(message, self._limits)
            return message


def check_message(message: Message, limits: RequestLimits) -> None:
    """Raises InvalidArgument."""
    for field, value in _lists(message):
        if field.name in IDS and len(value) > limits.max_values:
            raise counts.too_many(field.name, len(value), "max_values", limits.max_values)
        counts.check_entries([(NAMES.get(field.name, field.name), value)], limits)
        if field.name == "tools":
            _check_tools(value, limits)
    if isinstance(message, pb.ChatRequest) and len(message.chat_template_kwargs) > limits.max_form_characters:
        raise counts.too_long_form("chat_template_kwargs", limits)


def _check_tools(tools: Iterable[pb.Tool], limits: RequestLimits) -> None:
    characters = sum(len(tool.parameters) + len(tool.description) + len(tool.name) for tool in tools)
    if characters > limits.max_form_characters:
        raise counts.too_long_form("tools", limits)


def _lists(message: Message) -> Iterator[tuple[FieldDescriptor, Any]]:
    """In it and in the messages that are in it once."""
    for field, value in message.ListFields():
        if isinstance(value, Message):
            yield from _lists(value)
        elif not isinstance(value, str | bytes | int | float):
            yield field, value
