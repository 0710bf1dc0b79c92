"""Tokenizers of type `tokenizer.ggml.model: gpt2`: byte-level BPE. The pre-tokenizer is selected by name
(`tokenizer.ggml.pre`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.shared.gguf.tokenizer import GgufVocabulary

PRE = "tokenizer.ggml.pre"
MERGES = "tokenizer.ggml.merges"

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """How a text is split into words before BPE."""

    regexes: tuple[str, ...] = ()  # applied one after the other; empty: GPT-2's own
    digits: bool = False  # every digit is a word
    whole_words: bool = False  # a word that is itself a token is used without merging
    adds_bos: bool = False
    composed: bool = False  # texts are normalized to NFC


GPT2 = PreTokenizerRule()
LLAMA3 = PreTokenizerRule((rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{REST}",), whole_words=True, adds_bos=True)
QWEN2 = PreTokenizerRule((rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{REST}",), composed=True)
DIGITS = PreTokenizerRule(digits=True)
MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
MARKED_REST = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = PreTokenizerRule((rf"{CONTRACTIONS}|{MARKED_WORD}|\p{{N}}|{MARKED_REST}",))
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FALCON = PreTokenizerRule((r"[\p{P}$+<=>^~|`]+", GPT2_WORDS, "[0-9]{3}"))
LINES, IDEOGRAPHS = r"[\r\n]", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
UNCASED = r"(?![\x{10D0}-\x{10FF}\x{1D400}-\x{1D7CB}])"  # Georgian, mathematical letters; as in llama.cpp's list
CASED = rf"(?:{UNCASED}[\p{{Lu}}\p{{Ll}}\p{{Lt}}])"  # letters of scripts with two cases
MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
DEEPSEEK_CODER = PreTokenizerRule((LINES, r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS), digits=True, adds_bos=True)
DEEPSEEK_LLM = PreTokenizerRule(
    (LINES, rf"\s?{CASED}+", rf"\s?{MARKS}+", r"\s+$", IDEOGRAPHS), digits=True, adds_bos=True
)
PRE_TOKENIZER_RULES = {
    "gpt-2": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": PreTokenizerRule(digits=True, composed=True, adds_bos=True),
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-llm": DEEPSEEK_LLM,
    "falcon": FALCON,
    "mpt": PreTokenizerRule(composed=True),
    "qwen35": QWEN35,
}


def parts(words: GgufVocabulary) -> tuple[dict[str, Any], bool]:
    """Returns the sections of a tokenizer.json for byte-level BPE, and whether a BOS token is added unless the file
    says otherwise. Raises InvalidArgument for an unknown pre-tokenizer."""
    name = words.values.text(PRE)
    cut = PRE_TOKENIZER_RULES.get(name)
    if cut is None:
        raise words.header.refusal(f"{PRE} is {name[:80]!r}; supported: {', '.join(PRE_TOKENIZER_RULES)}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    sections = {
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
            "merges": read_merges(words),
        },
    }
    return sections, cut.adds_bos


def _cutters(cut: PreTokenizerRule) -> list[dict[str, Any]]:
    """Returns the pre-tokenizers that split a text by the rule's regular expressions, then into digits if the rule
    says so."""
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in cut.regexes
    ]
    return [*splits, {"type": "Digits", "individual_digits": True}] if cut.digits else splits


def _regex(cut: PreTokenizerRule) -> dict[str, bool]:
    return {"use_regex": not cut.regexes}


def read_merges(words: GgufVocabulary) -> list[list[str]]:
    """Returns the file's merges in order. Raises InvalidArgument for a merge whose parts or result are not in the
    vocabulary."""
    pairs, known = [], set(words.tokens)
    for merge in words.values.texts(MERGES):
        first, _, second = merge.partition(" ")
        if not {first, second, first + second} <= known:
            raise words.header.refusal(f"{MERGES}: {merge[:80]!r} needs or produces an unknown token")
        pairs.append([first, second])
    return pairs
