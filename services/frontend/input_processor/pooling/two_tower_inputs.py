"""Inputs for models with a tower for texts and one for pictures (CLIP, SigLIP): one text or one picture each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.services.frontend.input_processor.pooling.media_prompts import only_picture, text_of
from quire.services.frontend.request.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt, media_of
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.media.modalities import IMAGE
from quire.shared.media.special_tokens import read_settings

PADDED = "SiglipModel"  # trained on texts padded to its positions, lower-cased


@dataclass(frozen=True, slots=True)
class TwoTowerInputs:
    """Input format of one model."""

    placeholder: int = -1  # token that stands for a picture; -1: pictures are refused
    padding: int = -1  # token that fills texts up to `length`; -1: they are not padded
    length: int = 0
    lower_case: bool = False

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> TwoTowerInputs:
        """Reads the format of the model in `folder`, whose text part is `config`."""
        placeholder = tokenizer.token_id(tokenizer.placeholders[IMAGE]) if IMAGE in tokenizer.placeholders else None
        read = cls(-1 if placeholder is None else placeholder)
        if PADDED not in (config.get("architectures") or ()):
            return read
        named = read_settings(folder).get("pad_token") or "</s>"
        padding = tokenizer.token_id(str(named["content"] if isinstance(named, dict) else named))
        return replace(
            read,
            padding=int(config.get("pad_token_id") or 0) if padding is None else padding,
            length=int(config["max_position_embeddings"]),
            lower_case=True,
        )

    def prompt(self, prompt: Prompt) -> Prompt:
        """Returns the prompt that is read in place of a client's. Raises InvalidArgument for a picture beside text or
        other pictures."""
        if media_of(prompt):
            return TokenPrompt([self.placeholder], [only_picture(prompt)])
        if not isinstance(prompt, (TextPrompt, ChatPrompt)):
            return prompt
        text, is_framed = text_of(prompt), isinstance(prompt, ChatPrompt) or prompt.add_special_tokens
        return TextPrompt(text.lower() if self.lower_case else text, is_framed)

    def padded(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns a text's tokens filled up to the length that the model was trained with."""
        return [*token_ids, *[self.padding] * (self.length - len(token_ids))]
