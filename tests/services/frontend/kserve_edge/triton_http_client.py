"""`python triton_http_client.py HOST:PORT MODEL`: uses tritonclient[http] and prints the answers as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from tritonclient import http
from tritonclient.utils import InferenceServerException

address, model = sys.argv[1:]


def inputs(text: str, *, binary: bool = True, **more: Any) -> list[http.InferInput]:
    given = {"text_input": np.array([text.encode()], dtype=np.object_)}
    given |= {name: np.array([value], dtype=np.bool_ if value is True else np.object_) for name, value in more.items()}
    tensors = []
    for name, value in given.items():
        tensors.append(http.InferInput(name, [1], "BOOL" if value.dtype == np.bool_ else "BYTES"))
        tensors[-1].set_data_from_numpy(value, binary_data=binary)
    return tensors


def outputs_of(result: http.InferResult) -> dict[str, Any]:
    """Returns, by tensor, its elements and whether they were sent as bytes."""
    found = {}
    for output in result.get_response()["outputs"]:
        values = [
            value.decode() if isinstance(value, bytes) else value for value in result.as_numpy(output["name"]).tolist()
        ]
        found[output["name"]] = [values, "data" not in output]
    return found


def refused(client: http.InferenceServerClient) -> str:
    try:
        client.infer(model, inputs("Hm?", sampling_parameters='{"top_p": 7}'))
    except InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    return "answered"


with http.InferenceServerClient(address, concurrency=4) as client:
    asked = inputs("Grüß dich. ", sampling_parameters='{"temperature": 0}', return_num_output_tokens=True)
    as_text = [http.InferRequestedOutput("text_output", binary_data=False)]
    under_way = [client.async_infer(model, inputs(f"{number}. "), request_id=str(number)) for number in range(3)]
    several = [outputs_of(one.get_result())["text_output"][0] for one in under_way]
    print(
        json.dumps(
            {
                "live": client.is_server_live(),
                "ready": [client.is_server_ready(), client.is_model_ready(model), client.is_model_ready("other")],
                "extensions": client.get_server_metadata()["extensions"],
                "outputs": [one["name"] for one in client.get_model_metadata(model)["outputs"]],
                "binary": outputs_of(client.infer(model, asked)),
                "text": outputs_of(client.infer(model, inputs("Hm? ", binary=False), outputs=as_text)),
                "mixed": outputs_of(client.infer(model, inputs("Hm? ", binary=False))),
                "several": several,
                "compressed": [
                    outputs_of(client.infer(model, inputs("Hm? "), request_compression_algorithm=name))["text_output"][
                        0
                    ]
                    for name in ("gzip", "deflate")
                ],
                "refused": refused(client),
            }
        )
    )
