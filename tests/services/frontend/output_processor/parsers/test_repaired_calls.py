"""Tests of calls in which real models violated their format.

Readable calls are read, the rest is text, no call is announced without its arguments, and no markup reaches the
content.
"""

from __future__ import annotations

from typing import Any

import pytest

from quire.services.frontend.output_processor.parsing.events import CallArguments, CallStart, Content, Event
from quire.services.frontend.output_processor.parsing.registry import TOOL_PARSERS, tool_format
from quire.services.frontend.request.request import Tool
from tests.services.frontend.output_processor.parsers.reading import calls_in
from tests.services.frontend.output_processor.parsers.samples import CALLS, Expected, as_expected

TEXT = {"type": "string"}
FILES = (
    Tool("write", {"properties": {"path": TEXT, "content": TEXT, "mode": {"type": "integer"}}}),
    Tool("read", {"properties": {"path": TEXT}}),
    Tool("tag", {"properties": {"names": {"type": "array"}}}),
    Tool("search", {"properties": {"arguments": TEXT}}),
)
X = ("read", {"path": "/x"})


def qwen(inner: str, end: str = "\n</function>\n</tool_call>") -> str:
    return f"<tool_call>\n<function=write>\n{inner}{end}"


def dsml(inner: str, name: str = "read") -> str:
    call = f'<｜DSML｜invoke name="{name}">\n{inner}\n</｜DSML｜invoke>'
    return f"<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>"


def dsml_parameter(name: str, value: str, is_string: str = "false") -> str:
    return f'<｜DSML｜parameter name="{name}" string="{is_string}">{value}</｜DSML｜parameter>'


def kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'


HELLO = ("write", {"path": "/x", "content": "hello"})
PATH = "<parameter=path>\n/x\n</parameter>\n"

