"""Answers that the fuzz lets models write: reasoning, text, and calls with arguments of all types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.services.frontend.request.request import Tool

TOOLS = (
    Tool(
        "write_file",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "content": {"type": "string"},
                "mode": {"type": "integer"},
                "executable": {"type": "boolean"},
                "owner": {"type": ["string", "null"]},
            },
            "required": ["path", "content"],
        },
    ),
    Tool(
        "search",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "filters": {
                    "type": "object",
                    "properties": {
                        "tags": {"type": "array", "items": {"type": "string"}},
                        "range": {"type": "object", "properties": {"min": {"type": "number"}}},
                    },
                },
            },
        },
    ),
    Tool("now"),
)


@dataclass(frozen=True, slots=True)
class Call:
    """Call of one tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a model, any part of which may be missing."""

    reasoning: str
    text: str
    calls: tuple[Call, ...]


CODE = 'def f(x):\n    if x < 3 and "a" != \'b\':\n        return {"k": [1, 2]}'
PAGE = '<div class="a">\n  <p>1 &lt; 2 [ok]</p>\n</div>'
WRITE = Call("write_file", {"path": "src/main.py", "content": CODE, "mode": 420, "executable": True, "owner": None})
SEARCH = Call(
    "search",
    {
        "query": 'café "naïve" 日本語 🙂 O\'Neill',
        "limit": 10,
        "filters": {"tags": ["a b", "c\\d", "x=1, y"], "range": {"min": -1.5}},
    },
)
NOW = Call("now", {})
PAGE_CALL = Call("write_file", {"path": "C:\\temp\\x.html", "content": PAGE})

ANSWERS = (
    Answer("The user wants a file, so I write it.\n\nThe mode is 0644.", "I create it.", (WRITE,)),
    Answer("", "", (SEARCH, NOW)),
    Answer("用户想… <b>html</b> & more: {1, 2}", "Two steps:\n\n1. the time\n2. the page", (NOW, PAGE_CALL)),
    Answer("Only text.", 'As JSON: {"a": [1, 2]}, or f(x) in `C:\\dir`.', ()),
)
