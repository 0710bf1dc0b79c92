"""Scores and vectors of pictures as people have sent them to other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.media.filming_folder import write_filming_folder
from tests.services.frontend.media.seeing import Served, data_url, image, pixels_of, seeing_frontend, shown_prompt, text
from tests.services.frontend.media.seeing_folder import plain, write_seeing_folder

RED, GREEN = (200, 0, 0), (0, 200, 0)
BEACH = "A woman plays with her dog on a beach at sunset."


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_folder(tmp_path_factory.mktemp("models") / "seeing")


async def read(served: Served, path: str, count: int, **body: Any) -> list[tuple[str, list[bytes]]]:
    """Asks, and returns the prompts, a query's first, each with the first pixel of its pictures."""
    first = len(served.script.submissions)
    served.script.pause()
    asked = served.ask(path, **body)
    try:
        found = [await served.submission(first + number, asked) for number in range(count)]
        prompts = [(shown_prompt(served, one), [p[:3] for p in await pixels_of(served, one)]) for one in found]
    finally:
        served.script.resume()
    assert (await asked).status_code == 200, (await asked).text
    return prompts


def turn(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n"


async def test_a_query_of_text_and_pictures(seeing: Path) -> None:
    """vllm#35268: rerank did not accept a query with an image and a text."""
    query = {"content": [text("this is a good thing"), image(plain(RED)), image(plain(GREEN))]}
    documents = [{"content": [text("a text"), image(plain(GREEN))]}, {"content": [text("b text")]}]
    async with seeing_frontend(seeing) as served:
        asked, first, second = await read(served, "/v2/rerank", 3, query=query, documents=documents)
    assert asked == (turn("this is a good thing[picture][picture]"), [bytes(RED), bytes(GREEN)])
    assert first == (turn("a text[picture]"), [bytes(GREEN)])
    assert second == ("b text", [])


@pytest.mark.parametrize("path", ["/v1/rerank", "/score"])
async def test_documents_as_one_content(seeing: Path, path: str) -> None:
    """vllm#32464, QwenLM/Qwen3-VL-Embedding#66: each part is a document of its own."""
    documents = {"content": [text("a golden retriever"), image(plain(RED)), image(plain(GREEN))]}
    name = {"query": BEACH} if path == "/v1/rerank" else {"queries": BEACH}
    async with seeing_frontend(seeing) as served:
        asked, *found = await read(served, path, 4, documents=documents, **name)
    assert asked == (BEACH, [])
    assert found == [
        ("a golden retriever", []), (turn("[picture]"), [bytes(RED)]), (turn("[picture]"), [bytes(GREEN)])
    ]  # fmt: skip


async def test_documents_as_jinas_objects_and_as_parts(seeing: Path) -> None:
    """xorbitsai/inference#5496: {"image": ...}; vllm#32378: parts in a list."""
    url = data_url(plain(RED))
    async with seeing_frontend(seeing) as served:
        _, *found = await read(
            served, "/rerank", 4, query=BEACH, documents=[{"image": url}, image(plain(GREEN)), {"text": "plain"}]
        )
    assert found == [(turn("[picture]"), [bytes(RED)]), (turn("[picture]"), [bytes(GREEN)]), ("plain", [])]


async def test_a_url_as_a_plain_text_stays_a_text(seeing: Path) -> None:
    """ggml-org/llama.cpp#25921: nothing is fetched for a text that looks like a picture."""
    async with seeing_frontend(seeing) as served:
        _, found = await read(served, "/rerank", 2, query="x", documents=["https://example.com/demo.jpeg"])
    assert found == ("https://example.com/demo.jpeg", [])


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([{"content": "x"}], "documents.0 must be a text"),
        ([{"content": [{"type": "image_url"}]}], "need image_url: a URL"),
        ([{"content": [{"type": "input_file", "file_id": "f"}]}], "files"),
        ([{"content": [{"type": "text"}]}], "a part of type 'text' needs its text"),
        (["x", {"image": "x", "text": "y"}], "documents.1 must be a text"),
        ([{"image": "data:image/png;base64,AAAA"}], "Failed to load image"),
    ],
)
async def test_wrong_documents_are_refused_by_place(seeing: Path, documents: list[Any], said: str) -> None:
    async with seeing_frontend(seeing) as served:
        status, error = await served.refusal("/rerank", query="x", documents=documents)
    assert (status, said in error) == (400, True), error


@pytest.mark.parametrize(
    ("options", "rows"), [({"max_pixels": 64}, 1), ({"min_pixels": 64, "max_pixels": 64}, 1), ({"max_pixels": 512}, 4)]
)
async def test_the_pixels_of_a_picture_to_embed_are_limited_by_either_bound(
    options: dict[str, int], rows: int, tmp_path: Path
) -> None:
    """vllm#16406: max_pixels without min_pixels was an internal error."""
    messages = [{"role": "user", "content": [image(plain(RED, 64)), text("?")]}]
    async with seeing_frontend(write_filming_folder(tmp_path / "filming")) as served:
        asked = served.ask("/v1/embeddings", messages=messages, mm_processor_kwargs=options)
        submission = await served.submission(0, asked)
        (item,) = submission.media
        served.script.resume()
        assert (await asked).status_code == 200
    assert item.num_embeddings == rows