REPAIRED: tuple[tuple[str, str, list[Expected]], ...] = (
    # sglang#40236, GenericAgent#804, xagent PR 790: no block around a call, no end of the block, other bars
    ("deepseek_v32", dsml(dsml_parameter("path", "/x", "true")).partition("\n")[2].rpartition("\n")[0], [X]),
    ("deepseek_v32", dsml(dsml_parameter("path", "/x", "true")).rpartition("\n")[0], [X]),
    *(
        (name, f"Yes. {dsml(dsml_parameter('path', '/x', 'true')).replace('｜DSML｜', mark)}", ["Yes.", X])
        for name in ("deepseek_v32", "deepseek_v4")
        for mark in ("｜｜DSML｜｜", "‖DSML‖", "|DSML|")
    ),
    # mlx-lm PR 792, MiniMax-M2#14 and, of their kind, other tagged formats: JSON in the block
    *(
        (name, f'<tool_call>{space}{{"name": "read", "arguments": {{"path": "/x"}}}}{space}</tool_call>', [X])
        for name in ("glm45", "glm47", "qwen3_coder", "hermes", "step3p5")
        for space in ("", "\n")
    ),
    ("minimax_m2", '<tool_calls>\n{"name": "read", "arguments": {"path": "/x"}}\n</tool_calls>', [X]),
    ("seed_oss", '<seed:tool_call>{"name": "read", "arguments": {"path": "/x"}}</seed:tool_call> end', [X, "end"]),
    ("glm47", '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>', ['{"name": "nothing", "arguments": {}}']),
    # MiniMax-M2#14: M1's block around calls of M2
    (
        "minimax_m2",
        '<tool_calls>\n<invoke name="read">\n<parameter name="path">/x</parameter>\n</invoke>\n</tool_calls>',
        [X],
    ),
    # ik_llama PR 2008, oh-my-pi#2759: M2's parameters in a call of M3
    (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="read">\n]<]minimax[>[<parameter name="path">/x'
        "]<]minimax[>[</parameter>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        [X],
    ),
    # mlx-lm PR 792: the shape of OpenAI's API; vllm#19056 and others: a surplus bracket; a repeated end
    (
        "hermes",
        '<tool_call>\n{"type": "function", "function": {"name": "read", "arguments": {"path": "/x"}}}\n</tool_call>',
        [X],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"function": {"arguments": "{\\"path\\": \\"/x\\"}", "name": "read"}, "id": "123456789"}]',
        [(*X, "123456789")],
    ),
    ("qwen3_json", '<tool_call>\n{"name": "read", "arguments": {"path": "/x"}}}\n</tool_call>', [X]),
    ("longcat", '<longcat_tool_call>{"name": "read", "arguments": {"path": "/x"}}]</longcat_tool_call>', [X]),
    ("qwen3_json", '<tool_call>{"name": "read", "arguments": {"path": "/x"}}</tool_call></tool_call>', [X]),
    # llama.cpp PR 18077: Nemotron 3 leaves out the end of the last parameter
    ("nemotron_v3", qwen(f"{PATH}<parameter=content>\nhello"), [HELLO]),
    ("qwen3_coder", qwen("<parameter=path>\n/x\n<parameter=content>\nhello\n</parameter>"), [HELLO]),
    (
        "seed_oss",
        f"<seed:tool_call><function=write>{PATH}<parameter=content>hello</function></seed:tool_call>",
        [HELLO],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="write"><parameter name="path">/x<parameter name="content">hello</invoke>'
        "</minimax:tool_call>",
        [HELLO],
    ),
    ("glm45", "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>/x</tool_call>", [X]),
    (
        "glm45",
        "<tool_call>write<arg_key>path</arg_key><arg_value>/x<arg_key>content</arg_key><arg_value>hello</arg_value>"
        "</tool_call>",
        [HELLO],
    ),
    ("deepseek_v32", dsml('<｜DSML｜parameter name="path" string="true">/x'), [X]),
    # the end of the function is missing (vLLM's expression for Qwen3-Coder allows for it)
    ("qwen3_coder", qwen(f"{PATH}<parameter=content>\nhello\n</parameter>", "\n</tool_call>"), [HELLO]),
    # vllm#44060: the end of a parameter within a value
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="write"><parameter name="content"><a><parameter>x</parameter></a></parameter>'
        "</invoke></minimax:tool_call>",
        [("write", {"content": "<a><parameter>x</parameter></a>"})],
    ),
    (
        "qwen3_coder",
        qwen("<parameter=content>\n<parameter=x>\n1\n</parameter> and </function>.\n</parameter>"),
        [("write", {"content": "<parameter=x>\n1\n</parameter> and </function>."})],
    ),
    (
        "glm45",
        "<tool_call>write<arg_key>content</arg_key><arg_value>a</arg_value>b</tool_call>c</arg_value></tool_call>",
        [("write", {"content": "a</arg_value>b</tool_call>c"})],
    ),
    # sglang#38924, vllm#41240: all arguments in a parameter of that name
    ("deepseek_v32", dsml(dsml_parameter("arguments", '{"path": "/x"}')), [X]),
    ("deepseek_v32", dsml(dsml_parameter("arguments", '{"path": "/x"}', "true")), [X]),
    ("qwen3_coder", qwen('<parameter=arguments>\n{"path": "/x", "content": "hello"}\n</parameter>'), [HELLO]),
    ("deepseek_v32", dsml(dsml_parameter("arguments", "5"), "search"), [("search", {"arguments": 5})]),
    (
        "deepseek_v32",
        dsml(dsml_parameter("arguments", '{"a": 1}', "true"), "search"),
        [("search", {"arguments": '{"a": 1}'})],
    ),
    # sglang#38924: JSON in place of parameters
    ("deepseek_v32", dsml('{"path": "/x"}'), [X]),
    ("minimax_m2", '<minimax:tool_call><invoke name="read">{"path": "/x"}</invoke></minimax:tool_call>', [X]),
    ("qwen3_coder", qwen('{"path": "/x", "content": "hello"}'), [HELLO]),
    ("glm45", '<tool_call>read\n{"path": "/x"}\n</tool_call>', [X]),
    ("glm45", "<tool_call>read\n<arg_key>path</arg_key>\n/x\n</tool_call>", [X]),
    # tags with the parameters' names
    ("qwen3_coder", qwen("<path>/x</path>\n<content>\nhello\n</content>"), [HELLO]),
    ("minimax_m2", '<minimax:tool_call><invoke name="read"><path>/x</path></invoke></minimax:tool_call>', [X]),
    ("deepseek_v32", dsml("<path>/x</path>"), [X]),
    ("qwen3_coder", qwen("<b>/x</b>"), ["\n\n<b>/x</b>"]),
    ("pythonic", '[write("/x", content="hello")]', [HELLO]),
    ("pythonic", '[write("/x", "hello", 7)]', [("write", {"path": "/x", "content": "hello", "mode": 7})]),
    # vllm PR 32146: an id in Kimi's form before a complete call
    ("kimi_k2", kimi("call_abc123", '{"name": "read", "arguments": {"path": "/x"}}'), [X]),
    ("kimi_k2", kimi("call_1", '[{"name": "read", "arguments": "{\\"path\\": \\"/x\\"}"}]'), [X]),
    ("kimi_k2", kimi("functions.fly:0", '{"a": 1}'), [("fly", {"a": 1}, "functions.fly:0")]),
    ("kimi_k2", kimi("call_1", '{"path": "/x"}'), ['call_1{"path": "/x"}']),
    # malformed JSON
    ("hermes", "<tool_call>{'name': 'read', 'arguments': {'path': '/x'}}</tool_call>", [X]),
    ("hermes", "<tool_call>{'name': 'read', 'arguments': '{\"path\": \"/x\"}', 'id': 'a\\'b'}</tool_call>", [X]),
    ("hermes", hermes("{'path': '/x', 'content': 'hello'}"), [HELLO]),
    ("hermes", hermes('{"path": "/x", "content": "hello",}'), [HELLO]),
    ("hermes", hermes('{path: "/x" "content": hello'), [HELLO]),
    ("hermes", hermes('{"path": "/x", "mode": tru, "content": "C:\\users \\u00e9 \\u12"}'), [
        ("write", {"path": "/x", "mode": True, "content": "C:\\users é \\u12"})
    ]),
    ("hermes", hermes('{"mode": [True, None, NaN, .5, 007, 0x1F, [1, 2}'), [
        ("write", {"mode": [True, None, None, 0.5, 7.0, 31, [1, 2]]})
    ]),
    ("hermes", hermes('{"path": , "mode": 1, "content": }'), [("write", {"mode": 1})]),
    ("hermes", hermes('"{\\"path\\": \\"/x\\", \\"content\\": \\"hello\\",}"'), [HELLO]),
    ("hermes", hermes('""'), [("write", {})]),
    ("hermes", hermes('{"path": "/x", "content": "it\\\'s"}'), [("write", {"path": "/x", "content": "it's"})]),
    # ai-sdk-tool-call-middleware#298: quotation marks in strings
    (
        "hermes",
        hermes('{"content": "He said "hello" to me", "path": "a "b"", "mode": 1}'),
        [("write", {"content": 'He said "hello" to me', "path": 'a "b"', "mode": 1})],
    ),
    # hermes-agent PR 5315: the last bracket is missing
    ("hermes", '<tool_call>{"name": "read", "arguments": {"path": "/x"}</tool_call>', [X]),
    ("longcat", '<longcat_tool_call>{"name": "read", "arguments": {"path": "/x</longcat_tool_call>', [
        ("read", {"path": "/x</longcat_tool_call>"})
    ]),
    # vllm-mlx#63: Python's literals as the value of a list
    (
        "qwen3_coder",
        "<tool_call><function=tag><parameter=names>['python', 'it\\'s', None]</parameter></function></tool_call>",
        [("tag", {"names": ["python", "it's", None]})],
    ),
    # sglang PR 24147: a value that ends as the end marker begins
    (
        "glm45",
        "<tool_call>read<arg_key>path</arg_key><arg_value>.<</arg_value></tool_call>",
        [("read", {"path": ".<"})],
    ),
    ("deepseek_v31", '<｜tool▁call▁begin｜>read<｜tool▁sep｜>{"path": "/x<｜tool▁call▁end｜>', [X]),
    ("kimi_k2", kimi("functions.read:0", '"{\\"path\\": \\"/x\\"}"'), [(*X, "functions.read:0")]),
    ("kimi_k2", kimi("functions.read:0", ""), [("read", {}, "functions.read:0")]),
    ("mistral", "[TOOL_CALLS]read[ARGS]{'path': '/x',}", [X]),
    ("lfm2", "<|tool_call_start|>[read(path='/x'), read(path=/x)]<|tool_call_end|>", [X, ", read(path=/x)]"]),
)  # fmt: skip


