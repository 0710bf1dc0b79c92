"""Pictures through a whole cluster: frontend, scheduler and worker answer as transformers does."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image
from tokenizers import Tokenizer

from quire.cluster import Cluster, ClusterOptions
from quire.services.worker.step.fetched_item import Pixels
from tests.chaos.test_workers import pid
from tests.services.frontend.media.seeing_folder import PLACEHOLDER, write_seeing_folder
from tests.services.worker.media.pictures import NUM_ROWS, greedy, make_llava, picture
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 8
A, B = picture(1), picture(2)


class Seeing:
    """A cluster whose model takes pictures, with the same model in transformers."""

    def __init__(self, cluster: Cluster, model: Any, tokenizer: Tokenizer) -> None:
        self.cluster, self._model, self._tokenizer = cluster, model, tokenizer
        self.http = httpx.Client(base_url=f"http://{cluster.http_address}", timeout=120)

    def ask(self, *parts: str | Pixels, n: int = 1, **sampling: Any) -> list[str]:
        """Returns the answers to a user's message of texts and pictures."""
        content = [_part(part) for part in parts]
        body = {"messages": [{"role": "user", "content": content}], "n": n}
        body |= {"max_tokens": NUM_TOKENS, "top_k": 1, "ignore_eos": True, "skip_special_tokens": False, **sampling}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return [choice["message"]["content"] for choice in answer.json()["choices"]]

    def times(self, *parts: str | Pixels) -> dict[str, float]:
        """Returns the times of a request, in milliseconds."""
        content = [_part(part) for part in parts]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "return_metrics": True}
        times: dict[str, float] = self.http.post("/v1/chat/completions", json=body).json()["metrics"]
        return times

    def expected(self, *parts: str | Pixels, num_beams: int = 1) -> str:
        """Returns the answer of transformers."""
        shown = "".join(part if isinstance(part, str) else PLACEHOLDER * NUM_ROWS for part in parts)
        prompt = f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        pictures = [part for part in parts if not isinstance(part, str)]
        return self._tokenizer.decode(
            greedy(self._model, ids, pictures, NUM_TOKENS, num_beams), skip_special_tokens=False
        )


def _part(part: str | Pixels) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    stream = io.BytesIO()
    Image.fromarray(part[0]).save(stream, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = write_seeing_folder(tmp_path_factory.mktemp("models") / "seeing")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
    texts["eos_token_id"] = tokenizer.token_to_id("<|im_end|>")
    placeholder = tokenizer.token_to_id(PLACEHOLDER)
    model = make_llava(folder, "qwen3-tied", text_changes=texts, image_token_id=placeholder)
    worker = {"threads": 1, "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 400}
    options = ClusterOptions(model=str(folder), workers=1, http_port=0, grpc_port=0, settings={"worker": worker})
    with Cluster(options) as running:
        found = Seeing(running, model, tokenizer)
        yield found
        found.http.close()


def test_answers_are_those_of_transformers(seeing: Seeing) -> None:
    for parts in [("hello ", A, " world"), (A, B), ("one two three", B, "four", A, "five " * 9), ("only text",)]:
        assert seeing.ask(*parts) == [seeing.expected(*parts)], [part for part in parts if isinstance(part, str)]


def test_samples_share_their_picture(seeing: Seeing) -> None:
    parts = ("what is ", A, "?")
    assert seeing.ask(*parts, n=3) == [seeing.expected(*parts)] * 3


def test_beams_share_their_picture(seeing: Seeing) -> None:
    parts = ("list ", A, "now")
    beams = seeing.ask(*parts, n=2, use_beam_search=True, top_k=-1)
    assert beams[0] == seeing.expected(*parts, num_beams=2)
    assert beams[1] != beams[0]


def test_a_dead_worker_costs_no_answer(seeing: Seeing) -> None:
    """The worker that takes its place fetches and encodes the picture again."""
    parts = ("after ", B, " and ", A)
    assert seeing.ask(*parts) == [seeing.expected(*parts)]
    process = seeing.cluster.process("worker-0")
    before = process.restarts
    os.kill(pid(seeing.cluster, "worker-0"), signal.SIGKILL)
    until(lambda: process.restarts > before)
    assert seeing.ask(*parts) == [seeing.expected(*parts)]


def test_the_worker_says_what_it_encodes(seeing: Seeing) -> None:
    (card,) = seeing.http.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image"]


def test_the_time_of_encoding_comes_from_the_worker(seeing: Seeing) -> None:
    first, again = (seeing.times(f"{words} ", picture(77)) for words in ("one", "two"))
    assert 0 < first["encode_time_ms"] < first["queue_time_ms"]
    assert again["encode_time_ms"] == 0, "its embeddings were kept"
    assert min(first["fetch_time_ms"], first["preprocess_time_ms"]) > 0
