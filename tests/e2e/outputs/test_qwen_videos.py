"""Chats about videos with Qwen-VL models give the tokens of transformers, through all services."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import transformers

from quire import LLM, SamplingParams, bundled
from quire.services.frontend.media.policy import MediaBounds
from quire.services.frontend.media.videos import decode
from quire.services.frontend.request.media import NO_METADATA
from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.media.registry import read_video_processor
from quire.shared.pb.common.v1 import media_pb2
from tests.e2e.conftest import running_cluster
from tests.e2e.page import PICTURES, output_of
from tests.services.frontend.media.video_files import video
from tests.services.worker.media.qwen_pictures import make_qwen
from tests.services.worker.media.qwen_videos import SeenItem, VideoPrompt, greedy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TOKENS, VOCAB_SIZE = 8, 4096
PICTURE, VIDEO, START, END = 9, 10, 11, 12  # of the bundled tokenizer
MARK = "<|reserved_1|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% elif part.type == 'video' %}<|reserved_1|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
QUESTION = "What is this?"


def filming(folder: Path, name: str) -> Any:
    """Saves a checkpoint with the bundled tokenizer; returns the model."""
    model = make_qwen(folder, name, vocab_size=VOCAB_SIZE, placeholder=PICTURE)
    ids = {"video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ids))
    for key, value in ids.items():
        setattr(model.config, key, value)
    shutil.copy(bundled.FOLDER / "tokenizer.json", folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


class FolderTokenizer:
    """Tokenizer of expansions over a folder's."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def expected(model: Any, folder: Path, films: list[bytes], options: dict[str, Any]) -> list[int]:
    """Returns the answer of transformers about the frames that the processor takes from videos."""
    processor, tokenizer = read_video_processor(folder), FolderTokenizer(folder)
    assert processor is not None
    prompt = VideoPrompt([], [])
    for film in films:
        tiles = decode(film, options, NO_METADATA, MediaBounds(), processor)
        expansion = processor.expand(tiles.layout, tokenizer)
        pixels = np.frombuffer(tiles.pixels, np.uint8).reshape(*tiles.layout[:3], 3)
        item = media_pb2.MediaItem(offset=len(prompt.tokens), length=len(expansion.token_ids))
        fetched = FetchedItem(b"", expansion.num_embeddings, tiles.layout.numbers, pixels)
        prompt.seen.append(SeenItem(item, fetched, tiles.layout, options.get("fps", 2.0)))
        prompt.tokens.extend(expansion.token_ids)
    prompt.tokens.extend(tokenizer.encode(QUESTION))
    return greedy(model, folder, prompt, NUM_TOKENS, given="2_5" in model.config.model_type, video=VIDEO)


def part(film: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(film).decode()}"}}


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_chats_with_videos(name: str, tmp_path: Path) -> None:
    """The last chat finds its prefix cached."""
    model = filming(tmp_path, name)
    films = [video(24, size=(16, 24)), video(16, codec="libx264", size=(24, 16))]
    with running_cluster(model=str(tmp_path), worker={"dtype": "float32"}) as cluster:
        for asked, options in ((films[:1], {}), (films, {}), (films, {"fps": 4.0}), (films, {})):
            content = [*map(part, asked), {"type": "text", "text": QUESTION}]
            body = {
                **{"model": tmp_path.name, "messages": [{"role": "user", "content": content}]},
                **{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True},
                "mm_processor_kwargs": options,
            }
            answer = httpx.post(f"http://{cluster.http_address}/v1/chat/completions", json=body, timeout=100)
            assert answer.status_code == httpx.codes.OK, answer.text
            assert answer.json()["choices"][0]["token_ids"] == expected(model, tmp_path, asked, options)
        (tmp_path / "video.mp4").write_bytes(films[0])
        shown = output_of("/v1/chat/completions", f"http://{cluster.http_address}", tmp_path, PICTURES)
        assert json.loads(shown)["usage"]["completion_tokens"] > 0


def test_prompts_of_python_programs(tmp_path: Path) -> None:
    """A path, bytes, an array, frames with metadata, and a chat with a part."""
    model = filming(tmp_path, "qwen2.5")
    file = video(24, size=(16, 24))
    (tmp_path / "film.mp4").write_bytes(file)
    wanted = expected(model, tmp_path, [file], {})
    frames = np.random.default_rng(3).integers(0, 256, (4, 16, 24, 3), dtype=np.uint8)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(tmp_path), dtype="float32") as llm:
        given: list[Any] = [tmp_path / "film.mp4", file, [file], frames, (frames, {"fps": 2.0})]
        prompts = [{"prompt": MARK + QUESTION, "multi_modal_data": {"video": one}} for one in given]
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
        assert found[:3] == [wanted] * 3
        assert found[3] == found[4]
        chat = [{"role": "user", "content": [part(file), {"type": "text", "text": QUESTION}]}]
        (answer,) = llm.chat([chat], params)
        assert list(answer.outputs[0].token_ids) == wanted
