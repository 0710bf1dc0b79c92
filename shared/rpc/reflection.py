"""Server reflection (v1 and v1alpha): lists services and their descriptors over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.json_format import MessageToJson, Parse
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"
V1_FILE = "grpc/reflection/v1/reflection.proto"
# Both use the messages of v1alpha, the only ones that grpcio-reflection provides.
SERVICES = (reflection.SERVICE_NAME, V1)


def handlers(names: Iterable[str]) -> Iterator[grpc.GenericRpcHandler]:
    """Yields handlers for servers that offer services of these names, which should include SERVICES."""
    _describe_v1()
    for service in SERVICES:
        answers = grpc.stream_stream_rpc_method_handler(
            reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
            request_deserializer=_question,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        yield grpc.method_handlers_generic_handler(service, {"ServerReflectionInfo": answers})


def _question(sent: bytes) -> reflection_pb2.ServerReflectionRequest:
    """Parses a request; returns an empty one, which is answered with an error, for malformed bytes."""
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(sent)
    except DecodeError:
        return reflection_pb2.ServerReflectionRequest()


def _describe_v1() -> None:
    """Registers descriptors of reflection v1, because clients ask for the descriptor of every listed service."""
    pool = descriptor_pool.Default()
    with contextlib.suppress(KeyError):
        pool.FindServiceByName(V1)
        return
    described = MessageToJson(_file_of(reflection_pb2.DESCRIPTOR))
    for older, newer in ((reflection.SERVICE_NAME, V1), (reflection_pb2.DESCRIPTOR.name, V1_FILE)):
        described = described.replace(older.rpartition(".")[0], newer.rpartition(".")[0])
    pool.AddSerializedFile(Parse(described, descriptor_pb2.FileDescriptorProto()).SerializeToString())


def _file_of(descriptor: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(file)
    return file
