"""Output items: reasoning, messages, function calls. Each grows piece by piece and emits events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from quire.services.frontend.openai_edge.responses.tools import ClientTool
from quire.services.frontend.output_processor.answer_parser import CallDelta, Part
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.output_processor.parsing.values.input_extractor import InputExtractor

Json = dict[str, Any]
Event = tuple[str, Json]
"""Type of an event, and its type-specific fields."""


class OutputItem(ABC):
    """Output item that is being written; one class per kind of part."""

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text = ""

    @abstractmethod
    def takes(self, part: Part) -> bool:
        """Returns whether the part continues this item."""

    @abstractmethod
    def opening(self) -> list[Event]:
        """Returns the events after output_item.added."""

    @abstractmethod
    def add(self, part: Part, logprobs: list[Json]) -> list[Event]:
        """Appends a part to the item and returns the events to send; `logprobs` belong to the part's tokens."""

    @abstractmethod
    def closing(self) -> list[Event]:
        """Returns the events before output_item.done."""

    @abstractmethod
    def as_json(self, status: str) -> Json:
        """Returns the item in its present state."""


class _TextItem(OutputItem):
    """Item with one content part."""

    delta, done = "", ""

    @abstractmethod
    def part(self) -> Json:
        """Returns the item's content part."""

    def more(self, logprobs: list[Json]) -> Json:
        return {}

    def opening(self) -> list[Event]:
        return [("response.content_part.added", {"content_index": 0, "part": self.part()})]

    def add(self, part: Part, logprobs: list[Json]) -> list[Event]:
        assert not isinstance(part, CallDelta)
        self.text += part.text
        return [(self.delta, {"content_index": 0, "delta": part.text, **self.more(logprobs)})]

    def closing(self) -> list[Event]:
        """Returns the events that repeat the complete text: of the text, and of the content part."""
        return [
            (self.done, {"content_index": 0, "text": self.text, **self.more([])}),
            ("response.content_part.done", {"content_index": 0, "part": self.part()}),
        ]


class ReasoningItem(_TextItem):
    """Reasoning as plain text, without a summary."""

    delta, done = "response.reasoning_text.delta", "response.reasoning_text.done"

    def takes(self, part: Part) -> bool:
        return isinstance(part, Reasoning)

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def as_json(self, status: str) -> Json:
        content = [self.part()] if self.text else []
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


class MessageItem(_TextItem):
    """Message with text for the user."""

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


class _CallItem(OutputItem):
    """Item of one tool call."""

    def __init__(self, item_id: str, piece: CallDelta, tool: ClientTool) -> None:
        super().__init__(item_id)
        self._piece = piece
        self._tool = tool

    def takes(self, part: Part) -> bool:
        return isinstance(part, CallDelta) and part.number == self._piece.number

    def opening(self) -> list[Event]:
        return []

    def _fields(self, kind: str, status: str, text: Json) -> Json:
        """Returns the item's JSON; `text` is its arguments or input under the name that the kind of call uses."""
        fields = {"call_id": self._piece.id, "name": self._tool.name, **text}
        if self._tool.namespace:
            fields["namespace"] = self._tool.namespace
        return {"id": self.id, "type": kind, **fields, "status": status}


class CallItem(_CallItem):
    """Item of a function call."""

    def add(self, part: Part, logprobs: list[Json]) -> list[Event]:
        assert isinstance(part, CallDelta)
        self.text += part.arguments
        return [("response.function_call_arguments.delta", {"delta": part.arguments})] if part.arguments else []

    def closing(self) -> list[Event]:
        return [("response.function_call_arguments.done", {"arguments": self.text, "name": self._tool.name})]

    def as_json(self, status: str) -> Json:
        return self._fields("function_call", status, {"arguments": self.text})


class CustomCallItem(_CallItem):
    """Item of a call whose tool takes a text."""

    def __init__(self, item_id: str, piece: CallDelta, tool: ClientTool) -> None:
        super().__init__(item_id, piece, tool)
        self._input = InputExtractor()

    def add(self, part: Part, logprobs: list[Json]) -> list[Event]:
        assert isinstance(part, CallDelta)
        return self._more(self._input.push(part.arguments))

    def closing(self) -> list[Event]:
        return [*self._more(self._input.finish()), ("response.custom_tool_call_input.done", {"input": self.text})]

    def _more(self, text: str) -> list[Event]:
        self.text += text
        return [("response.custom_tool_call_input.delta", {"delta": text})] if text else []

    def as_json(self, status: str) -> Json:
        return self._fields("custom_tool_call", status, {"input": self.text})


def new_item(part: Part, new_id: Callable[[str], str], tools: Mapping[str, ClientTool]) -> OutputItem:
    """Creates the item for its first part.

    `new_id`: makes an id from a prefix. `tools`: as returned by tools.tools_by_prompt_name.
    """
    if isinstance(part, CallDelta):
        tool = tools.get(part.name, ClientTool("", part.name))
        return CustomCallItem(new_id("ctc"), part, tool) if tool.takes_text else CallItem(new_id("fc"), part, tool)
    return ReasoningItem(new_id("rs")) if isinstance(part, Reasoning) else MessageItem(new_id("msg"))
