"""Prompts of any kind as requests of the public protocol, and its errors as ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from quire.params import SamplingParams
from shared.errors import TRANSPORTS, Internal, QuireError, from_proto
from shared.pb.common.v1 import finish_pb2
from shared.pb.inference.v1 import inference_pb2 as pb

Prompt = str | Sequence[int]
ChatMessages = Sequence[Mapping[str, str]]

STATUS_DETAILS = "grpc-status-details-bin"
_ERROR_CODES = {transport.grpc_code: code for code, transport in TRANSPORTS.items()}


@dataclass(frozen=True, slots=True)
class Options:
    """Identity, order and sharing of a request."""

    request_id: str = ""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    final_only: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str = ""
    stream_interval: int = 0

    def to_proto(self) -> pb.RequestOptions:
        return pb.RequestOptions(
            request_id=self.request_id,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            final_only=self.final_only,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            stream_interval=self.stream_interval,
        )


def generate_request(prompt: Prompt, params: SamplingParams | None, options: Options) -> pb.GenerateRequest:
    request = pb.GenerateRequest(options=options.to_proto())
    if params is not None:
        request.sampling.CopyFrom(params.to_proto())
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def chat_request(messages: ChatMessages, params: SamplingParams | None, options: Options) -> pb.ChatRequest:
    request = pb.ChatRequest(options=options.to_proto())
    if params is not None:
        request.sampling.CopyFrom(params.to_proto())
    for message in messages:
        request.messages.add(role=message["role"], content=message.get("content", ""))
    return request


@contextmanager
def translated_errors() -> Iterator[None]:
    """Errors of the call as shared.errors."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc(error) from None


def from_rpc(error: grpc.RpcError) -> QuireError:
    code = _ERROR_CODES.get(error.code())
    details = error.details() or str(error.code())
    if code is None:
        return Internal(details)
    hint = _retry_after_ms(error)
    return from_proto(finish_pb2.Error(code=finish_pb2.ErrorCode.Name(code), message=details, retry_after_ms=hint))


def _retry_after_ms(error: grpc.RpcError) -> int:
    """The server's google.rpc.RetryInfo; 0 if it gave none."""
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == STATUS_DETAILS:
            for detail in status_pb2.Status.FromString(value).details:
                hint = error_details_pb2.RetryInfo()
                if detail.Unpack(hint):
                    return int(hint.retry_delay.ToMilliseconds())
    return 0
