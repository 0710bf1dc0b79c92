"""Points at which a long text may be split, so that its pieces give the ids of the whole.

Byte-level vocabularies split a text by regular expressions before they look for tokens, and none of the expressions in
use (GPT-2, cl100k, o200k, Llama 3, Qwen, DeepSeek) continues from a letter to a blank, a digit or a punctuation mark
other than an apostrophe. A split between these two changes neither side, because no expression looks behind. Texts for
any other tokenizer are not split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

# Letters in every version of Unicode, and characters that are neither letter, mark nor apostrophe.
LETTER = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea"
    "\u0621-\u063a\u0641-\u064a\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
OTHER = ' \\t\\r\\n0-9!"#$%&()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f'
CUT = re.compile(f"(?<=[{LETTER}])(?=[{OTHER}])")

WORDS = frozenset({  # alternatives that match a run of letters to its end
    r" ?\p{L}+", r"\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
})  # fmt: skip
OTHERS = frozenset({  # alternatives that match no letter, or only after an apostrophe or a mark
    r"'s", r"'t", r"'re", r"'ve", r"'m", r"'ll", r"'d", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"(?i:[sdmt]|ll|ve|re)",
    r"'(?i:[sdmt]|ll|ve|re)",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[一-龥぀-ゟ゠-ヿ]+", r"[\r\n]",
    r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[\p{P}\p{S}]+[\r\n]*", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+",
})  # fmt: skip


class TextSplitter:
    """Splitter for one tokenizer; `is_supported` says whether its texts can be split."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        document = json.loads(tokenizer.to_str(pretty=False)) if tokenizer.pre_tokenizer is not None else {}
        added = document.get("added_tokens", [])
        self.is_supported = _splits_words(document) and not any(_reaches_out(token) for token in added)
        self._spanning = [token["content"] for token in added if CUT.search(token["content"])]

    def pieces(self, text: str, size: int | Callable[[], int], longest: int) -> Iterator[str]:
        """Yields pieces of `size` characters (at least 1) or a few more; a function is asked before each. Raises
        ValueError where `longest` characters cannot be split."""
        start = 0
        while start < len(text):
            end = start + (size if isinstance(size, int) else size())
            end = len(text) if end >= len(text) else self._cut_from(text, end, start + longest)
            yield text[start:end]
            start = end

    def _cut_from(self, text: str, position: int, bound: int) -> int:
        """Returns the first position from `position` to `bound` at which no token spans the cut, or the text's
        length. Raises ValueError if there is none in a longer text."""
        while (found := CUT.search(text, position, min(bound, len(text)) + 1)) is not None:
            if not any(_spans(text, token, found.start()) for token in self._spanning):
                return found.start()
            position = found.start() + 1
        if bound < len(text):
            raise ValueError
        return len(text)


def _spans(text: str, token: str, cut: int) -> bool:
    """Returns whether an added token may extend over both sides of the split."""
    return token in text[max(0, cut - len(token) + 1) : cut + len(token) - 1]


def _splits_words(document: Mapping[str, Any]) -> bool:
    """Returns whether all pre-tokenization steps are known, and the normalizer is none or NFC, which joins no letter
    with what follows a split."""
    normalizer, split = document.get("normalizer"), document.get("pre_tokenizer")
    if split is None or (normalizer is not None and normalizer["type"] != "NFC"):
        return False
    if document["model"].get("type") != "BPE" or document["model"].get("dropout"):
        return False
    steps = split["pretokenizers"] if split["type"] == "Sequence" else [split]
    kinds = [_kind_of(step) for step in steps]
    return None not in kinds and "words" in kinds


def _kind_of(step: Mapping[str, Any]) -> str | None:
    """Returns "words" if the step splits after every run of letters, "other" if it spans no split point, None if
    unknown."""
    match step["type"]:
        case "Digits":
            return "other"
        case "ByteLevel" if not step["add_prefix_space"]:
            return "words" if step["use_regex"] else "other"
        case "Split" if step["behavior"] == "Isolated" and not step["invert"]:
            alternatives = set(_alternatives(step["pattern"].get("Regex", "")))
            if alternatives <= WORDS | OTHERS:
                return "words" if alternatives & WORDS else "other"
    return None


def _alternatives(pattern: str) -> Iterator[str]:
    """Splits a regular expression at each | outside of groups and character classes."""
    depth, start, in_class, position = 0, 0, False, 0
    while position < len(pattern):
        match pattern[position]:
            case "\\":
                position += 1
            case "[":
                in_class = True
            case "]":
                in_class = False
            case "(" if not in_class:
                depth += 1
            case ")" if not in_class:
                depth -= 1
            case "|" if not in_class and not depth:
                yield pattern[start:position]
                start = position + 1
        position += 1
    yield pattern[start:]


def _reaches_out(token: Mapping[str, Any]) -> bool:
    """Returns whether matching an added token depends on text beyond a split point."""
    return bool(token["single_word"] or (token["rstrip"] and token["content"][-1:].isalpha()))
