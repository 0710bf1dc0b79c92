"""Adapters from real processes, selected as a request's model over HTTP, gRPC and from Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, AsyncLLM, Client, LoRARequest, SamplingParams
from quire.bundled import ADAPTERS, FOLDER
from quire.cluster import Cluster, ClusterOptions
from quire.requests import RequestOptions
from quire.shared.errors import InvalidArgument, NotFound, Unauthenticated
from quire.shared.models.model_identity import read_config
from quire.shared.security import secret_file
from tests.waiting import until

PROMPT = (
    "Once upon a time there was a lighthouse at the end of the world, and in it lived a cat who could count. One day"
)
RANK = 8
KEY = "k" * 40


def save_adapter(folder: Path) -> None:
    """Saves random weights for every layer's o_proj."""
    config = read_config(FOLDER)
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
    lora = {"other": str(folder), "pirate": str(ADAPTERS / "pirate"), "json": str(ADAPTERS / "json")}
    key = folder.parent / "key"
    secret_file.write(key, KEY)
    worker = {"num_blocks": 400, "threads": 1, "lora": lora, "max_loras": 3}
    worker["lora_folders"] = [str(folder.parent), str(ADAPTERS)]
    settings = {"worker": worker, "frontend": {"admin_key_file": str(key)}}
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
    listed = [(model["id"], model["parent"]) for model in models]
    assert listed == [(base, None), ("json", base), ("other", base), ("pirate", base)]
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


def ask(cluster: Cluster, model: str) -> str:
    messages = [{"role": "user", "content": "What is 23 + 45?"}]
    body = {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0}
    reply = httpx.post(f"http://{cluster.http_address}/v1/chat/completions", json=body, timeout=60).json()
    return str(reply["choices"][0]["message"]["content"]) if "choices" in reply else str(reply["error"]["message"])


