"""Measures the cost of parsing per token: `python -m tests.services.frontend.output_processor.parsers.cost`."""

from __future__ import annotations

import json
import time
from functools import partial

from quire.services.frontend.output_processor.answer_parser import AnswerParser
from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.formats import call_id
from quire.services.frontend.output_processor.parsing.reader import MarkupReader
from quire.services.frontend.output_processor.parsing.registry import reasoning_format, tool_format
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from tests.services.frontend.output_processor.parsers.reading import TOOLS

TOKEN = 5  # characters
WORDS = "word " * 2000
LARGE = json.dumps({"b": [{"k": i, "v": "x" * 5} for i in range(5000)]})
CASES = (
    ("hermes", "", "content", WORDS),
    ("hermes", "qwen3", "reasoning", f"<think>{WORDS}</think>yes"),
    ("hermes", "", "a long string", f'<tool_call>{{"name": "add", "arguments": {{"b": "{WORDS}"}}}}</tool_call>'),
    ("hermes", "", "much JSON", f'<tool_call>{{"name": "add", "arguments": {LARGE}}}</tool_call>'),
    ("qwen3_coder", "", "a long string", f"<function=add><parameter=b>{WORDS}</parameter></function>"),
    ("pythonic", "", "much Python", f"[add(b={json.loads(LARGE)['b']!r})]"),
    ("hermes", "", "nothing but markers", "<tool_call>" * 2000),
    ("hermes", "", "nothing but white space", " \n" * 10_000),
)


def seconds(tools: str, reasoning: str, pieces: list[str]) -> float:
    calls = MarkupReader(partial(_read, tools))
    thoughts = (
        MarkupReader(lambda s, w: reasoning_format(reasoning).read(s, w, False, CallProbe())) if reasoning else None
    )
    parser = AnswerParser(thoughts, calls, new_id=call_id, most_calls=None, wants_reasoning=True)
    start = time.perf_counter()
    for piece in pieces:
        parser.push(piece)
    parser.finish()
    return time.perf_counter() - start


def _read(name: str, scan: object, writer: object) -> object:
    return tool_format(name).read(scan, writer, ToolSchemas(TOOLS))  # type: ignore[arg-type]


def main() -> None:
    for tools, reasoning, what, text in CASES:
        pieces = [text[i : i + TOKEN] for i in range(0, len(text), TOKEN)]
        best = min(seconds(tools, reasoning, pieces) for _ in range(3))
        whole = min(seconds(tools, reasoning, [text]) for _ in range(3))
        name = f"{tools}{' + ' if reasoning else ''}{reasoning}, {what}"
        print(
            f"{name}: {best / len(pieces) * 1e6:.1f} µs a token; {len(text):,} characters at once {whole * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
