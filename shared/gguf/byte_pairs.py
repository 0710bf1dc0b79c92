"""`tokenizer.ggml.model: gpt2`: byte-level pairs. How texts are cut into words first has a name (`.pre`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.gguf.tokenizer import GgufVocabulary

PRE = "tokenizer.ggml.pre"
MERGES = "tokenizer.ggml.merges"

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a text becomes words."""

    regex: str = ""  # empty: GPT-2's own
    digits: bool = False  # each is a word
    whole_words: bool = False  # a word that is a token is not merged to it
    adds_bos: bool = False
    composed: bool = False  # letters and their accents are one character (NFC)


GPT2 = Cut()
LLAMA3 = Cut(rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{REST}", whole_words=True, adds_bos=True)
QWEN2 = Cut(rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{REST}", composed=True)
DIGITS = Cut(digits=True)
CUTS = {
    "gpt-2": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
}


def parts(words: GgufVocabulary) -> tuple[dict[str, Any], bool]:
    """Of a tokenizer.json; and whether a text begins with the token for it unless the file says otherwise."""
    name = words.values.text(PRE)
    cut = CUTS.get(name)
    if cut is None:
        raise words.header.refusal(f"{PRE} is {name[:80]!r}; there are {', '.join(CUTS)}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    made = {
        "normalizer": {"type": "NFC"} if cut.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_cutters(cut), byte_level | _regex(cut)]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut.whole_words,
            "vocab": {text: number for number, text in enumerate(words.tokens)},
            "merges": _merges(words),
        },
    }
    return made, cut.adds_bos


def _cutters(cut: Cut) -> list[dict[str, Any]]:
    if cut.regex:
        return [{"type": "Split", "pattern": {"Regex": cut.regex}, "behavior": "Isolated", "invert": False}]
    return [{"type": "Digits", "individual_digits": True}] if cut.digits else []


def _regex(cut: Cut) -> dict[str, bool]:
    return {"use_regex": not cut.regex}


def _merges(words: GgufVocabulary) -> list[list[str]]:
    pairs, known = [], set(words.tokens)
    for merge in words.values.texts(MERGES):
        first, _, second = merge.partition(" ")
        if not {first, second, first + second} <= known:
            raise words.header.refusal(f"{MERGES}: {merge[:80]!r} makes or needs what is no token")
        pairs.append([first, second])
    return pairs
