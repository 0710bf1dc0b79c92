"""Reflection answers malformed requests without log output."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2 as pb

from quire.shared.rpc import reflection
from quire.shared.rpc.server import Server

LIST = pb.ServerReflectionRequest(list_services="")


@pytest.mark.parametrize("service", reflection.SERVICES)
async def test_what_is_no_question_is_answered_with_an_error(service: str, caplog: pytest.LogCaptureFixture) -> None:
    server = Server("127.0.0.1", 0, ("a.Service",))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(f"/{service}/ServerReflectionInfo")()
        answers = []
        for question in (b"\xff\xff", LIST.SerializeToString()):
            await call.write(question)
            answers.append(pb.ServerReflectionResponse.FromString(await call.read()))
        await call.done_writing()
    await server.stop(grace_s=0)
    assert answers[0].error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    listed = {one.name for one in answers[1].list_services_response.service}
    assert listed == {"a.Service", "grpc.health.v1.Health", *reflection.SERVICES}
    assert not caplog.records
