"""Tests that a call ends open reasoning, and that a mere mention of its markup does not."""

from __future__ import annotations

from random import Random

import pytest

from quire.services.frontend.output_processor.answer_parser import CallDelta, Part
from quire.services.frontend.output_processor.parsing import registry
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from tests.services.frontend.output_processor.parsers.reading import answer_in, pieces

K_CALL, K_ARGS, K_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
CALLS = {
    "apertus": '<|tools_prefix|>[{"add": {"a": 1}}]<|tools_suffix|>',
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="add"><｜DSML｜parameter name="a" string="false">1'
    "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
    "functionary_v31": '<function=add>{"a": 1}</function>',
    "functiongemma": "<start_function_call>call:add{a:1}<end_function_call>",
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]',
    "granite-20b-fc": '<function_call> {"name": "add", "arguments": {"a": 1}}',
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "hy_v3": "<tool_calls>\n<tool_call>add<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "</tool_calls>",
    "internlm": '<|action_start|><|plugin|>{"name": "add", "parameters": {"a": 1}}<|action_end|>',
    "jamba": '<tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>',
    "kimi_k2": f'<|tool_calls_section_begin|>{K_CALL}functions.add:0{K_ARGS}{{"a": 1}}{K_END}'
    "<|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" '
    'type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "lfm2": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    "llama3_json": '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    "nemotron_json": '<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>',
    "gigachat3": '<|function_call|>{"name": "add", "arguments": {"a": 1}}',
    "longcat": '<longcat_tool_call>{"name": "add", "arguments": {"a": 1}}</longcat_tool_call>',
    "minimax_m2": '<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter></invoke>'
    "</minimax:tool_call>",
    "minicpm5": '<function name="add"><param name="a">1</param></function>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="add">]<]minimax[>[<a>1]<]minimax[>[</a>'
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "muse_glimmer": '<atem:function_calls><atem:invoke name="add"><atem:parameter name="a">1</atem:parameter>'
    "</atem:invoke></atem:function_calls>",
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "olmo3": "<function_calls>add(a=1)</function_calls>",
    "phi4_mini_json": 'functools[{"name": "add", "arguments": {"a": 1}}]',
    "pythonic": "<|python_start|>[add(a=1)]<|python_end|>",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call><function=add><parameter=a>1</parameter></function></seed:tool_call>",
    "solar_open": "<|begin|>assistant<|tool_calls|><|tool_call:begin|>call-0<|tool_call:name|>add<|tool_call:args|>"
    '{"a": 1}<|tool_call:end|><|calls|>',
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">'
    '<steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "xlam": '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>',
}
THINKERS = sorted(set(registry.REASONING_PARSERS.values()) - {"openai_gptoss", "muse_glimmer"})  # messages for calls
ENDS = {name: registry.reasoning_format(name).ends[0] for name in registry.REASONING_PARSERS}
NAMES = {file: name for name, file in registry.REASONING_PARSERS.items()}


def found(thinker: str, caller: str, text: str) -> list[Part]:
    """Returns the parts, which must be equal for every split."""
    whole = answer_in(thinker, caller, [text])
    assert answer_in(thinker, caller, list(text)) == whole
    random = Random(text)
    for _ in range(10):
        assert answer_in(thinker, caller, pieces(text, random.choices(range(len(text)), k=4))) == whole
    return whole


def call(arguments: str = '{"a": 1}', call_id: str = "call-0") -> CallDelta:
    return CallDelta(0, call_id, "add", arguments)


@pytest.mark.parametrize("caller", sorted(CALLS))
@pytest.mark.parametrize("file", THINKERS)
def test_a_call_ends_open_reasoning(file: str, caller: str) -> None:
    """Checks vllm#39056: a call without a preceding end of reasoning was lost in the reasoning."""
    call_id = "functions.add:0" if caller == "kimi_k2" else "call-0"
    for after in ("", ENDS[NAMES[file]]):  # llxprt-code#749: the end of reasoning follows the call
        parts = found(NAMES[file], caller, f"thinking about it\n{CALLS[caller]}{after}")
        assert parts == [Reasoning("thinking about it"), call(call_id=call_id)]


def test_marker_tests_cover_every_format_with_markers() -> None:
    tried = {registry.TOOL_PARSERS[name] for name in CALLS}
    marked = {file for name, file in registry.TOOL_PARSERS.items() if registry.tool_format(name).starts}
    assert {file.partition(":")[0] for file in marked} == {file.partition(":")[0] for file in tried}


@pytest.mark.parametrize(
    ("caller", "thoughts"),
    [
        # lmstudio#1592, qvac PR 1316
        ("qwen3_coder", "thinking of <tool_call> tags and <function=x>\nonly"),
        ("hermes", "the <tool_call> tag; {} or <tool_call>{ or <tool_call>[1]"),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call> is not on offer'),
        ("glm45", "<tool_call>add is how it begins"),
        ("kimi_k2", "<|tool_calls_section_begin|> opens, <|tool_call_begin|>functions.add:0 names"),
        ("mistral", "[TOOL_CALLS]add [TOOL_CALLS]"),
        ("deepseek_v32", "<｜DSML｜function_calls> and then?"),
        ("kimi_k3", '<|open|>call tool="add" index="1"<|open|>argument key="b" type="string"<|sep|>text'),
    ],
)
def test_a_mention_of_a_call_is_reasoning(caller: str, thoughts: str) -> None:
    text = f"{thoughts}</think>\n\n{CALLS[caller]}"
    call_id = "functions.add:0" if caller == "kimi_k2" else "call-0"
    assert found("qwen3", caller, text) == [Reasoning(thoughts), call(call_id=call_id)]
    assert found("qwen3", caller, f"{thoughts}</think>Yes.") == [Reasoning(thoughts), Content("Yes.")]
    assert found("qwen3", caller, thoughts) == [Reasoning(thoughts)]


@pytest.mark.parametrize(
    ("section", "end"),
    [
        ("", ""),  # vllm PR 32216
        ("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),  # llama.cpp PR 17376
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        (" <|tool_calls_section_begin|> ", ""),
    ],
)
def test_kimi_may_omit_or_replace_its_section_marker(section: str, end: str) -> None:
    text = f'hm {section}{K_CALL}functions.add:0{K_ARGS}{{"a": 1}}{K_END}{end}'
    assert found("kimi_k2", "kimi_k2", text) == [Reasoning("hm"), call(call_id="functions.add:0")]


def test_the_end_of_reasoning_after_a_call_is_dropped_once() -> None:
    """Checks that the end of reasoning is dropped once, in the content; in arguments, and later, it is text."""
    text = f"hm{CALLS['hermes']}</think>\n\nDone </think> now."
    assert found("qwen3", "hermes", text) == [Reasoning("hm"), call(), Content("Done </think> now.")]
    text = 'hm<tool_call>{"name": "add", "arguments": {"b": "</think>"}}</tool_call></think>'
    assert found("qwen3", "hermes", text) == [Reasoning("hm"), call('{"b": "</think>"}')]
    text = f"hm{CALLS['hermes']} so\n</think>\n{CALLS['hermes']}"
    more = CallDelta(1, "call-1", "add", '{"a": 1}')
    assert found("qwen3", "hermes", text) == [Reasoning("hm"), call(), Content("so"), more]


def test_end_markers_of_open_reasoning_are_not_dropped() -> None:
    text = f"hm</think>Yes </think> no{CALLS['hermes']}</think>"
    assert found("qwen3", "hermes", text) == [
        Reasoning("hm"),
        Content("Yes </think> no"),
        call(),
        Content("</think>"),
    ]