def found(events: list[Event]) -> list[Expected]:
    result: list[Expected] = []
    for place, event in enumerate(events):
        if isinstance(event, Content):
            result.append(event.text)
        elif isinstance(event, CallStart):
            arguments = events[place + 1]
            assert isinstance(arguments, CallArguments)
            result.append(as_expected(event.name, arguments.text, event.id))
    return result


@pytest.mark.parametrize(("parser", "text", "expected"), REPAIRED)
def test_malformed_calls_are_repaired(parser: str, text: str, expected: list[Expected]) -> None:
    whole = calls_in(parser, [text], FILES)
    assert found(whole) == expected
    assert calls_in(parser, list(text), FILES) == whole
    for size in (2, 3, 7):
        assert calls_in(parser, [text[i : i + size] for i in range(0, len(text), size)], FILES) == whole


def is_part(value: Any, whole: Any) -> bool:
    """Returns whether `value` is `whole` or a prefix of it."""
    if isinstance(value, dict) and isinstance(whole, dict):
        return all(key in whole and is_part(value[key], whole[key]) for key in value)
    if isinstance(value, list) and isinstance(whole, list):
        return len(value) <= len(whole) and all(map(is_part, value, whole))
    return value == whole or (isinstance(value, str) and isinstance(whole, str))


