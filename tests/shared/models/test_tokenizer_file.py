"""A missing tokenizer.json, or one that could exhaust memory, is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import bundled
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument
from quire.shared.models.tokenizer_file import tokenizer_file


def replace(content: str, pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def nested(rule: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        rule = {"type": "Sequence", "normalizers": [rule]}
    return rule


def write(folder: Path, **changes: Any) -> Path:
    content = json.loads((bundled.FOLDER / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    return folder


@pytest.mark.parametrize(
    "rule",
    [
        {"type": "Sequence", "normalizers": [replace("a" * 100)] * 5},
        replace("a" * 10_000_000),
        nested(replace("a" * 5_000), 50),
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 40}, replace("a" * 40)]},
        {"type": "Sequence", "normalizers": [replace("b" * 40), replace("a" * 40, "b")]},
    ],
)
@pytest.mark.parametrize("section", ["normalizer", "decoder"])
def test_rules_that_make_very_long_texts_are_refused(tmp_path: Path, rule: dict[str, Any], section: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{section} makes up to .* characters of one; at most 1024") as refused:
        Tokenizer(write(tmp_path, **{section: rule}), threads=1)
    assert "\n" not in refused.value.message


def test_those_of_published_models_are_not(tmp_path: Path) -> None:
    """Published SentencePiece tokenizers pass: they replace a space by a mark, and add one before every text."""
    rules = [{"type": "Prepend", "prepend": "\u2581"}, replace("\u2581", " "), {"type": "NFKC"}]
    assert tokenizer_file(write(tmp_path, normalizer={"type": "Sequence", "normalizers": rules}))
    assert tokenizer_file(bundled.FOLDER)


@pytest.mark.parametrize("content", ["[" * 100_000, "{", "\xff"])
def test_what_is_no_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json is not a tokenizer: ") as refused:
        tokenizer_file(tmp_path)
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    ("other", "remedy"),
    [
        ("tokenizer.model", "but tokenizer.model: .*save_pretrained.* with the package sentencepiece installed"),
        ("tekken.json", "but tekken.json: it is mistral-common's"),
        ("vocab.txt", r"has no tokenizer\.json$"),
    ],
)
def test_a_vocabulary_of_another_library_says_what_to_do(tmp_path: Path, other: str, remedy: str) -> None:
    (tmp_path / other).write_bytes(b"")
    with pytest.raises(InvalidArgument, match=remedy):
        tokenizer_file(tmp_path)
