"""Chats about videos with Qwen-VL models give the tokens of transformers, through all services."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers

from quire import bundled
from quire.services.frontend.media.policy import MediaBounds
from quire.services.frontend.media.videos import decode
from quire.services.frontend.request.media import NO_METADATA
from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.media.registry import read_video_processor
from quire.shared.pb.common.v1 import media_pb2
from tests.e2e.conftest import running_cluster
from tests.services.frontend.media.video_files import video
from tests.services.worker.media.qwen_pictures import make_qwen
from tests.services.worker.media.qwen_videos import SeenItem, VideoPrompt, greedy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TOKENS, VOCAB_SIZE = 12, 4096
FPS, SECONDS = 8, 3
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'video' %}<|video|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
QUESTION = "What is this?"


def filming(folder: Path) -> tuple[Any, int]:
    """Saves a Qwen2.5-VL with the bundled tokenizer; returns the model and its token for videos."""
    shutil.copy(bundled.FOLDER / "tokenizer.json", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    specials = [token["id"] for token in tokenizer["added_tokens"]]
    placeholder, picture = specials[-1], specials[-2]
    for token in tokenizer["added_tokens"]:
        if token["id"] == placeholder:
            old, token["content"], token["special"] = token["content"], "<|video|>", True
    tokenizer["model"]["vocab"] = {
        ("<|video|>" if word == old else word): number for word, number in tokenizer["model"]["vocab"].items()
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = make_qwen(folder, "qwen2.5", vocab_size=VOCAB_SIZE, placeholder=picture)
    config = json.loads((folder / "config.json").read_text()) | {"video_token_id": placeholder}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text("{}")
    model.config.video_token_id = placeholder
    return model, placeholder
