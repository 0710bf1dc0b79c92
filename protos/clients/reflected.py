"""Generate from Python, with the server's own description: pip install grpcio grpcio-reflection

python reflected.py VERSION HOST:PORT TEXT [cancel]

VERSION of reflection is v1 or v1alpha; `cancel` ends the call after its first message. QUIRE_API_KEY is sent
as API key, if set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator

import grpc
from google.protobuf.descriptor_database import DescriptorDatabase
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

KEY = os.environ.get("QUIRE_API_KEY")
METADATA = (("authorization", f"Bearer {KEY}"),) if KEY else ()


def ask(
    channel: grpc.Channel, version: str, questions: Iterable[ServerReflectionRequest]
) -> Iterator[ServerReflectionResponse]:
    """The messages of v1 are those of v1alpha."""
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
        response_deserializer=ServerReflectionResponse.FromString,
    )
    for answer in call(iter(questions), timeout=10, metadata=METADATA):
        if answer.HasField("error_response"):
            raise LookupError(answer.error_response.error_message)
        yield answer


def learn(channel: grpc.Channel, version: str) -> DescriptorPool:
    """The files of every listed service, with all of their imports."""
    listed = next(ask(channel, version, [ServerReflectionRequest(list_services="*")]))
    names = [service.name for service in listed.list_services_response.service]
    database = DescriptorDatabase()
    for answer in ask(channel, version, [ServerReflectionRequest(file_containing_symbol=name) for name in names]):
        for file in answer.file_descriptor_response.file_descriptor_proto:
            database.Add(FileDescriptorProto.FromString(file))
    return DescriptorPool(database)


def generate(channel: grpc.Channel, pool: DescriptorPool, text: str, *, cancel: bool) -> None:
    service = pool.FindServiceByName("quire.inference.v1.InferenceService")
    method = service.FindMethodByName("Generate")
    request_type, response_type = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    stub = channel.unary_stream(
        f"/{service.full_name}/{method.name}", request_type.SerializeToString, response_type.FromString
    )
    request = request_type(text=text, sampling={"temperature": 0, "max_tokens": 20})
    call = stub(request, timeout=30, metadata=METADATA)
    for message in call:
        print(message.text, end="", flush=True)
        if cancel:
            call.cancel()


def main() -> int:
    version, address, text, *more = sys.argv[1:]
    with grpc.insecure_channel(address) as channel:
        try:
            generate(channel, learn(channel, version), text, cancel=more == ["cancel"])
        except LookupError as error:
            print(error, file=sys.stderr)
            return 1
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                print("CANCELLED", file=sys.stderr)
                return 0
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
