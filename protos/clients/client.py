"""Generate from Python. Generate the code first, into a folder of its own:

python -m grpc_tools.protoc -I protos --python_out=OUT --grpc_python_out=OUT $(find protos/quire -name '*.proto')
PYTHONPATH=OUT python client.py HOST:PORT TEXT [cancel]

`cancel` ends the call after its first message. QUIRE_API_KEY is sent as API key, if set.
"""

from __future__ import annotations

import os
import random
import sys
import time

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from quire.common.v1 import sampling_pb2
from quire.inference.v1 import inference_pb2, inference_pb2_grpc

AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
MOST_ATTEMPTS = 5


def pause_s(error: grpc.RpcError, attempt: int) -> float:
    """Returns the server's retry delay plus up to as much again at random, doubled with each attempt."""
    hint_s = 1.0
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            hint_s = retry.retry_delay.ToTimedelta().total_seconds()
    return hint_s * 2**attempt * (1 + random.random())


def generate(stub: inference_pb2_grpc.InferenceServiceStub, text: str, *, cancel: bool) -> None:
    """Tries again only what has not said a word."""
    key = os.environ.get("QUIRE_API_KEY")
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=20)
    request = inference_pb2.GenerateRequest(text=text, sampling=sampling)
    for attempt in range(MOST_ATTEMPTS):
        has_begun = False
        call = stub.Generate(request, timeout=30, metadata=metadata)
        try:
            for message in call:
                has_begun = True
                print(message.text, end="", flush=True)
                if cancel:
                    call.cancel()
            return
        except grpc.RpcError as error:
            if has_begun or error.code() not in AGAIN or attempt == MOST_ATTEMPTS - 1:
                raise
            time.sleep(pause_s(error, attempt))


def main() -> int:
    address, text, *more = sys.argv[1:]
    with grpc.insecure_channel(address) as channel:
        try:
            generate(inference_pb2_grpc.InferenceServiceStub(channel), text, cancel=more == ["cancel"])
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                print("CANCELLED", file=sys.stderr)
                return 0
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
