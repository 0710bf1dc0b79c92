"""Renders conversations as the chat template does, marking the text that the model must generate.

Serving uses the template in `model/chat_template.jinja`; this module renders the same text (a test compares them),
knows which parts are answers, and is fast enough to feed a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tools.evals.item import Message, Tool
from tools.evals.tools import spell_call

END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
IMAGE = "<image>"
"""Stands for a picture; its token is repeated for each of the picture's embeddings."""

Segment = tuple[str, bool]
"""A piece of text, and whether the model writes it."""

TOOLS_BEFORE = (
    "# Tools\n\nYou can call these functions. Each line between <tools> and </tools> is the JSON schema of one:\n"
    "<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nTo call one, answer with its name and its arguments as JSON between <tool_call> and </tool_call>:\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
)


def _text_of(content: str | Sequence[dict[str, Any]]) -> str:
    """Returns the text of a message's content: a placeholder for each picture, then the parts of text."""
    if isinstance(content, str):
        return content
    pictures = sum(str(part["type"]).startswith("image") for part in content)
    texts = (str(part["text"]) for part in content if part["type"] == "text")
    return f"{IMAGE}\n" * pictures + "".join(texts)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _system(text: str, tools: Iterable[Tool]) -> str:
    """The system turn: the caller's text, then the tools."""
    listed = "".join(f"\n{_as_json(tool)}" for tool in tools)
    tool_text = f"{TOOLS_BEFORE}{listed}{TOOLS_AFTER}" if listed else ""
    return f"{START}system\n{text}{chr(10) * 2 if text and tool_text else ''}{tool_text}{END}\n"


def _answer(message: Message) -> str:
    """Returns the text of an assistant's message, then its calls."""
    calls = [spell_call(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join(filter(None, [message["content"], *calls]))


def segments(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Segment]:
    """A conversation as segments. Put together they are the chat template's text without a generation prompt."""
    parts: list[Segment] = []
    has_system = messages[0]["role"] == "system"
    if has_system or tools:
        parts.append((_system(messages[0]["content"] if has_system else "", tools), False))
    for message in messages[1 if has_system else 0 :]:
        role, content = message["role"], _text_of(message["content"])
        if role == "assistant":
            parts += [(f"{START}assistant\n", False), (f"{_answer(message)}{END}", True), ("\n", False)]
        elif role == "tool":
            parts.append((f"{START}user\n<tool_response>\n{content}\n</tool_response>{END}\n", False))
        else:
            parts.append((f"{START}{role}\n{content}{END}\n", False))
    return parts


def prompt(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
    """A conversation as text, up to where the model's answer begins."""
    return "".join(text for text, _ in segments(messages, tools)) + f"{START}assistant\n"
