"""Chats about pictures with Qwen-VL models give the tokens of transformers, through all services."""

from __future__ import annotations

import base64
import io
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from PIL import Image

from quire import bundled
from tests.e2e.conftest import running_cluster
from tests.services.worker.media.qwen_pictures import NoText, Prompt, greedy, make_qwen, noise, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TOKENS, VOCAB_SIZE, PLACEHOLDER = 40, 4096, 9  # of the bundled tokenizer
DRAFTING = '{"method": "ngram", "num_speculative_tokens": 3}'
QUESTION = {"type": "text", "text": "What are these?"}


def url(picture: Image.Image) -> str:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def expected(model: Any, folder: Path, pictures: list[Image.Image]) -> list[int]:
    """Returns the answer of transformers to the prompt that its own chat template and our expansion give."""
    tokenizer, processor = transformers.AutoTokenizer.from_pretrained(folder), read(folder)
    messages = [{"role": "user", "content": [*({"type": "image"} for _ in pictures), QUESTION]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens: list[int] = []
    left = iter(pictures)
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if token == PLACEHOLDER:
            picture = next(left)
            layout = processor.layout(picture.height, picture.width, {})
            tokens += processor.expand(layout, NoText()).token_ids
        else:
            tokens.append(token)
    return greedy(model, Prompt(tokens, (), [], pictures), NUM_TOKENS)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_chats_with_several_pictures(name: str, tmp_path: Path) -> None:
    """The second time, the prefix is cached up to the inside of a picture; drafts are verified all the while."""
    model = make_qwen(tmp_path, name, vocab_size=VOCAB_SIZE, placeholder=PLACEHOLDER)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled.FOLDER / file, tmp_path)
    worker = {"dtype": "float32", "speculative_config": DRAFTING}
    chats = [[noise(24, 40), noise(64, 16)], [noise(24, 40)], [], [noise(24, 40), noise(64, 16)]]
    with running_cluster(model=str(tmp_path), worker=worker) as cluster:
        for pictures in chats:
            parts = [{"type": "image_url", "image_url": {"url": url(picture)}} for picture in pictures]
            body = {
                **{"model": tmp_path.name, "messages": [{"role": "user", "content": [*parts, QUESTION]}]},
                **{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True},
            }
            answer = httpx.post(f"http://{cluster.http_address}/v1/chat/completions", json=body, timeout=100)
            assert answer.status_code == httpx.codes.OK, answer.text
            assert answer.json()["choices"][0]["token_ids"] == expected(model, tmp_path, pictures)
        parts = [{"type": "image_url", "image_url": {"url": url(noise(64, 32))}}, QUESTION]
        counts = []
        for options in ({}, {"max_pixels": 1024}):
            body = {"model": tmp_path.name, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
            body["mm_processor_kwargs"] = options
            answer = httpx.post(f"http://{cluster.http_address}/v1/chat/completions", json=body, timeout=100)
            assert answer.status_code == httpx.codes.OK, answer.text
            counts.append(answer.json()["usage"]["prompt_tokens"])
        largest, smaller = (read(tmp_path).layout(64, 32, options).numbers for options in ({}, {"max_pixels": 1024}))
        assert counts[0] - counts[1] == largest[1] * largest[2] - smaller[1] * smaller[2] > 0
