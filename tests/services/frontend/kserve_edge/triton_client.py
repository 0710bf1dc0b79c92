"""`python triton_client.py HOST:PORT MODEL`: uses tritonclient[grpc] in a process of its own, since both sides register
the protocol's messages. Prints the answers as JSON."""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

address, model = sys.argv[1:]


def inputs(text: str, **more: Any) -> list[grpc.InferInput]:
    given = {"text_input": np.array([text.encode()], dtype=np.object_)}
    given |= {name: np.array([value], dtype=np.bool_ if value is True else np.object_) for name, value in more.items()}
    tensors = []
    for name, value in given.items():
        tensors.append(grpc.InferInput(name, [1], "BOOL" if value.dtype == np.bool_ else "BYTES"))
        tensors[-1].set_data_from_numpy(value)
    return tensors


def streamed(client: grpc.InferenceServerClient) -> list[str]:
    heard: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: heard.put(error or result))
    client.async_stream_infer(
        model, inputs("Hm?", stream=True), request_id="streamed", enable_empty_final_response=True
    )
    pieces = []
    while True:
        result = heard.get(timeout=60)
        pieces.append(result.as_numpy("text_output")[0].decode())
        if result.get_response().parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return pieces


def refused(client: grpc.InferenceServerClient) -> str:
    try:
        client.infer(model, inputs("Hm?", sampling_parameters='{"top_p": 7}'))
    except InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    return "answered"


with grpc.InferenceServerClient(address) as client:
    answer = client.infer(model, inputs("Hm? ", sampling_parameters='{"temperature": 0}'))
    print(
        json.dumps(
            {
                "live": client.is_server_live(),
                "ready": [client.is_server_ready(), client.is_model_ready(model), client.is_model_ready("other")],
                "outputs": [one.name for one in client.get_model_metadata(model).outputs],
                "whole": answer.as_numpy("text_output")[0].decode(),
                "pieces": streamed(client),
                "refused": refused(client),
            }
        )
    )
