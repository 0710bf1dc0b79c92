"""Tests of the requests to workers for classes and scores, and of the clients' answers.

The scripted scheduler's vector of a prompt is its length and its first token.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from quire.services.frontend.input_processor.pooling.scoring import Scoring, probabilities
from quire.services.frontend.request.request import PairPrompt, TextPrompt
from quire.shared.columns import f32_bytes
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import pooling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.worker.v1.worker_pb2 import SequenceParams
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.tiny_folder import END, START, write_folder


@asynccontextmanager
async def classifier(folder: Path, *labels: str) -> AsyncIterator[tuple[Running, ScriptedScheduler]]:
    names = {str(number): label for number, label in enumerate(labels)}
    model_folder = write_folder(folder / "model", architectures=["Qwen3ForSequenceClassification"], id2label=names)
    script = ScriptedScheduler()
    async with scheduler(script), running(model_folder, script.address) as frontend:
        yield frontend, script


def test_texts_are_read_once_and_pairs_as_pairs() -> None:
    apart = Scoring.of(["a"], ["b", "c"], ())
    assert apart.prompts == [TextPrompt("a"), TextPrompt("b"), TextPrompt("c")]
    assert apart.scores([f32_bytes(v) for v in ([1.0, 0.0], [0.6, 0.8], [0.0, 1.0])]) == pytest.approx([0.6, 0.0])
    each = Scoring.of(["a", "d"], ["b", "c"], ())
    assert each.scores([f32_bytes(v) for v in ([1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.0, 1.0])]) == pytest.approx(
        [0.6, 1]
    )
    pairs = Scoring.of(["a"], ["b", "c"], ["relevant"])
    assert pairs.prompts == [PairPrompt("a", "b"), PairPrompt("a", "c")]
    assert pairs.scores([f32_bytes([0.0]), f32_bytes([-100.0])]) == pytest.approx([0.5, 0.0])


def test_the_best_documents_come_first_and_equal_ones_in_order() -> None:
    scoring = Scoring.of(["a"], ["b", "c", "d"], ["relevant"])
    columns = [f32_bytes([value]) for value in (0.0, 2.0, 0.0)]
    assert [index for index, _ in scoring.rank(columns, 0)] == [1, 0, 2]
    assert [index for index, _ in scoring.rank(columns, 2)] == [1, 0]


@pytest.mark.parametrize("scores", [[0.0, 1.0, 2.0], [1e4, -1e4], [-300.0], [300.0]])
def test_probabilities_of_extreme_scores_are_finite(scores: Sequence[float]) -> None:
    found = probabilities(f32_bytes(scores))
    assert np.isfinite(found).all()
    if len(scores) > 1:
        assert found.sum() == pytest.approx(1)
        assert found.argmax() == np.argmax(scores)


@pytest.mark.parametrize(
    ("queries", "documents", "classes", "text"),
    [
        (["a"], [], (), "documents must contain at least one text"),
        (["a", "b"], ["c", "d", "e"], (), "queries must contain one text, or as many as documents"),
        ([], ["c"], (), "got 0"),
        (["a"], ["b"], ("x", "y"), "it has 2 classes and cannot score pairs"),
    ],
)
def test_inputs_without_pairs_are_refused(queries: list[str], documents: list[str], classes: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Scoring.of(queries, documents, classes)


async def test_classes_over_http_and_grpc(tmp_path: Path) -> None:
    async with classifier(tmp_path, "bad", "good") as (frontend, script):
        answer = (await frontend.http.post("/classify", json={"input": [[1, 9], [8, 2, 2]]})).json()
        message = await frontend.inference.Classify(
            pb.ClassifyRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[1, 9]))])
        )
        raw = (await frontend.http.post("/pooling", json={"input": [8, 2, 2]})).json()
        as_raw = (await frontend.http.post("/pooling", json={"input": [8, 2, 2], "use_activation": False})).json()
        as_probabilities = await frontend.http.post("/pooling", json={"input": [8, 2, 2], "use_activation": True})
        invoked = (await frontend.http.post("/invocations", json={"input": [[1, 9], [8, 2, 2]]})).json()
        refused = await frontend.http.post("/v1/completions", json={"prompt": "a"})
    assert [entry["label"] for entry in answer["data"]] == ["bad", "good"]
    assert answer["data"][1]["probs"] == pytest.approx([1 / (1 + math.exp(5)), 1 / (1 + math.exp(-5))])
    assert answer["usage"]["prompt_tokens"] == 5
    assert [found.label for found in message.classifications] == ["bad"]
    assert raw["data"][0]["data"] == as_raw["data"][0]["data"] == [3, 8]
    assert (as_probabilities.status_code, as_probabilities.json()["error"]["param"]) == (400, "use_activation")
    assert invoked["data"] == answer["data"]
    assert script.submissions[0].params.pooling.classify
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


async def test_pairs_over_http_and_grpc(tmp_path: Path) -> None:
    async with classifier(tmp_path, "relevant") as (frontend, script):
        body = {"query": "one", "documents": ["two", "two three four five"], "top_n": 1}
        ranked = [
            (await frontend.http.post(path, json=body)).json() for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ]
        scored = (await frontend.http.post("/score", json={"text_1": "one", "text_2": ["two", "two three"]})).json()
        over_grpc = await frontend.inference.Rerank(pb.RerankRequest(query="one", documents=["two", "two three four"]))
        scores = await frontend.inference.Score(pb.ScoreRequest(queries=["one"], documents=["two", "two three"]))
        wrong = [
            await frontend.http.post("/score", json=body)
            for body in (
                {"text_1": "a", "queries": "b", "documents": "c"},
                {"data_1": "a", "text_1": "b", "documents": "c"},
                {"queries": "a", "items": "b", "documents": "c"},
                {"queries": "a"},
            )
        ]
    for answer in ranked:
        (best,) = answer["results"]
        assert (best["index"], best["document"]) == (1, {"text": "two three four five"})
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(list(scores.scores))
    assert [found.index for found in over_grpc.results] == [1, 0]
    lengths = [submission.num_prompt_tokens for submission in script.submissions[:2]]
    assert best["relevance_score"] == pytest.approx(1 / (1 + math.exp(-lengths[1])))
    fields = ["queries", "queries", "documents", "documents"]
    assert [(one.status_code, one.json()["error"]["param"]) for one in wrong] == [(400, field) for field in fields]


async def test_documents_of_a_ranking_may_be_objects(tmp_path: Path) -> None:
    """Checks CrispEmbed#51, OpenViking#3291: Jina's clients and older ones of Cohere wrap each text."""
    texts = ["two", "two three four five"]
    async with classifier(tmp_path, "relevant") as (frontend, _):
        answers = [
            (await frontend.http.post(path, json={"query": "one", "documents": documents})).json()["results"]
            for path in ("/rerank", "/v2/rerank")
            for documents in (texts, [{"text": text} for text in texts], [{"text": texts[0], "id": 7}, texts[1]])
        ]
        wrong = [
            await frontend.http.post("/rerank", json={"query": "one", "documents": [document]})
            for document in ({"image": "data:,"}, {"text": 5}, {"text": None}, 5)
        ]
    assert all(answer == answers[0] for answer in answers)
    assert [found["document"] for found in answers[0]] == [{"text": texts[1]}, {"text": texts[0]}]
    assert [(one.status_code, one.json()["error"]["param"]) for one in wrong] == [(400, "documents.0")] * 4


