"""Client with the published stubs of vLLM's gRPC protocol (smg-grpc-proto): `python smg_client.py HOST:PORT`.

It is a separate process, since the stubs and our code register the same messages. Prints the answers as JSON.
"""

from __future__ import annotations

import json
import sys

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

[address] = sys.argv[1:]

with grpc.insecure_channel(address) as channel:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    message = pb.GenerateRequest(
        request_id="mine",
        tokenized=pb.TokenizedInput(original_text="", input_ids=[5, 6, 7]),
        sampling_params=pb.SamplingParams(temperature=0, max_tokens=4, skip_special_tokens=True),
        stream=True,
    )
    *chunks, end = stub.Generate(message, timeout=60)
    info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
    print(
        json.dumps(
            {
                "healthy": stub.HealthCheck(pb.HealthCheckRequest(), timeout=60).healthy,
                "tokens": [token_id for one in chunks for token_id in one.chunk.token_ids],
                "finish_reason": end.complete.finish_reason,
                "prompt_tokens": end.complete.prompt_tokens,
                "model": info.served_model_name,
                "running": stub.GetLoads(pb.GetLoadsRequest(), timeout=60).loads[0].num_running_reqs,
            }
        )
    )
