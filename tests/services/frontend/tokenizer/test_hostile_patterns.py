"""Tests that a text is refused on which a tokenizer's regular expression backtracks without end.

oniguruma#303 has such a pattern; according to tiktoken#15 and vector#15199, the error is a panic, which is not an
Exception.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HfTokenizer

from quire import bundled
from quire.services.frontend.tokenizer.encoder import Encoder
from quire.shared.errors import InvalidArgument
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

HOSTILE = "a" * 28 + "c"


def folder_with(pattern: str, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(bundled.FOLDER, tmp_path / "model"))
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    before = document["pre_tokenizer"]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, *([before] if before else [])]}
    path.write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a+)+b", r"(a+a+)+b"])
async def test_a_text_on_which_the_pattern_gives_up_is_refused(pattern: str, tmp_path: Path) -> None:
    folder = folder_with(pattern, tmp_path)
    encoder = Encoder(HfTokenizer.from_file(str(folder / "tokenizer.json")), threads=1)
    try:
        for text in (HOSTILE, "a" * 2_000 + "c"):
            with pytest.raises(InvalidArgument, match="prompt: the model's tokenizer fails on this text"):
                await encoder.encode(text, add_special_tokens=True)
        assert encoder.encode_inline("hello", add_special_tokens=True)
    finally:
        encoder.close()


async def test_hostile_texts_are_status_400_over_http_and_the_next_call_is_answered(tmp_path: Path) -> None:
    folder = folder_with(r"(a+)+$", tmp_path)
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        for path, body in (
            ("/v1/completions", {"prompt": HOSTILE}),
            ("/v1/completions", {"prompt": "a" * 2_000 + "c"}),
            ("/v1/completions", {"prompt": "a" * 40_000 + "c"}),
            ("/tokenize", {"prompt": HOSTILE}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": HOSTILE}]}),
        ):
            refused = await frontend.http.post(path, json={"max_tokens": 1, **body})
            assert refused.status_code == 400, (path, refused.text)
        answer = await frontend.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
        assert answer.status_code == 200
