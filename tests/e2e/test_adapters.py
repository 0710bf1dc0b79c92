"""Adapters from real processes: requests choose one as their model, over HTTP, gRPC and from Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.bundled import FOLDER
from quire.cluster import Cluster, ClusterOptions

PROMPT = (
    "Once upon a time there was a lighthouse at the end of the world, and in it lived a cat who could count. One day"
)
RANK = 8


def save_adapter(folder: Path) -> None:
    """Random weights, of every layer's o_proj."""
    config = json.loads((FOLDER / "config.json").read_text())
    rows, columns = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * columns**-0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("adapters") / "other"
    save_adapter(folder)
    settings = {"worker": {"num_blocks": 400, "threads": 1, "lora": {"other": str(folder)}}}
    with Cluster(ClusterOptions(http_port=0, grpc_port=0, settings=settings)) as cluster:
        yield cluster


def complete(cluster: Cluster, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"http://{cluster.http_address}/v1/completions", json=body, timeout=60).json()


def cached(answer: dict[str, Any]) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def test_requests_choose_their_adapter(cluster: Cluster) -> None:
    models = httpx.get(f"http://{cluster.http_address}/v1/models").json()["data"]
    base = models[0]["id"]
    assert [(model["id"], model["parent"]) for model in models] == [(base, None), ("other", base)]
    plain, other, again = complete(cluster, base), complete(cluster, "other"), complete(cluster, base)
    assert (plain["model"], other["model"]) == (base, "other")
    assert plain["choices"][0]["text"] == again["choices"][0]["text"] != other["choices"][0]["text"]
    # What the model has cached of the prompt is not the adapter's.
    assert cached(other) == 0
    assert cached(again) > 0
    assert cached(complete(cluster, "other")) > 0
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(address=cluster.grpc_address) as llm:
        assert llm.generate(PROMPT, params)[0].text == plain["choices"][0]["text"]


def test_a_name_that_nobody_has_is_not_found(cluster: Cluster) -> None:
    body = {"model": "third", "prompt": "x"}
    reply = httpx.post(f"http://{cluster.http_address}/v1/completions", json=body)
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "The model `third` does not exist."
