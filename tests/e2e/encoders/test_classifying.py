"""Classes, scores and ranks over every API, from real processes: those of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from quire import LLM
from quire.bundled import FOLDER
from quire.cluster import Cluster, ClusterOptions

QUERY = "the sum of two and two"
DOCUMENTS = ["four", "Hello, world", "two and two are four, " * 30]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, transformers.PreTrainedModel]]:
    """Reranker with random weights in float32."""
    folder: Path = tmp_path_factory.mktemp("reranker")
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, num_labels=1,
    )  # fmt: skip
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.score.weight.data *= 30
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder)
    settings = {"worker": {"num_blocks": 200, "dtype": "float32", "threads": 1}}
    with Cluster(ClusterOptions(model=str(folder), http_port=0, grpc_port=0, settings=settings)) as cluster:
        yield cluster, model


def expected(model: transformers.PreTrainedModel, first: str, second: str) -> float:
    with torch.inference_mode():
        return float(model(torch.tensor([tokenizer()(first, second).input_ids])).logits[0].sigmoid())


def test_pairs_are_scored_as_transformers_does(reranker: tuple[Cluster, transformers.PreTrainedModel]) -> None:
    cluster, model = reranker
    wanted = [expected(model, QUERY, document) for document in DOCUMENTS]
    assert max(wanted) - min(wanted) > 0.01
    url = f"http://{cluster.http_address}"
    with LLM(address=cluster.grpc_address) as llm:
        assert llm.score(QUERY, DOCUMENTS) == pytest.approx(wanted, abs=1e-4)
        found_best = llm.rerank(QUERY, DOCUMENTS, top_n=2)
        (found,) = llm.classify(DOCUMENTS[1])
    ranked = httpx.post(f"{url}/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()
    order = sorted(range(len(wanted)), key=lambda index: -wanted[index])
    assert [entry["index"] for entry in ranked["results"]] == order
    assert [one.index for one in found_best] == order[:2]
    assert [one.score for one in found_best] == pytest.approx([wanted[index] for index in order[:2]], abs=1e-4)
    assert (found.label, len(found.probs)) == ("LABEL_0", 1)


def test_decoder_scores_by_its_embeddings(cluster: Cluster) -> None:
    with LLM(address=cluster.grpc_address) as llm:
        same, other = llm.score(QUERY, [QUERY, DOCUMENTS[1]])
    assert same == pytest.approx(1, abs=1e-3)
    assert other < same
