"""Checks a folder's tokenizer.json before a library opens it. The library allocates whatever the file's rules ask
for and aborts the process when memory runs out, so the possible growth of a text is bounded here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument

NAME = "tokenizer.json"
MAX_BYTES = 256 << 20  # 262,144 tokens with their merges take 33 MB
MAX_GROWTH = 1024  # characters that one character may become over all replacements
RULES = ("normalizer", "pre_tokenizer", "decoder")  # sections that may replace texts
REPLACES = {"Replace": "content", "Prepend": "prepend"}

# Tokenizer files of other libraries, and how to convert them to a tokenizer.json.
OTHERS = {
    "tokenizer.model": "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes one, with "
    "the package sentencepiece installed",
    "tekken.json": "it is mistral-common's: the model's folder in the format of transformers has one",
}


def tokenizer_file(folder: Path) -> Path:
    """Returns the path of a tokenizer.json that may be opened. Raises InvalidArgument that names what is wrong or
    missing."""
    path = folder / NAME
    if not path.is_file():
        raise InvalidArgument(f"model {str(folder)!r} has no {NAME}{_instead(folder)}", field="model")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise InvalidArgument(f"model: {path} has {size} bytes; at most {MAX_BYTES} are read", field="model")
    sections = _sections(path)
    for rules in RULES:
        growth = _growth(sections.get(rules))
        if growth > MAX_GROWTH:
            text = f"{rules} makes up to {growth:.0e} characters of one; at most {MAX_GROWTH} are allowed"
            raise InvalidArgument(f"model: {path}: {text}", field="model")
    return path


def _instead(folder: Path) -> str:
    found = next((name for name in OTHERS if (folder / name).is_file()), None)
    return f", but {found}: {OTHERS[found]}" if found else ""


def _sections(path: Path) -> dict[str, Any]:
    """Returns the sections of tokenizer.json; empty if it is no JSON object. Raises InvalidArgument for a file that
    cannot be read or parsed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"model: cannot read {path}: {error.strerror}", field="model") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise InvalidArgument(f"model: {path} is not a tokenizer: {reason}", field="model") from None
    return content if isinstance(content, dict) else {}


def _growth(section: Any) -> float:
    """Returns the maximum number of characters that one may become; the rules of a sequence multiply."""
    return math.prod(max(1, length) for length in _lengths(section))


def _lengths(section: Any) -> Iterator[int]:
    """Yields the lengths of all replacements at any nesting depth."""
    waiting = [section]
    while waiting:
        rule = waiting.pop()
        if isinstance(rule, list):
            waiting += rule
        elif isinstance(rule, dict):
            content = rule.get(REPLACES.get(str(rule.get("type")), ""))
            if isinstance(content, str):
                yield len(content)
            waiting += rule.values()
