"""What the chat template makes of a conversation, in sections for the tokenizers that read them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.request.request import ChatPrompt
from services.frontend.tokenizer.chat_template import ChatTemplate
from services.frontend.tokenizer.control_tokens import ControlTokens, TextSection


@dataclass(frozen=True, slots=True)
class Introduction:
    """All that it takes, for another process of this machine that speaks to nobody else."""

    template: str | None
    with_tools: str | None
    variables: Mapping[str, str]
    added: Sequence[Mapping[str, Any]]  # tokens, as tokenizer.json has them
    marks: Iterable[str]  # of reasoning
    normalizer: Any  # of the tokenizers package
    guarded: bool  # what users write spells no control tokens

    def encode(self) -> bytes:
        return pickle.dumps(self)

    @classmethod
    def decode(cls, data: bytes) -> Introduction:
        found = pickle.loads(data)
        assert isinstance(found, cls)
        return found


class Rendering:
    """Of one model."""

    def __init__(self, introduction: Introduction) -> None:
        self.introduction = introduction
        self.template = ChatTemplate(introduction.template, introduction.variables, introduction.with_tools)
        normalize: Callable[[str], str] | None = None
        if introduction.normalizer is not None:
            normalize = introduction.normalizer.normalize_str
        self.control = ControlTokens(introduction.added, self.template.source, introduction.marks, normalize)

    def sections(self, prompt: ChatPrompt) -> list[TextSection]:
        """Raises InvalidArgument."""
        if not self.introduction.guarded:
            return [TextSection(self.template.text_of(prompt), plain=False)]
        shown, hidden = self.control.hide(prompt)
        return self.control.sections(self.template.text_of(shown), hidden)
