"""Parsing of server-sent events, and the API-independent content of an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


@dataclass
class Call:
    """Call of one tool."""

    id: str
    name: str
    arguments: str


@dataclass
class Answered:
    """Content of an answer: its texts and calls, its tokens, and the messages with which its client continues."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    is_cut: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    spliced: list[dict[str, Any]] = field(default_factory=list)

    def check(self) -> None:
        """Asserts that arguments of calls are JSON objects, unless the answer was cut."""
        for call in self.calls:
            assert call.id
            assert call.name
            if not self.is_cut:
                assert isinstance(json.loads(call.arguments or "{}"), dict)


def events_of(text: str) -> list[dict[str, Any]]:
    """Returns the events of a stream; asserts that named events have that type, and that the last one ends the
    stream."""
    assert text.endswith("\n\n")
    found: list[dict[str, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        assert fields.keys() <= {"event", "data"}
        event = {"type": DONE} if fields["data"] == DONE else json.loads(fields["data"])
        assert fields.get("event", event.get("type")) == event.get("type")
        found.append(event)
    return found
