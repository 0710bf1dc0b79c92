"""Scripted model that replies with given texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from tests.services.frontend.scripted_scheduler import Model, Running

Said = str | Callable[[str], str]
"""Constant text, or a function from the prompt's text to the reply."""


def replying(folder: Path, reply: Said) -> Model:
    """Returns a model that replies with the text, then ends the sequence."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def answer(sequence: Running) -> int:
        text = reply if isinstance(reply, str) else reply(tokenizer.decode(sequence.prompt, skip_special_tokens=False))
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids[sequence.num_outputs] if sequence.num_outputs < len(ids) else min(sequence.eos)

    return answer


def prompt_text(folder: Path, sequence_prompt: list[int]) -> str:
    text: str = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(sequence_prompt, skip_special_tokens=False)
    return text
