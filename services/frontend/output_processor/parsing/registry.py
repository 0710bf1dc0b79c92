"""Registry of parsers under the names that vLLM uses. A file is imported on its first use."""

from __future__ import annotations

import importlib
from typing import Any

from quire.services.frontend.output_processor.parsing.formats import ReasoningFormat, ToolFormat
from quire.shared.errors import InvalidArgument

PACKAGE = "quire.services.frontend.output_processor"

# name -> file, or file:attribute for files with several formats
TOOL_PARSERS = {
    "apertus": "apertus",
    "cohere_command3": "cohere_command3",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3:V31",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v32:V4",
    "ernie45": "hermes",
    "functionary_v31": "functionary",
    "functionary_v32": "functionary:V32",
    "functiongemma": "gemma4:FUNCTION_GEMMA",
    "gemma4": "gemma4",
    "gigachat3": "gigachat3",
    "glm45": "glm45",
    "glm47": "glm45",
    "granite": "granite",
    "granite-20b-fc": "granite_20b_fc",
    "granite4": "hermes",
    "hermes": "hermes",
    "hunyuan_a13b": "jamba",
    "hy_v3": "hy_v3",
    "internlm": "internlm",
    "jamba": "jamba",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "lfm2": "lfm2",
    "llama3_json": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "longcat": "longcat",
    "mimo": "qwen3_coder",
    "minicpm5": "minicpm5",
    "minimax": "jamba",
    "minimax_m2": "minimax_m2",
    "minimax_m3": "minimax_m3",
    "mistral": "mistral",
    "muse_glimmer": "muse_glimmer",
    "nemotron_json": "nemotron_json",
    "nemotron_v3": "qwen3_coder",
    "olmo3": "olmo3",
    "openai": "openai",
    "phi4_mini_json": "phi4_mini_json",
    "pythonic": "pythonic",
    "qwen3_coder": "qwen3_coder",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "seed_oss": "seed_oss",
    "solar_open": "solar_open",
    "step3": "step3",
    "step3p5": "qwen3_coder",
    "xlam": "xlam",
}
REASONING_PARSERS = {
    "apriel": "apriel",
    "cohere_command3": "cohere_command3",
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "deepseek_v4": "think",
    "ernie45": "ernie45",
    "gemma4": "gemma4",
    "glm45": "think",
    "glm47": "think",
    "granite": "granite",
    "holo2": "think",
    "hunyuan_a13b": "hunyuan_a13b",
    "hy_v3": "hy_v3",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "mimo": "think",
    "minimax_m2": "think",
    "minimax_m3": "minimax_m3",
    "mistral": "mistral",
    "muse_glimmer": "muse_glimmer",
    "nemotron_v3": "think",
    "olmo3": "think",
    "openai_gptoss": "openai_gptoss",
    "qwen3": "think",
    "seed_oss": "seed_oss",
    "solar_open": "solar_open",
    "step3": "think",
    "step3p5": "think",
}


def tool_format(name: str) -> ToolFormat:
    tool_format: ToolFormat = _load("tool_call_parser", "tool_parsers", TOOL_PARSERS, name)
    return tool_format


def reasoning_format(name: str) -> ReasoningFormat:
    reasoning_format: ReasoningFormat = _load("reasoning_parser", "reasoning_parsers", REASONING_PARSERS, name)
    return reasoning_format


def _load(setting: str, folder: str, table: dict[str, str], name: str) -> Any:
    """Imports and returns the parser that `table` lists under `name`; raises InvalidArgument for an unknown name,
    with the known ones."""
    if name not in table:
        raise InvalidArgument(
            f"{setting}: unknown parser {name!r}; available: {', '.join(sorted(table))}", field=setting
        )
    file, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(f"{PACKAGE}.{folder}.{file}"), attribute or "FORMAT")
