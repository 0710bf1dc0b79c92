"""A scripted model that says given texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from tests.services.frontend.scripted_scheduler import Model, Running

Said = str | Callable[[str], str]
"""Always the same text, or one for the prompt's text."""


def replying(folder: Path, said: Said) -> Model:
    """Says it, then ends the sequence."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def answer(sequence: Running) -> int:
        text = said if isinstance(said, str) else said(tokenizer.decode(sequence.prompt, skip_special_tokens=False))
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids[sequence.num_outputs] if sequence.num_outputs < len(ids) else min(sequence.eos)

    return answer


def prompt_text(folder: Path, sequence_prompt: list[int]) -> str:
    text: str = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(sequence_prompt, skip_special_tokens=False)
    return text
