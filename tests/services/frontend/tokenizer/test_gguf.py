"""Tests that a frontend needs only a GGUF file, with its tokenizer, its template and its end-of-sequence tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.models import model_hub
from tests import gguf_files


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = {
        "ggml.model": "gpt2",
        "ggml.pre": "llama-bpe",
        "ggml.tokens": ["<s>", "<end>", "<turn>", *"abc\u0120", "ab"],
        "ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1],
        "ggml.merges": ["a b"],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "ggml.eot_token_id": 2,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}<turn>",
    }
    return gguf_files.small(tmp_path / "words.gguf", "llama", **words)


def test_texts_templates_and_ends(file: Path) -> None:
    tokenizer = Tokenizer(model_hub.find(str(file), weights=False), threads=1)
    try:
        assert tokenizer.encode_inline("ab c", add_special_tokens=True) == [0, 7, 6, 5]
        assert tokenizer.decode([0, 7, 6, 5], skip_special_tokens=True) == "ab c"
        assert tokenizer.eos_ids == (1, 2)
        assert tokenizer.byte_level
        user = [{"role": "user", "content": "ab"}]
        rendered = tokenizer.template.render(
            user, add_generation_prompt=True, continue_final_message=False, variables={}
        )
        assert rendered == "<s>ab<turn>"
    finally:
        tokenizer.close()
