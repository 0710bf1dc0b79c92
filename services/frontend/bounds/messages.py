"""Limits on clients' protobuf messages: their lists are counted before they are converted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from quire.services.frontend.bounds import counts
from quire.services.frontend.bounds.prompts import PromptLimit
from quire.shared.errors import InvalidArgument
from quire.shared.pb.batch.v1 import batch_pb2
from quire.shared.pb.dialects import open_inference_pb2, vllm_engine_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.settings.request_limits import RequestLimits

AnyMessage = TypeVar("AnyMessage", bound=Message)
NAMES = {"options": "choice", "choices": "choice"}  # proto names of lists -> names that clients use
# Request messages of all client-facing gRPC methods, by method path.
REQUESTS: dict[str, type[Message]] = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for file in (pb.DESCRIPTOR, batch_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
KINDS = {kind.DESCRIPTOR.full_name: kind for kind in REQUESTS.values()}
TEXT_INPUT = "text_input"
LENGTH_PREFIX_BYTES = 4
IDS = ("ids", "input_ids", "token_ids", "allowed_token_ids", "prompt_logprob_token_ids")


def parse(data: bytes, kind: type[AnyMessage]) -> AnyMessage:
    """Parses protobuf bytes as a message of type `kind`. Raises InvalidArgument with the parser's text."""
    try:
        return kind.FromString(data)
    except Exception as error:  # protobuf implementations have no common error class
        text = f"the message is not a {kind.DESCRIPTOR.full_name}: {error}"
        raise InvalidArgument(text, field="message") from None


def check_prompt(message: Message, prompt_limit: PromptLimit) -> None:
    """Refuses a message whose prompt is too long in bytes, before the tokenizer would refuse it. Raises
    InvalidArgument."""
    if isinstance(message, open_inference_pb2.ModelInferRequest):
        _check_tensors(message, prompt_limit)
    for field, value in message.ListFields():
        if field.name == "text" and isinstance(value, str):
            prompt_limit.check_characters(len(value), is_text=True)
        if field.name == "messages":
            prompt_limit.check_characters(
                sum(len(entry.content) for entry in value if isinstance(entry, pb.ChatMessage)), is_text=False
            )


def _check_tensors(request: open_inference_pb2.ModelInferRequest, prompt_limit: PromptLimit) -> None:
    """Checks the text tensor, given as a value or as raw bytes with a length prefix."""
    raw = request.raw_input_contents
    for place, tensor in enumerate(request.inputs):
        if tensor.name == TEXT_INPUT:
            texts = [*tensor.contents.bytes_contents, *(one[LENGTH_PREFIX_BYTES:] for one in raw[place : place + 1])]
            prompt_limit.check_characters(sum(len(text.decode(errors="ignore")) for text in texts), is_text=True)


def check(message: Message, limits: RequestLimits) -> None:
    """Checks the lengths of all lists of a message, a batch's metadata, and a chat's template variables. Raises
    InvalidArgument."""
    for field, value in _lists(message):
        if field.name in IDS and len(value) > limits.max_values:
            raise counts.too_many(field.name, len(value), "max_values", limits.max_values)
        counts.check_entries([(NAMES.get(field.name, field.name), value)], limits)
        if field.name == "tools":
            _check_tools(value, limits)
    if isinstance(message, batch_pb2.CreateBatchRequest):
        counts.check_metadata(dict(message.metadata))
    if isinstance(message, pb.ChatRequest) and len(message.chat_template_kwargs) > limits.max_form_characters:
        raise counts.too_long_form("chat_template_kwargs", limits)


def _check_tools(tools: Iterable[pb.Tool], limits: RequestLimits) -> None:
    """Raises InvalidArgument if the tools together have more than max_form_characters."""
    characters = sum(len(tool.parameters) + len(tool.description) + len(tool.name) for tool in tools)
    if characters > limits.max_form_characters:
        raise counts.too_long_form("tools", limits)


def _lists(message: Message) -> Iterator[tuple[FieldDescriptor, Any]]:
    """Yields the lists of a message and of its nested singular messages."""
    for field, value in message.ListFields():
        if isinstance(value, Message):
            yield from _lists(value)
        elif not isinstance(value, str | bytes | int | float):
            yield field, value