@pytest.mark.parametrize(("parser", "text", "expected"), CALLS)
def test_truncated_answers_have_complete_calls_or_none(parser: str, text: str, expected: list[Expected]) -> None:
    """Cuts the answer at every character: arguments are JSON and a prefix of the complete ones, and no markup is
    content."""
    if any(isinstance(part, str) and part == text for part in expected) or parser == "openai":
        return  # no call; and text of gpt-oss between calls belongs to the reasoning parser
    calls = [part for part in expected if not isinstance(part, str)]
    markers = tool_format(parser).tokens
    for cut in range(1, len(text)):
        parts = found(calls_in(parser, [text[:cut]]))
        found_calls = [part for part in parts if not isinstance(part, str)]
        for part, whole in zip(found_calls, calls, strict=False):
            assert part[0] == whole[0]
            assert is_part(part[1], whole[1]), (text[:cut], part)
        content = "".join(part for part in parts if isinstance(part, str))
        if found_calls:
            assert not any(marker in content for marker in markers), (text[:cut], content)


def test_split_tests_cover_every_format() -> None:
    assert {parser for parser, _, _ in CALLS} == set(TOOL_PARSERS)


def test_a_call_is_announced_with_its_first_value() -> None:
    """Checks that a client that runs calls as soon as they are named never runs one without its arguments."""
    for parser, text, rest in (
        ("hermes", '<tool_call>{"name": "read", "arguments": {"path":', ' "/x"'),
        ("qwen3_coder", "<tool_call><function=read><parameter=path>", "/x"),
        ("glm45", "<tool_call>read<arg_key>path</arg_key><arg_value>", "/x"),
        ("pythonic", "[read(path=", "'/x'"),
        ("kimi_k2", "<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{", '"path": "/'),
    ):
        assert found(calls_in(parser, [text], FILES)) == []
        assert [part[0] for part in found(calls_in(parser, [text, rest], FILES))] == ["read"]


def test_deep_brackets_are_closed() -> None:
    text = hermes('{"content": ' + "[" * 3000 + "1")
    arguments = calls_in("hermes", [text], FILES)[1]
    assert isinstance(arguments, CallArguments)
    assert arguments.text == '{"content": ' + "[" * 3000 + "1" + "]" * 3000 + "}"
