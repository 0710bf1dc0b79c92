"""A gRPC server as every Quire service runs it: options, health, reflection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.json_format import MessageToJson, Parse
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from shared import ports
from shared.errors import FailedPrecondition
from shared.rpc.channel import COMMON_OPTIONS, RECEIVE_OPTION, SERVICE_MESSAGE_BYTES
from shared.security.tls import server_credentials
from shared.settings.tls import NO_TLS, Tls

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

SERVER_OPTIONS = [
    *COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),  # else our own keep-alive earns GOAWAY too_many_pings
    ("grpc.http2.max_ping_strikes", 0),
]


LIVENESS = "liveness"  # health name that says SERVING while the process itself works, whatever its peers do


# Its messages are those of v1alpha, which alone grpcio-reflection has.
REFLECTION = "grpc.reflection.v1.ServerReflection"
NEWER_FILE = "grpc/reflection/v1/reflection.proto"


def _describe_newer_reflection() -> None:
    """Who has heard which services there are asks what each of them is."""
    pool = descriptor_pool.Default()
    with contextlib.suppress(KeyError):
        pool.FindServiceByName(REFLECTION)
        return
    described = MessageToJson(_file_of(reflection_pb2.DESCRIPTOR))
    for older, newer in ((reflection.SERVICE_NAME, REFLECTION), (reflection_pb2.DESCRIPTOR.name, NEWER_FILE)):
        described = described.replace(older.rpartition(".")[0], newer.rpartition(".")[0])
    pool.AddSerializedFile(Parse(described, descriptor_pb2.FileDescriptorProto()).SerializeToString())


def _file_of(descriptor: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(file)
    return file


def _newer_reflection(names: Iterable[str]) -> grpc.GenericRpcHandler:
    answers = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(REFLECTION, {"ServerReflectionInfo": answers})


class Server:
    """Add servicers to `.grpc`, then `start()`; health says NOT_SERVING until `set_serving(True)`."""

    def __init__(
        self,
        host: str,
        port: int,
        services: Iterable[str],
        *,
        share_port: bool = False,
        max_receive_bytes: int = SERVICE_MESSAGE_BYTES,
        tls: Tls = NO_TLS,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        port_setting: str = "grpc_port",
        tls_setting: str = "tls",
        more_options: Iterable[tuple[str, int]] = (),
    ) -> None:
        """`max_receive_bytes`: a longer message ends its call with RESOURCE_EXHAUSTED before it is read.

        `port_setting` and `tls_setting` are what errors name."""
        ports.check(host, port, port_setting, share=share_port)  # gRPC itself would print a line of C++
        options = [
            *SERVER_OPTIONS,
            (RECEIVE_OPTION, max_receive_bytes),
            ("grpc.so_reuseport", int(share_port)),
            *more_options,
        ]
        self.grpc = grpc.aio.server(options=options, interceptors=interceptors)
        self._services = ("", *services)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION)
        reflection.enable_server_reflection(names, self.grpc)
        _describe_newer_reflection()
        self.grpc.add_generic_rpc_handlers((_newer_reflection(names),))
        try:
            self.port = self._listen(f"{host}:{port}", tls, tls_setting)
        except RuntimeError as error:
            message = f"{port_setting}: cannot listen on {host}:{port}: {error}"
            raise FailedPrecondition(message, field=port_setting) from None

    def _listen(self, address: str, tls: Tls, tls_setting: str) -> int:
        if tls.serves:
            return self.grpc.add_secure_port(address, server_credentials(tls, tls_setting))
        return self.grpc.add_insecure_port(address)

    async def start(self) -> None:
        await self.set_serving(False)
        await self.set_alive(True)
        await self.grpc.start()

    async def set_serving(self, serving: bool) -> None:
        for service in self._services:
            await self._health.set(service, SERVING if serving else NOT_SERVING)

    async def set_alive(self, alive: bool) -> None:
        await self._health.set(LIVENESS, SERVING if alive else NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self.set_serving(False)
        await self.grpc.stop(grace_s)
