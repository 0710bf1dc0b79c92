"""Properties of a model that pools texts: prompts from its sentence-transformers folder, types of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.services.frontend.input_processor.pooling.late_interaction_inputs import (
    DOCUMENT,
    QUERY,
    LateInteractionInputs,
)
from quire.services.frontend.input_processor.pooling.page_inputs import PageInputs
from quire.services.frontend.input_processor.pooling.two_tower_inputs import TwoTowerInputs
from quire.services.frontend.request.request import Prompt
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument
from quire.shared.models import encoder_families
from quire.shared.models.late_interaction import LateInteraction
from quire.shared.models.sentence_transformers import SentenceModel, has_identity_score_activation, read_sentence_model


@dataclass(frozen=True, slots=True)
class PoolingTextFormat:
    """Text format of one model; token prompts are not changed."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str = ""  # name of a prompt
    lower_case: bool = False
    pools_last_token: bool = True  # the model's vector is the last token's, so that the prefix cache may be read

    @classmethod
    def of(cls, model: SentenceModel | None) -> PoolingTextFormat:
        """Derives the format from the sentence-transformers folder; None gives the defaults. Late-interaction models
        get empty prompts for queries and documents, which the folder's own prompts override."""
        if model is None:
            return cls()
        roles = {} if model.late is None else {QUERY: "", DOCUMENT: ""}
        return cls({**roles, **model.prompts}, model.default_prompt, model.lower_case, model.modes == ("last",))

    def check(self, prompt_name: str) -> None:
        """Raises InvalidArgument, with the names that exist, for a prompt name that the model does not have; "" is
        accepted."""
        if prompt_name and prompt_name not in self.prompts:
            there_are = f"available: {', '.join(sorted(self.prompts))}" if self.prompts else "it has none"
            text = f"prompt_name: the model has no prompt {prompt_name[:64]!r}; {there_are}."
            raise InvalidArgument(text, field="prompt_name")

    def first_known_prompt(self, names: Sequence[str]) -> str:
        """Returns the first of the names that the model has a prompt for; empty if there is none."""
        return next((name for name in names if name in self.prompts), "")

    def text(self, text: str, prompt_name: str) -> str:
        """Returns the text as the model was trained to read it."""
        whole = self.prompts.get(prompt_name or self.default, "") + text
        return whole.lower() if self.lower_case else whole


@dataclass(frozen=True, slots=True)
class PoolingTraits:
    """Properties of a model that concern pooled texts."""

    texts: PoolingTextFormat = field(default_factory=PoolingTextFormat)
    encoder: str = ""  # the model's name, if it is only an encoder
    token_types: bool = False  # the model distinguishes the two texts of a prompt
    raw_scores: bool = False  # the classifier's scores of pairs are returned without a sigmoid
    late: LateInteractionInputs | PageInputs | None = None  # set if the model compares texts token by token
    towers: TwoTowerInputs | None = None  # set if the model has a tower for texts and one for pictures

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any], name: str, tokenizer: Tokenizer) -> PoolingTraits:
        """Reads the properties of the model `name` in `folder`, whose config.json is `config`."""
        model = read_sentence_model(folder)
        late = _late_inputs(model.late, tokenizer) if model and model.late else None
        towers = TwoTowerInputs.of(folder, config, tokenizer) if encoder_families.has_two_towers(config) else None
        return cls(
            PoolingTextFormat.of(model),
            name if encoder_families.family_of(config) else "",
            encoder_families.has_segment_types(config),
            has_identity_score_activation(config),
            late,
            towers,
        )

    def prompt(self, prompt: Prompt, prompt_name: str) -> Prompt:
        """Returns the prompt that is read in place of a client's, under the name of a prompt of the model. Raises
        InvalidArgument for media that the model does not read so."""
        if self.towers is not None:
            return self.towers.prompt(prompt)
        if self.late is not None:
            return self.late.prompt(prompt, is_document=prompt_name == DOCUMENT)
        return prompt


def _late_inputs(late: LateInteraction, tokenizer: Tokenizer) -> LateInteractionInputs | PageInputs:
    if late.pages is not None:
        return PageInputs(late.pages, tokenizer, late.query_length)
    return LateInteractionInputs(late, tokenizer)


DEFAULT_POOLING_TRAITS = PoolingTraits()
