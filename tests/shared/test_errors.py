"""Error classes and their mapping to transports."""

from __future__ import annotations

import grpc
import pytest

from quire.shared import errors
from quire.shared.pb.common.v1 import finish_pb2


@pytest.mark.parametrize("code", [code for code in finish_pb2.ErrorCode.values() if code])
def test_every_code_has_a_transport_and_comes_back_as_itself(code: int) -> None:
    error = errors.from_proto(finish_pb2.Error(code=code, message="m", field="f", retry_after_ms=5))
    assert errors.to_proto(error) == finish_pb2.Error(code=code, message="m", field="f", retry_after_ms=5)
    assert isinstance(errors.transport(error).grpc_code, grpc.StatusCode)


def test_an_unknown_code_is_a_fault_of_ours() -> None:
    assert isinstance(errors.from_proto(finish_pb2.Error(message="m")), errors.Internal)


def test_full_is_429_and_away_is_503() -> None:
    assert errors.transport(errors.ResourceExhausted("full")).http_status == 429
    assert errors.transport(errors.Unavailable("away")).http_status == 503
