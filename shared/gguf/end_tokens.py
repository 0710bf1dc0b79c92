"""End-of-generation tokens: those that a GGUF file names, and those recognized by their text.

Many files name only the end of a text, while chat templates close a turn with another token; llama.cpp therefore
recognizes tokens by the texts of published vocabularies, and the files' authors rely on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.shared.gguf.kinds import TokenKind

if TYPE_CHECKING:
    from quire.shared.gguf.tokenizer import GgufVocabulary

NAMED = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, of a turn, of a message
TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "[e~["),
        *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>"),
    )
)
CONTROL_TEXTS = frozenset(("</s>", "<eos>"))  # ends as control tokens only: some vocabularies have them as plain text
MESSAGE_END = "<|end|>"  # ends one of several messages if the vocabulary has one of ANSWER_ENDS
ANSWER_ENDS = (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"), ("<|call|>", "<|flush|>"))


def end_token_ids(words: GgufVocabulary) -> list[int]:
    """Returns the end-of-generation tokens: those that the file names first, then those recognized by their text,
    ascending; without duplicates. The end of a message counts only if the vocabulary has no other end of an answer."""
    named = [token[0] for token in map(words.token, NAMED) if token]
    known = [number for number, text in enumerate(words.tokens) if _ends(text, words.kinds[number])]
    texts = {words.tokens[number] for number in known}
    if any(texts.issuperset(pair) for pair in ANSWER_ENDS):
        known = [number for number in known if words.tokens[number] != MESSAGE_END]
    return list(dict.fromkeys([*named, *known]))


def _ends(text: str, kind: int) -> bool:
    return text in TEXTS or (text in CONTROL_TEXTS and kind == TokenKind.CONTROL)
