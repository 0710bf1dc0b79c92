"""Converts the tokenizer in a GGUF file to the tokenizer.json of Hugging Face's tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.shared.gguf import byte_pairs, sentence_pieces
from quire.shared.gguf.end_tokens import end_token_ids
from quire.shared.gguf.header import Header, Values
from quire.shared.gguf.kinds import TokenKind

PREFIX = "tokenizer.ggml."
TEMPLATE, NAMED_TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
SPECIALS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
DEFAULT_TEMPLATE = "default"
NO_TOKEN = 2**32 - 1  # marks a token that the vocabulary lacks: -1 as unsigned


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokens of a file with their types and the file's metadata."""

    tokens: list[str]
    kinds: list[int]
    values: Values
    header: Header

    def token(self, key: str) -> tuple[int, str] | None:
        """Returns id and text of the special token that the metadata key names (without its prefix); None if it
        names none. Raises InvalidArgument for an id outside the vocabulary."""
        if PREFIX + key not in self.values:
            return None
        number = self.values.integer(PREFIX + key)
        if number == NO_TOKEN:
            return None
        if not 0 <= number < len(self.tokens):
            raise self.header.refusal(f"{PREFIX}{key} is {number}, it has {len(self.tokens)} tokens")
        return number, self.tokens[number]


def vocabulary(header: Header, vocab_size: int) -> GgufVocabulary:
    """Reads the vocabulary; tokens without a type are normal ones. `vocab_size`: rows of the embedding. Raises
    InvalidArgument for duplicates and for more tokens than rows."""
    values = Values(header)
    tokens = values.texts(f"{PREFIX}tokens")
    kinds = [int(kind) for kind in values.numbers(f"{PREFIX}token_type", [TokenKind.NORMAL] * len(tokens))]
    if not len(tokens) == len(kinds) <= vocab_size:
        counts = f"{len(tokens)} tokens, {len(kinds)} types"
        raise header.refusal(f"{PREFIX}tokens: {counts}, and the embedding has {vocab_size} rows")
    if len(set(tokens)) < len(tokens):
        raise header.refusal(f"{PREFIX}tokens contains a token twice")
    return GgufVocabulary(tokens, kinds, values, header)


def tokenizer_json(words: GgufVocabulary) -> dict[str, Any]:
    """Returns tokenizer.json as a dict: the parts for the file's tokenizer model (gpt2, llama or gemma4), its added
    tokens and its BOS and EOS. Raises InvalidArgument for another model."""
    model = words.values.text(f"{PREFIX}model")
    if model == "gpt2":
        parts, adds_bos = byte_pairs.parts(words)
    elif model == "llama":
        parts, adds_bos = sentence_pieces.parts(words), True
    elif model == "gemma4":
        parts, adds_bos = sentence_pieces.parts_with_merges(words), True
    else:
        raise words.header.refusal(f"{PREFIX}model is {model[:80]!r}; supported: gpt2, llama and gemma4")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(words),
        **parts,
        "post_processor": _frame(words, adds_bos) or parts["post_processor"],
    }


def _added(words: GgufVocabulary) -> list[dict[str, Any]]:
    """Returns the added tokens of tokenizer.json, which are matched in a text before it is split into words:
    control, unknown, user-defined and end-of-generation tokens."""
    special, ends = {TokenKind.CONTROL, TokenKind.UNKNOWN}, frozenset(end_token_ids(words))
    return [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special or number in ends,
        }
        for number, (text, kind) in enumerate(zip(words.tokens, words.kinds, strict=True))
        if text and (kind in special or kind == TokenKind.USER_DEFINED or number in ends)
    ]


def _frame(words: GgufVocabulary, adds_bos: bool) -> dict[str, Any] | None:
    """Returns the post-processor that adds BOS and EOS; None if neither is added."""
    wanted = {"bos": adds_bos, "eos": False}
    around = {end: words.token(f"{end}_token_id") for end, default in wanted.items() if _adds(words, end, default)}
    if not any(around.values()):
        return None

    def framed(*texts: str) -> list[dict[str, Any]]:
        """Returns a template with BOS before and EOS after each of the named sequences, as far as they are added;
        the sequence's number is its type id."""
        pieces: list[dict[str, Any]] = []
        for number, text in enumerate(texts):
            piece = [{"Sequence": {"id": text, "type_id": number}}]
            before, after = ([_special(around.get(end), number)] for end in ("bos", "eos"))
            pieces += [one for one in (*before, *piece, *after) if one]
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": framed("A"),
        "pair": framed("A", "B"),
        "special_tokens": {
            token[1]: {"id": token[1], "ids": [token[0]], "tokens": [token[1]]} for token in around.values() if token
        },
    }


def _adds(words: GgufVocabulary, end: str, default: bool) -> bool:
    return words.values.flag(f"{PREFIX}add_{end}_token", default)


def _special(token: tuple[int, str] | None, number: int) -> dict[str, Any] | None:
    return {"SpecialToken": {"id": token[1], "type_id": number}} if token else None


def tokenizer_config(words: GgufVocabulary) -> dict[str, Any]:
    """Returns tokenizer_config.json: special tokens and one chat template, or several by name."""
    found = {name: words.token(f"{key}_token_id") for key, name in SPECIALS.items()}
    config: dict[str, Any] = {name: token[1] for name, token in found.items() if token}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = words.values.text(TEMPLATE) if TEMPLATE in words.values else None
    named = {name: words.values.text(f"{TEMPLATE}.{name}") for name in words.values.texts(NAMED_TEMPLATES, [])}
    if named:
        default = {DEFAULT_TEMPLATE: template} if template is not None else {}
        both = {**default, **named}
        config["chat_template"] = [{"name": name, "template": text} for name, text in both.items()]
    elif template is not None:
        config["chat_template"] = template
    return config


def generation_config(words: GgufVocabulary) -> dict[str, Any]:
    """Returns generation_config.json with all end-of-generation tokens; empty if there are none."""
    ends = end_token_ids(words)
    return {"eos_token_id": ends} if ends else {}
