"""Late-interaction models in both published layouts: scores of a plain computation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, AsyncClient
from quire.cluster import Cluster, ClusterOptions
from quire.outputs import Ranked
from tests.e2e.encoders import encoder_folder

SIZE = 16  # of a token's vector
QUERY_LENGTH, DOCUMENT_LENGTH = 12, 20
QUERY = "the sum of two and two"
DOCUMENTS = ["four", "hello, world.", "two and two " * 20, "the sum, the sum"]


class Served(NamedTuple):
    cluster: Cluster
    model: Any
    projection: torch.Tensor
    expands: bool


def colbert(folder: Path) -> tuple[Any, torch.Tensor]:
    return encoder_folder.write_colbert(folder, SIZE, QUERY_LENGTH, DOCUMENT_LENGTH)


def pylate(folder: Path) -> tuple[Any, torch.Tensor]:
    """A folder of modules without pooling; queries are not padded."""
    model = encoder_folder.write(folder, "modernbert", "Model", *encoder_folder.LATE_WORDS)
    projection = torch.randn(SIZE, model.config.hidden_size)
    dense = {"in_features": model.config.hidden_size, "out_features": SIZE, "bias": False}
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text(
        json.dumps({**dense, "activation_function": "torch.nn.modules.linear.Identity"})
    )
    save_file({"linear.weight": projection}, folder / "1_Dense" / "model.safetensors")
    types = {"sentence_transformers.models.Transformer": "", "pylate.models.Dense.Dense": "1_Dense"}
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in types.items()]))
    named = {"query_prefix": "[unused0]", "document_prefix": "[unused1] ", "skiplist_words": [",", "."]}
    lengths = {"query_length": QUERY_LENGTH, "document_length": DOCUMENT_LENGTH, "do_query_expansion": False}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(named | lengths))
    return model, projection


@pytest.fixture(scope="module", params=[colbert, pytest.param(pylate, marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("late")
    torch.manual_seed(3)
    model, projection = request.param(folder)
    settings = {"worker": {"threads": 1, "max_num_seqs": 8, "dtype": "float32"}}
    with Cluster(ClusterOptions(model=str(folder), http_port=0, grpc_port=0, settings=settings)) as cluster:
        yield Served(cluster, model, projection, request.param is colbert)


def vectors(served: Served, text: str, *, is_query: bool) -> torch.Tensor:
    """Token vectors as in ColBERT's paper: a marker after [CLS], queries padded with masked [MASK] tokens, punctuation
    of documents left out."""
    tokenizer = encoder_folder.tokenizer(*encoder_folder.LATE_WORDS)
    cls, *ids, sep = tokenizer.encode(text).ids
    most = QUERY_LENGTH if is_query else DOCUMENT_LENGTH
    mask, *marks = (tokenizer.token_to_id(name) for name in encoder_folder.LATE_WORDS)
    tokens = [cls, marks[0 if is_query else 1], *ids[: most - 3], sep]
    fillers = QUERY_LENGTH - len(tokens) if is_query and served.expands else 0
    seen = torch.tensor([[1] * len(tokens) + [0] * fillers])
    whole = torch.tensor([tokens + [mask] * fillers])
    with torch.inference_mode():
        states = served.model(whole, attention_mask=seen).last_hidden_state[0]
    found = torch.nn.functional.normalize(states @ served.projection.T, dim=1)
    skipped = [tokenizer.token_to_id(word) for word in ",."]
    return found if is_query else found[[token not in skipped for token in tokens]]


def expected(served: Served) -> list[float]:
    query = vectors(served, QUERY, is_query=True)
    return [float((query @ vectors(served, one, is_query=False).T).max(1).values.sum()) for one in DOCUMENTS]


async def ranked_by(address: str) -> list[Ranked]:
    async with AsyncClient(address) as client:
        return await client.rerank(QUERY, DOCUMENTS, top_n=2)


def test_scores_are_sums_of_best_matches(served: Served) -> None:
    at = f"http://{served.cluster.http_address}"
    wanted = expected(served)
    assert max(wanted) - min(wanted) > 0.5, "the test would not tell them apart"
    scored = httpx.post(f"{at}/score", json={"queries": QUERY, "documents": DOCUMENTS}).json()
    ranked = httpx.post(f"{at}/v2/rerank", json={"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()
    with LLM(address=served.cluster.grpc_address) as llm:
        assert llm.score(QUERY, DOCUMENTS) == pytest.approx(wanted, abs=1e-4)
        found = asyncio.run(ranked_by(served.cluster.grpc_address))
    assert [one["score"] for one in scored["data"]] == pytest.approx(wanted, abs=1e-4)
    best = sorted(range(len(wanted)), key=lambda index: -wanted[index])[:2]
    assert [one["index"] for one in ranked["results"]] == best
    assert [one.index for one in found] == best
    assert [one.score for one in found] == pytest.approx([wanted[index] for index in best], abs=1e-4)


def test_vectors_of_tokens_by_the_part_that_a_text_plays(served: Served) -> None:
    at = f"http://{served.cluster.http_address}"
    for name in ("query", "document"):
        answer = httpx.post(f"{at}/pooling", json={"input": "hello, world", "prompt_name": name}).json()
        wanted = vectors(served, "hello, world", is_query=name == "query")
        assert np.allclose(answer["data"][0]["data"], wanted.numpy(), atol=1e-4)
    refused = httpx.post(f"{at}/v1/embeddings", json={"input": "hello"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pooler")
    assert httpx.post(f"{at}/v1/completions", json={"prompt": "hello"}).status_code == 400
