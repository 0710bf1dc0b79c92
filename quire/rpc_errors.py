"""Conversion of gRPC errors to QuireErrors, for clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from quire.shared.errors import TRANSPORTS, Internal, QuireError, from_proto
from quire.shared.pb.common.v1 import finish_pb2

STATUS_DETAILS = "grpc-status-details-bin"
_ERROR_CODES = {transport.grpc_code: code for code, transport in TRANSPORTS.items()}


@contextmanager
def translated_errors() -> Iterator[None]:
    """Converts gRPC errors that are raised within the block to the matching QuireErrors."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc(error) from None


def from_rpc(error: grpc.RpcError) -> QuireError:
    """Converts a gRPC error to the matching QuireError with its retry hint; unknown codes become Internal."""
    code = _ERROR_CODES.get(error.code())
    details = error.details() or str(error.code())
    if code is None:
        return Internal(details)
    hint = _retry_after_ms(error)
    return from_proto(finish_pb2.Error(code=finish_pb2.ErrorCode.Name(code), message=details, retry_after_ms=hint))


def _retry_after_ms(error: grpc.RpcError) -> int:
    """Returns the server's google.rpc.RetryInfo in milliseconds; 0 if the error has none."""
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == STATUS_DETAILS:
            for detail in status_pb2.Status.FromString(value).details:
                hint = error_details_pb2.RetryInfo()
                if detail.Unpack(hint):
                    return int(hint.retry_delay.ToMilliseconds())
    return 0