def test_the_shipped_adapters_answer_in_their_manner(cluster: Cluster) -> None:
    """Adapters are used in the same steps."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda name: ask(cluster, name), ["pirate", "quire-tiny", "json", "pirate"]))
    assert answers == ["Ahoy! 68 Arr!", "68", '{"answer": "68"}', "Ahoy! 68 Arr!"]


def test_unknown_adapter_name_is_not_found(cluster: Cluster) -> None:
    body = {"model": "third", "prompt": "x"}
    reply = httpx.post(f"http://{cluster.http_address}/v1/completions", json=body)
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert message.startswith("The model `third` does not exist; available: quire-tiny, json, ")


def test_adapters_are_loaded_and_unloaded_at_run_time(cluster: Cluster) -> None:
    """Loads and unloads from Python and over HTTP. Two adapters of one name do not share prefixes. There is one more
    adapter than the worker has room for."""
    plain = ask(cluster, "quire-tiny")
    with Client(cluster.grpc_address) as client:
        assert client.load_adapter("late", "pirate") == 1
        assert ask(cluster, "late") == "Ahoy! 68 Arr!"
        complete(cluster, "late")
        assert cached(complete(cluster, "late")) > 0
        body = {"lora_name": "late", "lora_path": "json", "load_inplace": True}
        url, headers = f"http://{cluster.http_address}/v1", {"authorization": f"Bearer {KEY}"}
        assert httpx.post(f"{url}/load_lora_adapter", json=body, headers=headers, timeout=60).status_code == 200
        assert cached(complete(cluster, "late")) == 0
        assert ask(cluster, "late") == '{"answer": "68"}'
        assert "late" in [model.name for model in client.models()]
        until(lambda: [one.name for one in client.adapters()] == ["json", "late", "other", "pirate"])  # one "late" went
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda name: ask(cluster, name), ["pirate", "json", "late", "other"] * 2))
        assert answers[:3] == answers[4:7] == ["Ahoy! 68 Arr!", '{"answer": "68"}', '{"answer": "68"}']
        chosen = client.generate(
            PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), RequestOptions(model="other")
        )
        assert chosen[0].text == complete(cluster, "other")["choices"][0]["text"]
        assert client.unload_adapter("late") == 0
        assert ask(cluster, "late").startswith("The model `late` does not exist; available: quire-tiny, ")
        with pytest.raises(NotFound, match="the adapter 'late' does not exist"):
            client.unload_adapter("late")
        with pytest.raises(InvalidArgument, match="is not in a folder of lora_folders"):
            client.load_adapter("late", "/etc")
    assert ask(cluster, "quire-tiny") == plain


def answers(llm: LLM, asked: LoRARequest | list[LoRARequest | None]) -> list[str]:
    questions = [[{"role": "user", "content": "What is 23 + 45?"}]] * (
        1 if isinstance(asked, LoRARequest) else len(asked)
    )
    return [found.text for found in llm.chat(questions, SamplingParams(temperature=0), lora_request=asked)]


def test_a_request_from_python_brings_its_adapter(cluster: Cluster) -> None:
    """The adapter is loaded on first use, from any path, and unloaded on request."""
    talk, spoken = LoRARequest("talk", 1, "pirate"), "Ahoy! 68 Arr!"
    with LLM(address=cluster.grpc_address) as llm, LLM(address=cluster.grpc_address) as another:
        assert answers(llm, [talk, None, LoRARequest("json"), talk]) == [spoken, "68", '{"answer": "68"}', spoken]
        assert answers(another, talk) == [spoken]
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        mixed = llm.generate([PROMPT, PROMPT], greedy, lora_request=[talk, LoRARequest("other")])
        assert [one.text for one in mixed] == [complete(cluster, n)["choices"][0]["text"] for n in ("talk", "other")]
        with pytest.raises(InvalidArgument, match="lora_path: 'talk' was loaded from 'pirate', not from 'json'"):
            answers(llm, LoRARequest("talk", 1, "json"))
        assert llm.load_lora_adapter("talk", "json", load_inplace=True) == 1
        assert answers(llm, LoRARequest("talk", 1, "json")) == ['{"answer": "68"}']
        assert llm.unload_lora_adapter("talk") == 0
        with pytest.raises(NotFound, match="The model `talk` does not exist"):
            answers(llm, LoRARequest("talk"))
        assert answers(llm, talk) == [spoken]  # again
        assert llm.unload_lora_adapter("talk") == 0
        with pytest.raises(InvalidArgument, match="lora_request: must have one entry for each of 1 prompts, got 2"):
            llm.generate("x", lora_request=[talk, talk])
        with pytest.raises(InvalidArgument, match="is not in a folder of lora_folders"):
            llm.generate("x", lora_request=LoRARequest("talk", 1, "/etc"))
        with pytest.raises(InvalidArgument, match="is the name of the model"):
            llm.generate("x", lora_request=LoRARequest("quire-tiny", 1, "pirate"))
        assert [one.name for one in llm.client.adapters()] == ["json", "other", "pirate"]


def test_operator_key_allows_adapters_from_other_folders(cluster: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "key"
    secret_file.write(key, "n" * 40)
    there = {"address": cluster.grpc_address, "admin_address": cluster.process("frontend-0").addresses["admin"]}
    with LLM(**there, admin_key_file=str(key)) as llm, pytest.raises(Unauthenticated):
        llm.load_lora_adapter("far", "pirate")
    secret_file.write(key, KEY)
    with LLM(**there, admin_key_file=str(key)) as llm:
        assert answers(llm, LoRARequest("far", 1, "pirate")) == ["Ahoy! 68 Arr!"]
        assert llm.unload_lora_adapter("far") == 0


async def test_asyncio_brings_its_adapter_too(cluster: Cluster) -> None:
    """For awaited and streamed answers; concurrent requests load it once."""
    question, greedy = [{"role": "user", "content": "What is 23 + 45?"}], SamplingParams(temperature=0, max_tokens=24)
    talk = LoRARequest("talk", 1, "pirate")
    async with AsyncLLM(address=cluster.grpc_address) as llm:
        answered = await asyncio.gather(*(llm.chat(question, greedy, lora_request=talk) for _ in range(3)))
        assert [one.text for one in answered] == ["Ahoy! 68 Arr!"] * 3
        whole = await llm.generate(PROMPT, greedy, lora_request=talk)
        told = [one async for one in llm.generate(PROMPT, greedy, "1", lora_request=talk)]
        assert (told[-1].outputs, told[-1].request_id) == (whole.outputs, "1")
        assert whole.text != (await llm.generate(PROMPT, greedy)).text
        assert await llm.unload_lora_adapter("talk") == 0
        with pytest.raises(NotFound, match="The model `talk` does not exist"):
            await llm.generate(PROMPT, greedy, lora_request=LoRARequest("talk"))


@pytest.mark.slow
def test_embedded_cluster_loads_adapters_from_its_folders() -> None:
    with LLM(num_blocks=300, lora_folders=[str(ADAPTERS)]) as llm:
        assert answers(llm, LoRARequest("pirate", 1, str(ADAPTERS / "pirate"))) == ["Ahoy! 68 Arr!"]
        assert llm.unload_lora_adapter("pirate") == 0
