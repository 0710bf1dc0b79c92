"""Tests of model families that tag reasoning, text and calls, over HTTP: detected parsers, and required calls."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from quire.services.frontend.output_processor.parsing import registry
from tests.services.frontend.tiny_folder import byte_level_tokenizer, write_folder
from tests.services.frontend.tool_model import ASK, WEATHER, tool_server

TURNS = """{{ tools | tojson if tools else '' }}{% for message in messages %}
{{- '<|im_start|>' + message.role + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ BEGIN }}{% endif %}{% if false %}MARKS{% endif %}"""


@dataclass(frozen=True, slots=True)
class Family:
    """Parsers of a family, and the end of its prompts."""

    tools: str
    reasoning: str
    begin: str  # an expression of the template
    marks: str  # markup by which its template is detected
    call: str
    before_call: str
    expected: tuple[str | None, str | None] = ("hm", "I look.")
    variables: dict[str, Any] = field(default_factory=dict)


XTML = (
    '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"'
    "<|sep|>Oslo<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
HUNYUAN = (
    "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
    "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Oslo</arg_value:opensource>\n"
    "</tool_call:opensource>\n</tool_calls:opensource>"
)
K3_BEGIN = "'<|open|>' + ('think' if thinking | default(true) else 'response') + '<|sep|>'"
ANSWER = "<|open|>response<|sep|>I look.<|close|>response<|sep|>"
FAMILIES = {
    "kimi k3": Family("kimi_k3", "kimi_k3", K3_BEGIN, "<|close|>", XTML, f"hm<|close|>think<|sep|>{ANSWER}"),
    "kimi k3 that does not think": Family(
        "kimi_k3",
        "kimi_k3",
        K3_BEGIN,
        "<|close|>",
        XTML,
        "I look.<|close|>response<|sep|>",
        (None, "I look."),
        {"thinking": False},
    ),
    "hunyuan 3": Family(
        "hy_v3",
        "hy_v3",
        "'<think:opensource>'",
        "<tool_sep:opensource><arg_key:opensource>",
        HUNYUAN,
        "hm</think:opensource>I look.",
    ),
    "solar open": Family(
        "solar_open",
        "solar_open",
        "'<|begin|>assistant'",
        "<|think|><|tool_call:begin|><|tool_call:args|>",
        "<|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>"
        '{"city": "Oslo"}<|tool_call:end|><|calls|>',
        "<|think|>hm<|end|><|begin|>assistant<|content|>I look.<|end|>",
    ),
    "minimax m3": Family(
        "minimax_m3",
        "minimax_m3",
        "']~b]ai\\n'",
        "]<]minimax[>[<mm:think>",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Oslo]<]minimax[>[</city>'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        "</mm:think>I look.",
        (None, "I look."),
    ),
    "apriel": Family(
        "jamba",
        "apriel",
        "'Here are my reasoning steps:\\n'",
        "<tool_calls>[BEGIN FINAL RESPONSE]",
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>',
        "hm\n[BEGIN FINAL RESPONSE]\nI look.\n[END FINAL RESPONSE]\n",
    ),
    "minicpm 5": Family(
        "minicpm5",
        "deepseek_r1",
        "'<think>\\n'",
        '<function name="<param name="</think>',
        '<function name="get_weather"><param name="city">Oslo</param></function>',
        "hm\n</think>\n\nI look.",
    ),
    "functionary 3.2": Family(
        "functionary_v32",
        "none",
        "'>>>'",
        ">>>all",
        '>>>get_weather\n{"city": "Oslo"}',
        "all\nI look.",
        (None, "I look."),
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def folder(family: Family, tmp_path: Path) -> Path:
    """Writes a folder whose markup is special tokens, as in the families' tokenizers."""
    tokens = set(registry.tool_format(family.tools).tokens)
    if family.reasoning != "none":
        tokens |= set(registry.reasoning_format(family.reasoning).tokens)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in sorted(tokens)])
    template = TURNS.replace("BEGIN", family.begin).replace("MARKS", family.marks)
    return write_folder(tmp_path / "m", tokenizer=tokenizer, chat_template=template)


async def test_reasoning_text_and_calls_are_separated(family: Family, folder: Path) -> None:
    asked: Any = {"model": "m", "messages": ASK, "tools": [WEATHER]}
    more = {"extra_body": {"chat_template_kwargs": family.variables}}
    async with tool_server(folder, family.before_call + family.call) as (frontend, client, script):
        frontend.write_each_token(script)
        whole = (await client.chat.completions.create(**asked, **more)).choices[0]
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, **more, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    streamed = "".join(delta.content or "" for delta in deltas)
    thoughts = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    message = whole.message
    assert (getattr(message, "reasoning", None), message.content) == family.expected
    assert (thoughts or None, streamed or None) == family.expected
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    assert whole.finish_reason == "tool_calls"


async def test_an_answer_without_tools_has_no_markup(family: Family, folder: Path) -> None:
    asked: Any = {"model": "m", "messages": ASK, "extra_body": {"chat_template_kwargs": family.variables}}
    async with tool_server(folder, family.before_call) as (_, client, _script):
        message = (await client.chat.completions.create(**asked)).choices[0].message
    assert (getattr(message, "reasoning", None), message.content) == family.expected


async def test_a_required_call_has_the_familys_format(family: Family, folder: Path) -> None:
    asked: Any = {"model": "m", "messages": ASK, "tools": [WEATHER], "tool_choice": "required"}
    async with tool_server(folder, family.before_call + family.call) as (_, client, script):
        await client.chat.completions.create(**asked)
        tag = json.loads(script.submissions[0].sampling.structured_output.structural_tag)
    grammars = registry.tool_format(family.tools).grammars
    marker = next(
        (grammar.trigger or grammar.before or "get_weather" for grammar in grammars), '{"name": '
    )  # JSON, where no format is known
    assert any(marker.strip() in text for text in texts_of(tag))


def texts_of(tag: Any) -> list[str]:
    """Returns all texts in a structural tag."""
    if isinstance(tag, str):
        return [tag]
    inner = tag.values() if isinstance(tag, dict) else tag if isinstance(tag, list) else ()
    return [text for value in inner for text in texts_of(value)]
