"""Bodies that a reader of the OpenAPI document can send as they stand, by path: small, and answered with 200 by a model
that can do what the path is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

Body = Mapping[str, Any]

QUESTION = "What is 23 + 45?"
BEGINNING = "Once upon a time"
FRUIT = ["an apple", "a lighthouse"]
SAID = [{"role": "user", "content": QUESTION}]
WEIGHTS = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[256]]}
MARK = "x-examples"  # in a document that has them
NAME, VERSION = "name", "version"  # parameters of paths


def examples(model: str) -> dict[str, Body]:
    """Returns the bodies, for a frontend that serves `model`."""
    return _openai(model) | _pooling(model) | _dialects(model) | _tensors() | _operation()


def parameters(model: str) -> dict[str, str]:
    """Returns values of the parameters that stand in paths."""
    return {NAME: model, VERSION: "1"}


def _openai(model: str) -> dict[str, Body]:
    chat = {"model": model, "messages": SAID, "max_tokens": 40, "temperature": 0}
    answer = {"model": model, "input": QUESTION, "max_output_tokens": 40, "temperature": 0}
    return {
        "/v1/completions": {"model": model, "prompt": BEGINNING, "max_tokens": 20, "temperature": 0},
        "/v1/chat/completions": chat,
        "/v1/chat/completions/batch": {**chat, "messages": [SAID, SAID]},
        "/v1/responses": answer,
        "/v1/responses/input_tokens": {"model": model, "input": QUESTION},
        "/invocations": chat,
        "/tokenize": {"model": model, "prompt": BEGINNING},
        "/detokenize": {"model": model, "tokens": [1, 2, 3]},
        "/v1/batches": {
            "input_file_id": "file-of-POST-v1-files",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    }


def _pooling(model: str) -> dict[str, Body]:
    texts = {"model": model, "input": FRUIT}
    score = {"model": model, "text_1": "something to eat", "text_2": FRUIT}
    rerank = {"model": model, "query": "something to eat", "documents": FRUIT}
    embed = {"model": model, "texts": FRUIT, "input_type": "search_document", "embedding_types": ["float"]}
    return {
        "/v1/embeddings": texts,
        "/pooling": texts,
        "/classify": texts,
        **dict.fromkeys(("/score", "/v1/score"), score),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
        **dict.fromkeys(("/v1/embed", "/v2/embed"), embed),
    }


def _dialects(model: str) -> dict[str, Body]:
    return {
        "/v1/messages": {"model": model, "messages": SAID, "max_tokens": 40},
        "/v1/messages/count_tokens": {"model": model, "messages": SAID},
        "/api/chat": {"model": model, "messages": SAID, "stream": False},
        "/api/generate": {"model": model, "prompt": QUESTION, "stream": False},
        "/api/embed": {"model": model, "input": FRUIT},
        "/api/embeddings": {"model": model, "prompt": FRUIT[0]},
        "/api/show": {"model": model},
        "/generate": {"text": BEGINNING, "sampling_params": {"max_new_tokens": 20, "temperature": 0}},
    }


def _tensors() -> dict[str, Body]:
    """Of the open inference protocol, whose paths name the model."""
    text = {"text_input": BEGINNING, "parameters": {"max_tokens": 20, "temperature": 0}}
    infer = {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [BEGINNING]}],
        "parameters": {"max_tokens": 20},
    }
    bodies: dict[str, Body] = {"infer": infer, "generate": text, "generate_stream": text}
    prefixes = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    return {f"{prefix}/{verb}": body for prefix in prefixes for verb, body in bodies.items()}


def _operation() -> dict[str, Body]:
    """Of operators, whose folders are those that the server was started with."""
    return {
        "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "/adapters/sql"},
        "/v1/unload_lora_adapter": {"lora_name": "sql"},
        "/update_weights_from_disk": {"model_path": "/weights/step-7", "weight_version": "step-7"},
        "/init_weights_update_group": {
            "master_address": "127.0.0.1",
            "master_port": 29600,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "trainer",
            "backend": "gloo",
        },
        "/update_weights_from_distributed": {**WEIGHTS, "group_name": "trainer", "weight_version": "step-7"},
        "/destroy_weights_update_group": {"group_name": "trainer"},
    }


def add(app: FastAPI, model: str) -> None:
    """Has the document of `app` carry the examples, from the next time on that it is asked for."""
    written = app.openapi

    def openapi() -> dict[str, Any]:
        document = written()
        if not document.get(MARK):
            document[MARK] = True
            _fill(document["paths"], model)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _fill(paths: Mapping[str, Any], model: str) -> None:
    bodies, values = examples(model), parameters(model)
    for path, operations in paths.items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in values:
                    parameter["example"] = values[parameter["name"]]
            if method == "post" and path in bodies:
                operation["requestBody"]["content"]["application/json"]["example"] = bodies[path]
