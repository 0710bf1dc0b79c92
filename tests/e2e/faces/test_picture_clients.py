"""Clients of four APIs send a picture and get the bundled model's answer about it."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFont

from quire.cluster import Cluster
from tests.pictures import data_url, encoded

QUESTION, WORDS = "What does it say?", ("tea", "sun")
MODEL = "quire-tiny"
PROGRAM = Path(__file__).with_name("ask_about_picture.mjs")
PACKAGES = "ai @ai-sdk/openai-compatible"
words = pytest.mark.parametrize("word", WORDS)


def written(word: str) -> Image.Image:
    """Returns a picture of a printed word, as the quickstart draws it."""
    picture = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(picture).text((48, 48), word, "black", ImageFont.load_default(48), "mm")
    return picture


def base64_of(word: str) -> str:
    return base64.b64encode(encoded(written(word))).decode()


@words
def test_openais_package(cluster: Cluster, word: str) -> None:
    import openai

    url = data_url(written(word))
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0) as client:
        parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "temperature": 0}
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion()
        items: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": QUESTION}]
        response = client.responses.create(model=MODEL, input=[{"role": "user", "content": items}], temperature=0)
    for found in (whole.choices[0].message.content, streamed.choices[0].message.content, response.output_text):
        assert word in (found or "").lower(), found


@words
def test_anthropics_package(cluster: Cluster, word: str) -> None:
    import anthropic

    source = {"type": "base64", "media_type": "image/png", "data": base64_of(word)}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    with anthropic.Anthropic(base_url=f"http://{cluster.http_address}", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": content}]}
        whole = client.messages.create(**asked, extra_body={"temperature": 0})
        with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            streamed = stream.get_final_text()
    assert word in whole.content[0].text.lower()
    assert word in streamed.lower()


@pytest.mark.skipif(importlib.util.find_spec("ollama") is None, reason="pip install ollama")
@words
def test_ollamas_package(cluster: Cluster, word: str, tmp_path: Path) -> None:
    import ollama

    file = tmp_path / "picture.png"
    written(word).save(file)
    options = {"temperature": 0}
    message = {"role": "user", "content": QUESTION, "images": [str(file)]}
    with ollama.Client(f"http://{cluster.http_address}") as client:
        chat = client.chat(MODEL, [message], options=options)
        pieces = client.chat(MODEL, [message], stream=True, options=options)
        streamed = "".join(piece.message.content or "" for piece in pieces)
        single = client.generate(MODEL, QUESTION, images=[file.read_bytes()], options=options)
    for found in (chat.message.content, streamed, single.response):
        assert word in (found or "").lower(), found


@words
def test_the_ai_sdk(cluster: Cluster, word: str, tmp_path: Path) -> None:
    folder = os.environ.get("TEST_NODE_MODULES", "")
    if shutil.which("node") is None or not (Path(folder) / "@ai-sdk" / "openai-compatible").is_dir():
        pytest.skip(f"needs node and TEST_NODE_MODULES=FOLDER/node_modules: npm install {PACKAGES}")
    file = tmp_path / "picture.png"
    written(word).save(file)
    command = ["node", str(PROGRAM), f"http://{cluster.http_address}/v1", str(file), QUESTION]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env={**os.environ, "NODE_PATH": folder}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert word in found["whole"].lower(), found
    assert word in found["streamed"].lower(), found
    assert found["inputTokens"] > 20, "the picture's tokens are counted"
