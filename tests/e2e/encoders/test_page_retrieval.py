"""ColPali and ColQwen2 over every API: vectors of queries and pages are those of transformers, and so are scores."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from quire import LLM
from quire.cluster import Cluster, ClusterOptions
from tests.e2e.encoders.retrieval_folders import Retriever, in_the_authors_format, noise, write

pytestmark = pytest.mark.timeout(300)

QUERY = "the total of the invoice?"
PAGES = [noise(40, 30), noise(30, 60), noise(25, 25)]
WORKER = {"threads": 1, "dtype": "float32", "max_num_seqs": 4, "num_blocks": 400}


class Served(NamedTuple):
    """A cluster that serves a model, and the model of transformers."""

    retriever: Retriever
    cluster: Cluster
    http: httpx.Client

    def vectors(self, **body: Any) -> torch.Tensor:
        """Returns the vectors of one input of /pooling."""
        answer = self.http.post("/pooling", json=body)
        assert answer.status_code == 200, answer.text
        return torch.tensor(answer.json()["data"][0]["data"])

    def wanted(self, query: str) -> list[float]:
        """Returns the scores of the pages."""
        found = self.retriever.query(query)
        return [float((found @ self.retriever.page(page).T).max(1).values.sum()) for page in PAGES]


@pytest.fixture(scope="module", params=["colpali", "colqwen2", "colpali-own", "colqwen2-own"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, _, own = request.param.partition("-")
    folder = tmp_path_factory.mktemp("models") / "pages"
    retriever = write(kind, folder)
    if own:
        source, folder = folder, tmp_path_factory.mktemp("own")
        in_the_authors_format(source, folder, kind)
    options = ClusterOptions(model=str(folder), workers=1, http_port=0, grpc_port=0, settings={"worker": WORKER})
    with (
        Cluster(options) as cluster,
        httpx.Client(base_url=f"http://{cluster.http_address}", timeout=120) as http,
    ):
        yield Served(retriever, cluster, http)


def url(picture: Image.Image) -> str:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def shown(picture: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(picture)}}


def messages(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_vectors_of_queries_and_pages(served: Served) -> None:
    wanted = served.retriever.query(QUERY)
    for body in ({"input": QUERY}, {"messages": messages({"type": "text", "text": QUERY})}):
        torch.testing.assert_close(served.vectors(**body), wanted, atol=2e-4, rtol=2e-4)
    for page in PAGES:
        found = served.vectors(messages=messages(shown(page)))
        torch.testing.assert_close(found, served.retriever.page(page), atol=5e-4, rtol=5e-4)
    with LLM(address=served.cluster.grpc_address) as llm:
        (found_by_python,) = llm.encode({"prompt": "", "multi_modal_data": {"image": PAGES[0]}}, pooler="all")
        (as_query,) = llm.encode(QUERY, pooler="all")
    assert np.allclose(found_by_python, served.retriever.page(PAGES[0]), atol=5e-4)
    assert np.allclose(as_query, wanted, atol=2e-4)


def test_scores_of_pages(served: Served) -> None:
    wanted = served.wanted(QUERY)
    assert max(wanted) - min(wanted) > 0.01, "the test would not tell them apart"
    contents = [{"content": [shown(page)]} for page in PAGES]
    forms = [
        {"queries": QUERY, "documents": contents},
        {"data_1": QUERY, "data_2": contents},
        {"text_1": [QUERY], "text_2": [{"image": url(page)} for page in PAGES]},
    ]
    for body in forms:
        answer = served.http.post("/score", json=body)
        assert answer.status_code == 200, answer.text
        assert [one["score"] for one in answer.json()["data"]] == pytest.approx(wanted, abs=5e-3)
    ranked = served.http.post("/v2/rerank", json={"query": QUERY, "documents": contents}).json()["results"]
    assert [one["index"] for one in ranked] == sorted(range(3), key=lambda index: -wanted[index])
    assert [one["document"] for one in ranked] == [{"text": ""}] * 3
    with LLM(address=served.cluster.grpc_address) as llm:
        documents = [{"content": [{"type": "image_url", "image_url": {"url": url(page)}}]} for page in PAGES]
        assert llm.score(QUERY, documents) == pytest.approx(wanted, abs=5e-3)
        assert [one.index for one in llm.rerank(QUERY, documents, 1)] == [int(np.argmax(wanted))]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/pooling", {"messages": messages(shown(PAGES[0]), shown(PAGES[1]))}, "the input has 2 pictures"),
        ("/pooling", {"messages": messages(shown(PAGES[0]), {"type": "text", "text": "x"})}, "a picture and a text"),
        ("/score", {"queries": {"content": [shown(PAGES[0])]}, "documents": "x"}, "queries: this model compares texts"),
        ("/score", {"queries": "x", "documents": [{"content": []}]}, "documents.0 must be a text"),
        ("/score", {"queries": "x", "documents": [{"content": [{"type": "file"}]}]}, "files"),
        ("/v1/embeddings", {"input": "x"}, "pooler must be 'all'"),
        ("/v1/chat/completions", {"messages": messages({"type": "text", "text": "x"})}, ""),
    ],
)
def test_what_the_models_do_not_read_is_refused(served: Served, path: str, body: dict[str, Any], said: str) -> None:
    if path.endswith("completions") and served.retriever.kind == "colqwen2":
        pytest.skip("a decoder without a template of its own is refused by the template's absence")
    answer = served.http.post(path, json=body)
    assert (answer.status_code, said in answer.text) == (400, True), answer.text
