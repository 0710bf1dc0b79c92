"""Families of chat templates: the common structure (a file of templates/), and the quirks by which each differs.

Structures and quirks are those of published templates; the wording is our own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"
PLACE = "{#- QUIRKS -#}"
Quirks = dict[str, Any]

FAMILIES: dict[str, tuple[str, Quirks]] = {
    "qwen2.5": ("chatml", {}),
    "qwen3": ("chatml", {"reasoning": "reasoning_content", "cuts": True}),
    "qwen3 instruct": ("chatml", {"calls": "either"}),
    "qwen3-coder": ("chatml", {"calls": "xml", "system": "first"}),
    "qwen3.5": (
        "chatml",
        {"calls": "xml", "text": "parts", "reasoning": "reasoning_content", "system": "raise", "strict": True},
    ),
    "qwq": ("chatml", {"cuts": True, "system": "first", "calls": "either"}),
    "hermes 2 pro": ("chatml", {"needs_tools": True, "either_or": True}),
    "hermes 3": ("chatml", {"needs_tools": True, "results": "tool"}),
    "mimo": ("chatml", {"system": "first", "results": "tool"}),
    "smollm3": ("chatml", {"calls": "none", "system": "first"}),
    "lfm2": ("chatml", {"calls": "none", "results": "tool"}),
    "lfm2.5": ("chatml", {"calls": "python", "reasoning": "thinking", "text": "parts", "results": "tool"}),
    "lfm2.5 thinking": ("chatml", {"calls": "python", "reasoning": "thinking", "keeps": True, "results": "tool"}),
    "nemotron nano 2": ("chatml", {"calls": "json", "system": "raise"}),
    "nemotron 3": ("chatml", {"calls": "xml", "reasoning": "reasoning_content", "system": "first"}),
    "seed-oss": ("chatml", {"calls": "plain", "reasoning": "reasoning_content", "results": "tool"}),
    "minicpm5": ("chatml", {"calls": "plain", "reasoning": "reasoning_content"}),
    "step 3.5": ("chatml", {"calls": "xml", "text": "parts", "reasoning": "reasoning_content", "results": "tool"}),
    "glm 4.5": ("chatml", {"calls": "plain", "text": "print", "reasoning": "reasoning_content", "results": "tool"}),
    "glm 4.6": ("chatml", {"calls": "xml", "text": "print", "reasoning": "reasoning_content", "results": "tool"}),
    "glm 4.7": ("chatml", {"calls": "xml", "text": "print", "reasoning": "reasoning_content", "keeps": True}),
    "minimax m1": ("chatml", {"either_or": True, "system": "first"}),
    "minimax m2": ("chatml", {"calls": "xml", "text": "print", "reasoning": "reasoning_content", "system": "raise"}),
    "kimi k2": ("chatml", {"calls": "id", "text": "parts", "results": "tool"}),
    "kimi k2 thinking": ("chatml", {"calls": "id", "text": "parts", "reasoning": "reasoning_content", "keeps": True}),
    "kimi k3": ("chatml", {"calls": "either", "text": "parts", "reasoning": "reasoning_content", "results": "named"}),
    "laguna": ("chatml", {"calls": "xml", "reasoning": "reasoning_content", "keeps": True, "results": "tool"}),
    "hunyuan": ("chatml", {"calls": "plain", "reasoning": "reasoning_content", "text": "parts", "results": "tool"}),
    "ling": ("chatml", {"system": "first", "reasoning": "reasoning_content"}),
    "bielik": ("chatml", {"cuts": True, "system": "raise"}),
    "solar open": ("chatml", {"either_or": True, "reasoning": "reasoning"}),
    "internlm": ("chatml", {"calls": "concat", "results": "named"}),
    "functionary 3.2": ("chatml", {"calls": "concat", "results": "tool"}),
    "openchat": ("chatml", {"calls": "concat", "text": "parts"}),
    "spark": ("chatml", {"text": "parts", "calls": "either", "first_call": True}),
    "exaone 4": ("chatml", {"calls": "json", "reasoning": "reasoning_content", "results": "tool", "system": "first"}),
    "granite 4": ("chatml", {"text": "parts", "system": "first"}),
    "granite 3.3": ("chatml", {"calls": "none", "results": "tool", "system": "first", "strict": True}),
    "apriel": ("chatml", {"text": "only_parts", "results": "tool"}),
    "llama guard": ("chatml", {"text": "only_parts", "calls": "none"}),
    "smolvlm": ("chatml", {"text": "only_parts", "calls": "either"}),
    "llama 3.1": ("headers", {}),
    "llama 3.2": ("headers", {"ipython": False}),
    "llama 3.3": ("headers", {"date": True}),
    "functionary 3.1": ("headers", {"one_call": False, "arguments": "text"}),
    "watt": ("headers", {"one_call": False}),
    "mistral nemo": ("instructions", {"system": "user"}),
    "mistral 7b v0.3": ("instructions", {"system": "user", "parts": True}),
    "mistral small 3.2": ("instructions", {"parts": True}),
    "devstral": ("instructions", {"calls": "args", "ids": False, "parts": True}),
    "devstral small": ("instructions", {"calls": "args", "ids": False, "alternate": False}),
    "ministral 3": ("instructions", {"calls": "args", "ids": False, "thinking_parts": True}),
    "magistral": ("instructions", {"calls": "args", "ids": True, "thinking_parts": True}),
    "llama 2": ("instructions", {"calls": "none", "ids": False, "system": "user"}),
    "mixtral": ("instructions", {"calls": "none", "ids": False, "refuses_system": True}),
    "deepseek r1 distill": ("none_calls", {}),
    "deepseek r1": ("none_calls", {"thoughts": False}),
    "deepseek v3": ("none_calls", {"fails": "", "thoughts": False}),
    "deepseek v3.1": ("none_calls", {"fails": "", "arguments": "tojson"}),
    "gpt-oss": ("channels", {}),
    "gpt-oss, both": ("channels", {"both": True}),
    "harmony, reasoning_content": ("channels", {"field": "reasoning_content"}),
    "gemma 2": ("turns", {}),
    "gemma 3": ("turns", {"system": "dropped"}),
    "phi 3.5": ("turns", {"system": "shown", "alternate": False, "model": "assistant"}),
    "rwkv": ("turns", {"system": "shown", "alternate": False, "tools": True}),
    "command r7b": ("actions", {}),
    "command a": ("actions", {"developer": True}),
}


def source(family: str) -> str:
    file, quirks = FAMILIES[family]
    text = (FOLDER / f"{file}.jinja").read_text()
    merged = "{%- set q = dict(q, **" + repr(quirks) + ") -%}" if quirks else ""
    return text.replace(PLACE, merged)
