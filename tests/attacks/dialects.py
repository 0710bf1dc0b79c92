"""Attacks on the edges of other APIs: KServe, vLLM's engine, gRPC-Web."""

from __future__ import annotations

import json
from collections.abc import Callable

from quire.services.frontend.web_edge.framing import frame
from quire.shared.pb.dialects import open_inference_pb2, vllm_engine_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.attacks.calls import Call, Post, Rpc
from tests.attacks.sizes import MB, MIB, words

INFER = "/v2/models/quire-tiny/infer"
GENERATE = "/quire.inference.v1.InferenceService/Generate"
MESSAGE = {"role": "user", "content": "x"}
CHAT = "/quire.inference.v1.InferenceService/Chat"


def tensor(name: str, text: str) -> dict[str, object]:
    return {"name": name, "datatype": "BYTES", "shape": [1], "data": [text]}


def infer(copies: int = 1, **fields: object) -> list[Call]:
    return [Post(INFER, json.dumps(fields).encode())] * copies


def infer_bytes(copies: int, text: str) -> list[Call]:
    """Returns calls whose text follows the JSON as bytes."""
    data = len(text).to_bytes(4, "little") + text.encode()
    asked = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    told = json.dumps({"inputs": [asked]}).encode()
    return [Post(INFER, told + data, json_bytes=len(told))] * copies


def infer_raw(*inputs: open_inference_pb2.ModelInferRequest.InferInputTensor, raw: bytes = b"") -> Rpc:
    request = open_inference_pb2.ModelInferRequest(inputs=inputs, raw_input_contents=[raw] if raw else [])
    return Rpc("ModelInfer", request.SerializeToString(), streams=False, service="inference.GRPCInferenceService")


def elements(*texts: bytes) -> open_inference_pb2.ModelInferRequest.InferInputTensor:
    contents = open_inference_pb2.InferTensorContents(bytes_contents=texts)
    shape = [len(texts)]
    return open_inference_pb2.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=shape, contents=contents
    )


def engine(copies: int = 1, stop: int = 0, **fields: object) -> list[Call]:
    sampling = vllm_engine_pb2.SamplingParams(stop=["s"] * stop)
    request = vllm_engine_pb2.GenerateRequest(sampling_params=sampling, **fields)  # type: ignore[arg-type]
    return [Rpc("Generate", request.SerializeToString(), service="vllm.grpc.engine.VllmEngine")] * copies


def web(path: str, kind: str, message: bytes, copies: int = 1) -> list[Call]:
    return [Post(path, frame(0, message), content_type=kind)] * copies


DIALECTS: dict[str, Callable[[], list[Call]]] = {
    "v2: a text of 15 MB, 4 at once": lambda: infer(4, inputs=[tensor("text_input", words(15 * MB))]),
    "v2: 15 MB of text as bytes, 4 at once": lambda: infer_bytes(4, words(15 * MB)),
    "v2: 150,000 inputs": lambda: infer(inputs=[tensor("text_input", "x")] * 150_000),
    "v2: 1,000,000 elements": lambda: infer(
        inputs=[{"name": "text_input", "datatype": "BYTES", "shape": [MB], "data": ["x"] * MB}]
    ),
    "KServe's gRPC: a text of 15 MB, 4 at once": lambda: [infer_raw(elements(words(15 * MB).encode()))] * 4,
    "KServe's gRPC: 5,000,000 elements": lambda: [infer_raw(elements(*[b"x"] * (5 * MB)))],
    "KServe's gRPC: 60,000 raw characters, 64 at once": lambda: (
        [infer_raw(elements(b""), raw=(60_000).to_bytes(4, "little") + words(60_000).encode())] * 64
    ),
    "vllm.grpc.engine: 4,000,000 token ids, 4 at once": lambda: engine(
        4, tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[7] * (4 * MB))
    ),
    "vllm.grpc.engine: 1,000,000 stop strings": lambda: engine(stop=MB, text="a"),
    "vllm.grpc.engine: a text of 15 MB, 4 at once": lambda: engine(4, text=words(15 * MB)),
    "Connect: a text of 15 MB, 4 at once": lambda: web(
        GENERATE, "application/connect+proto", pb.GenerateRequest(text=words(15 * MB)).SerializeToString(), 4
    ),
    "Connect: a text of 15 MB as JSON, 4 at once": lambda: web(
        GENERATE, "application/connect+json", json.dumps({"text": words(15 * MB)}).encode(), 4
    ),
    "Connect: 200,000 messages as JSON": lambda: web(
        CHAT,
        "application/connect+json",
        json.dumps({"messages": [{"role": "user", "content": "x"}] * 200_000}).encode(),
    ),
    "Connect: 15 MiB of [ as JSON": lambda: web(GENERATE, "application/connect+json", b"[" * (15 * MIB)),
    "gRPC-Web: 7,000,000 empty messages": lambda: web(CHAT, "application/grpc-web+proto", b"\x0a\x00" * (7 * MB)),
}
