"""What the model wrote, as items: reasoning, messages, function calls. Each grows piece by piece, and tells events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from quire.services.frontend.output_processor.answer_parser import CallPiece, Part
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning

Json = dict[str, Any]
Event = tuple[str, Json]
"""Its type, and the fields that depend on it."""


class OutputItem(ABC):
    """One on its way; a class for each kind of part."""

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text = ""

    @abstractmethod
    def takes(self, part: Part) -> bool:
        """Whether this is more of it."""

    @abstractmethod
    def opening(self) -> list[Event]:
        """After output_item.added."""

    @abstractmethod
    def add(self, part: Part, logprobs: list[Json]) -> list[Event]:
        """`logprobs`: of tokens that came with the part."""

    @abstractmethod
    def closing(self) -> list[Event]:
        """Before output_item.done."""

    @abstractmethod
    def as_json(self, status: str) -> Json:
        """As it is now."""


class _TextItem(OutputItem):
    """With one part of content."""

    delta, done = "", ""

    @abstractmethod
    def part(self) -> Json:
        """The content."""

    def more(self, logprobs: list[Json]) -> Json:
        return {}

    def opening(self) -> list[Event]:
        return [("response.content_part.added", {"content_index": 0, "part": self.part()})]

    def add(self, part: Part, logprobs: list[Json]) -> list[Event]:
        assert not isinstance(part, CallPiece)
        self.text += part.text
        return [(self.delta, {"content_index": 0, "delta": part.text, **self.more(logprobs)})]

    def closing(self) -> list[Event]:
        return [
            (self.done, {"content_index": 0, "text": self.text, **self.more([])}),
            ("response.content_part.done", {"content_index": 0, "part": self.part()}),
        ]


class ReasoningItem(_TextItem):
    """In the clear, without a summary."""

    delta, done = "response.reasoning_text.delta", "response.reasoning_text.done"

    def takes(self, part: Part) -> bool:
        return isinstance(part, Reasoning)

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def as_json(self, status: str) -> Json:
        content = [self.part()] if self.text else []
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


class MessageItem(_TextItem):
    """Text for the user."""

    delta, done = "response.output_text.delta", "response.output_text.done"

    def __init__(self, item_id: str) -> None:
        super().__init__(item_id)
        self._logprobs: list[Json] = []

    def takes(self, part: Part) -> bool:
        return isinstance(part, Content)

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def more(self, logprobs: list[Json]) -> Json:
        self._logprobs = self._logprobs + logprobs
        return {"logprobs": logprobs}

    def as_json(self, status: str) -> Json:
        content = [self.part()] if self.text else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class CallItem(OutputItem):
    """A function call."""

    def __init__(self, item_id: str, piece: CallPiece, namespace: str, name: str) -> None:
        """`namespace`: of the function that is called, empty for one without; `name`: its name there."""
        super().__init__(item_id)
        self._piece = piece
        self._namespace = namespace
        self._name = name

    def takes(self, part: Part) -> bool:
        return isinstance(part, CallPiece) and part.number == self._piece.number

    def opening(self) -> list[Event]:
        return []

    def add(self, part: Part, logprobs: list[Json]) -> list[Event]:
        assert isinstance(part, CallPiece)
        self.text += part.arguments
        return [("response.function_call_arguments.delta", {"delta": part.arguments})] if part.arguments else []

    def closing(self) -> list[Event]:
        return [("response.function_call_arguments.done", {"arguments": self.text, "name": self._name})]

    def as_json(self, status: str) -> Json:
        fields = {"call_id": self._piece.id, "name": self._name, "arguments": self.text}
        if self._namespace:
            fields["namespace"] = self._namespace
        return {"id": self.id, "type": "function_call", **fields, "status": status}


def new_item(part: Part, new_id: Callable[[str], str], namespaces: Mapping[str, tuple[str, str]]) -> OutputItem:
    """`new_id`: by what stands in front. `namespaces`: as tools.namespaces returns them."""
    if isinstance(part, CallPiece):
        return CallItem(new_id("fc"), part, *namespaces.get(part.name, ("", part.name)))
    return ReasoningItem(new_id("rs")) if isinstance(part, Reasoning) else MessageItem(new_id("msg"))