async def test_models_without_a_classifier_return_an_error(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        refused = await frontend.http.post("/classify", json={"input": "a"})
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await frontend.inference.Classify(pb.ClassifyRequest(inputs=[pb.EmbedInput(text="a")]))
        empty = await frontend.http.post("/rerank", json={"query": "a", "documents": []})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "documents")


def test_models_with_raw_scores_return_them() -> None:
    scoring = Scoring.of(["a"], ["b", "c"], ["relevant"], raw_scores=True)
    assert scoring.scores([f32_bytes([-3.5]), f32_bytes([8.25])]) == [-3.5, 8.25]


def late_folder(folder: Path) -> Path:
    """Writes the folder of a late-interaction model as PyLate publishes it."""
    model_folder = write_folder(folder)
    types = {"sentence_transformers.models.Transformer": "", "pylate.models.Dense.Dense": "1_Dense"}
    (model_folder / "modules.json").write_text(
        json.dumps([{"type": kind, "path": path} for kind, path in types.items()])
    )
    (model_folder / "1_Dense").mkdir()
    (model_folder / "1_Dense" / "config.json").write_text(json.dumps({"in_features": 8, "out_features": 4}))
    named = {"query_prefix": START, "document_prefix": END, "do_query_expansion": False, "skiplist_words": []}
    (model_folder / "config_sentence_transformers.json").write_text(json.dumps(named))
    return model_folder


async def test_documents_are_submitted_with_their_query(tmp_path: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(late_folder(tmp_path / "model"), script.address) as frontend:
        one = (await frontend.http.post("/score", json={"queries": "one", "documents": ["two", "two three"]})).json()
        each = await frontend.inference.Score(pb.ScoreRequest(queries=["one two", "four"], documents=["two", "two"]))
        ranked = await frontend.inference.Rerank(pb.RerankRequest(query="one", documents=["two", "two three"]))
        vectors = (await frontend.http.post("/pooling", json={"input": "one", "prompt_name": "query"})).json()
        script.compares = False
        wrong = await frontend.http.post("/score", json={"queries": "one", "documents": ["two", "two three"]})
    queries = [submission.late_query for submission in script.submissions]
    read = [len(query.token_ids) // 4 for query in queries]
    lengths = [submission.num_prompt_tokens for submission in script.submissions]
    assert queries[0] == queries[1] == queries[4]
    assert queries[2] != queries[3]
    assert [found["score"] for found in one["data"]] == [read[0] + lengths[0], read[0] + lengths[1]]
    assert one["usage"]["prompt_tokens"] == read[0] + lengths[0] + lengths[1], "the query counts once"
    assert list(each.scores) == [read[2] + lengths[2], read[3] + lengths[3]]
    assert each.usage.prompt_tokens == sum(read[2:4]) + sum(lengths[2:4])
    assert [found.index for found in ranked.results] == [1, 0]
    params = SequenceParams.FromString(queries[0].params)
    assert params.pooling.pooler == pooling_pb2.POOLER_ALL
    assert not queries[6].token_ids, "whoever asks for vectors gets them"
    assert len(vectors["data"]) == 1
    assert wrong.status_code == 500
