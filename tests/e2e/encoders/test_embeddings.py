"""Embeddings over every API, from real processes: those of the model's hidden states, while streams run."""

from __future__ import annotations

import base64
import tempfile
import threading
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
import transformers

from quire import LLM, AsyncLLM, Client, SamplingParams
from quire.bundled import FOLDER
from quire.cluster import Cluster
from quire.shared.errors import InvalidArgument
from tests.bundled_text import write_text_model

TEXTS = ["Hello, world", "the sum of two and two", "a", "Ünïcödé 🙂 and so on, " * 20]
Vector = npt.NDArray[np.float32]


@cache
def hidden_states() -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerFast]:
    with tempfile.TemporaryDirectory() as made:
        folder = write_text_model(Path(made))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))


def expected(token_ids: list[int], pooler: str = "last") -> Vector:
    model, _ = hidden_states()
    with torch.inference_mode():
        states = model.model(torch.tensor([token_ids])).last_hidden_state[0].float()
    vector = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooler]
    found: Vector = (vector / vector.norm()).numpy()
    return found


def close(found: list[float] | Vector, wanted: Vector, least: float = 0.999) -> bool:
    """Compares by cosine; workers may compute in bfloat16, and transformers computes in float32 here."""
    return len(found) == len(wanted) and float(np.dot(found, wanted)) > least


@pytest.mark.parametrize("pooler", ["last", "mean", "cls"])
def test_vectors_are_those_of_the_hidden_states(cluster: Cluster, pooler: str) -> None:
    with LLM(address=cluster.grpc_address) as llm:
        ids = [llm.client.tokenize(text) for text in TEXTS]
        by_text, by_ids = llm.embed(TEXTS, pooler=pooler), llm.embed(ids, pooler=pooler)
        alone = llm.embed(TEXTS[1], pooler=pooler)
    for text_vector, ids_vector, token_ids in zip(by_text, by_ids, ids, strict=True):
        assert close(text_vector, expected(token_ids, pooler))
        assert close(ids_vector, np.array(text_vector, dtype=np.float32), 0.99999)
    assert close(alone[0], np.array(by_text[1], dtype=np.float32), 0.99999)


def test_openais_package_gets_them(cluster: Cluster) -> None:
    """The package requests base64 by default."""
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0) as client:
        whole = client.embeddings.create(model="", input=TEXTS)
        listed = client.embeddings.create(model="", input=TEXTS, encoding_format="float")
        short = client.embeddings.create(model="", input=TEXTS[0], dimensions=8)
    with Client(cluster.grpc_address) as client:
        ids = [client.tokenize(text) for text in TEXTS]
    assert [item.index for item in whole.data] == [0, 1, 2, 3]
    assert whole.usage.prompt_tokens == whole.usage.total_tokens == sum(map(len, ids))
    for one, other, token_ids in zip(whole.data, listed.data, ids, strict=True):
        assert close(one.embedding, expected(token_ids))
        assert np.allclose(one.embedding, other.embedding, rtol=1e-6)
    cut = expected(ids[0])[:8]
    assert close(short.data[0].embedding, cut / np.linalg.norm(cut))


def test_base64_is_float32_in_little_endian(cluster: Cluster) -> None:
    body = {"input": "Hello", "encoding_format": "base64", "normalize": False}
    answer = httpx.post(f"http://{cluster.http_address}/v1/embeddings", json=body).json()
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4")
    assert answer["object"] == "list"
    assert not np.isclose(np.linalg.norm(vector), 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"pooler": "max"}, "pooler"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 100_000}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"input": ""}, "input"),
        ({"input": [[1, 2], [10**6]]}, "input"),
        ({"dimension": 3}, "dimension"),
    ],
)
def test_what_cannot_be_is_refused_by_name(cluster: Cluster, fields: dict[str, object], field: str) -> None:
    body = {"input": "Hello", **fields}
    answer = httpx.post(f"http://{cluster.http_address}/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["message"] or answer.json()["error"]["param"] == field


def test_single_tokens_have_a_vector_each(cluster: Cluster) -> None:
    with LLM(address=cluster.grpc_address) as llm:
        ids = llm.client.tokenize(TEXTS[1])
        (rows,), (last,) = llm.encode(TEXTS[1], pooler="all"), llm.embed(TEXTS[1])
        (one,) = llm.encode(TEXTS[1])
        with pytest.raises(InvalidArgument, match="encode"):
            llm.embed(TEXTS[1], pooler="all")
    assert len(rows) == len(ids)
    assert close(rows[-1], np.array(last, dtype=np.float32), 0.99999)
    assert close(one[0], np.array(last, dtype=np.float32), 0.99999)


async def test_vectors_come_one_by_one(cluster: Cluster) -> None:
    async with AsyncLLM(address=cluster.grpc_address) as llm:
        whole = await llm.embed(TEXTS)
        told = dict([one async for one in llm.embed_stream(TEXTS)])
        with pytest.raises(InvalidArgument, match="encode"):
            await anext(llm.embed_stream(TEXTS, pooler="all"))
    with Client(cluster.grpc_address) as client:
        assert dict(client.embed_stream(TEXTS)) == told
        with pytest.raises(InvalidArgument, match="dimensions"):
            next(client.embed_stream(TEXTS, dimensions=100_000))
    assert [told[number] for number in range(len(TEXTS))] == whole


async def test_python_raises_errors(cluster: Cluster) -> None:
    async with AsyncLLM(address=cluster.grpc_address) as llm:
        with pytest.raises(InvalidArgument, match="pooler"):
            await llm.embed("Hello", pooler="max")
        with pytest.raises(InvalidArgument, match="dimensions"):
            await llm.embed("Hello", dimensions=100_000)
        assert len(await llm.embed(["a", [5, 6]])) == 2


def test_concurrent_streams_are_unchanged(cluster: Cluster) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    with LLM(address=cluster.grpc_address) as llm:
        alone = llm.generate(TEXTS[:2], params)
        vectors: list[list[float]] = []
        worker = threading.Thread(target=lambda: vectors.extend(v for _ in range(5) for v in llm.embed(TEXTS)))
        worker.start()
        beside = llm.generate(TEXTS[:2], params)
        worker.join(60)
    assert [output.text for output in beside] == [output.text for output in alone]
    assert len(vectors) == 20
