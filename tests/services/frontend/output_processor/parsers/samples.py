"""Answers in the format of each family, and their expected parts."""

from __future__ import annotations

import json
from typing import Any

Expected = str | tuple[str, Any] | tuple[str, Any, str]
"""Content; or a call's name, arguments (text: as it is written) and, where the model writes one, its id."""

CALLS: tuple[tuple[str, str, list[Expected]], ...] = (
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x\\"}</tool_call>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ["Let me see.", ("add", {"a": 1, "b": 'x"}</tool_call>'}), ("now", {})],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 2}, "name": "add"}</tool_call>', [("add", {"a": 2})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', [("add", {"a": 2})]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> Done.', [("now", {}), "Done."]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null, "type": [1]}</tool_call>', [("now", {})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"b": "1\n2"}}</tool_call>', [("add", {"b": "1\n2"})]),
    (  # physics-intern PR 6: backslashes that escape nothing
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"b": "C:\\dir and \\$x\\n"}}</tool_call>',
        [("add", {"b": "C:\\dir and \\$x\n"})],
    ),
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "add"}]</tool_call>', [("now", {}), ("add", {})]),
    ("hermes", '<tool_call>{"name": "caf\\u00e9 \\ud83d\\ude42 \\ud83d"}</tool_call>', [("café 🙂 ?", {})]),
    ("ernie45", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', [("now", {})]),
    ("granite4", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', [("now", {})]),
    ("qwen3_json", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', [("now", {})]),
    (
        "nemotron_json",
        'So.<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": "{}"}]</TOOLCALL>',
        ["So.", ("add", {"a": 1}), ("now", {})],
    ),
    ("gigachat3", 'So.<|function_call|>{"name": "add", "arguments": {"a": 1}}', ["So.", ("add", {"a": 1})]),
    ("gigachat3", 'function call<|role_sep|>\n{"name": "now", "arguments": {}}<|message_sep|>\n\n', [("now", {})]),
    ("longcat", '<longcat_tool_call>{"name": "now"}</longcat_tool_call>', [("now", {})]),
    ("jamba", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', [("now", {})]),
    ("hunyuan_a13b", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', [("now", {})]),
    (
        "minimax",
        '<tool_calls>\n{"name": "now", "arguments": {}}\n{"name": "add", "arguments": {"a": 1}}\n</tool_calls>',
        [("now", {}), ("add", {"a": 1})],
    ),
    (
        "internlm",
        'Yes.<|action_start|><|plugin|>\n{"name": "add", "parameters": {"a": 1}}<|action_end|>\n',
        ["Yes.", ("add", {"a": 1})],
    ),
    (
        "phi4_mini_json",
        'functools[{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}]',
        [("now", {}), ("add", {"a": 1})],
    ),
    ("granite", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
    ("granite", '<tool_call>[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
    (
        "granite-20b-fc",
        '<function_call> {"name": "now"}\n<function_call> {"name": "add", "arguments": {"a": 1}}',
        [("now", {}), ("add", {"a": 1})],
    ),
    (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        [("add", {"a": 1})],
    ),
    ("apertus", '<|tools_prefix|>[{"add": {"a": 1}}, {"now": {}}]<|tools_suffix|>', [("add", {"a": 1}), ("now", {})]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', [("now", {})]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        [("add", {"a": 1}), ("now", {})],
    ),
    ("llama3_json", ' {"name": "Bob", "parameters": {"a": 1}}', [' {"name": "Bob", "parameters": {"a": 1}}']),
    ("llama3_json", '{"answer": {"name": "add"}} is JSON', ['{"answer": {"name": "add"}} is JSON']),
    ("llama3_json", "<|python_tag|>print(1)", ["print(1)"]),
    (  # as vllm's llama3_json finds the first bracket
        "llama3_json",
        'Sure, calling it:\n{"name": "add", "parameters": {"a": 1}}',
        ["Sure, calling it:", ("add", {"a": 1})],
    ),
    (
        "llama3_json",
        'A set {1, 2}, an object {"name": "x", "a": {"name": "add", "parameters": {}}}, then\n'
        '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        [
            'A set {1, 2}, an object {"name": "x", "a": {"name": "add", "parameters": {}}}, then',
            ("add", {"a": 1}),
            ("now", {}),
        ],
    ),
    ("llama3_json", 'int main() { return "a{b}"; }', ['int main() { return "a{b}"; }']),
    ("llama3_json", '{"a": 1} or {"a": "\n', ['{"a": 1} or {"a": "\n']),
    (  # the built-in tools of Llama 3.1's template
        "llama3_json",
        '<|python_tag|>add.call(a=1, b="x")',
        [("add", {"a": 1, "b": "x"})],
    ),
    ("llama3_json", "I look.<|python_tag|>now.call()", ["I look.", ("now", {})]),
    ("llama3_json", "<|python_tag|>other.call(a=1)", ["other.call(a=1)"]),
    ("llama4_json", '{"name": "now", "parameters": {}}', [("now", {})]),
    ("xlam", '[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
    ("xlam", '```json\n[{"name": "add", "arguments": {"a": 1}}]\n```', [("add", {"a": 1})]),
    ("xlam", '[{"name": "Bob", "arguments": 1}]', ['[{"name": "Bob", "arguments": 1}]']),
    (
        "mistral",
        'So:[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"id": "123456789", "name": "now", "arguments": {}}]',
        ["So:", ("add", {"a": 1}), ("now", {}, "123456789")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]abcDEF123[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add{"b": "[TOOL_CALLS]"}',
        [("add", {"a": 1}, "abcDEF123"), ("now", {}), ("add", {"b": "[TOOL_CALLS]"})],
    ),
    *(
        (
            name,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n\n two\n\n</parameter>\n"
            "<parameter=c>\nnull\n</parameter>\n<parameter=d>\n[true]\n</parameter>\n<parameter=e>\n{1}\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            [("add", {"a": 1, "b": "\n two\n", "c": None, "d": [True], "e": "{1}"}), ("now", {})],
        )
        for name in ("qwen3_coder", "qwen3_xml", "mimo", "nemotron_v3", "step3p5")
    ),
    (
        "qwen3_coder",
        "Well,\n<function=add>\n<parameter=a>\nmany\n</parameter>\n<parameter=b>\n5\n</parameter>\n</function>",
        ["Well,", ("add", {"a": "many", "b": "5"})],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>x < y</parameter>\n</function>\n"
        "</seed:tool_call>",
        [("add", {"a": 1, "b": "x < y"})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b"> x'
        '</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [("add", {"a": 1, "b": " x"}), ("now", {})],
    ),
    (
        "step3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">\n'
        '<steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
        [("add", {"a": 1}), ("now", {})],
    ),
    *(
        (
            name,
            f'Hm.\n\n<｜DSML｜{block}>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
            f'</｜DSML｜parameter>\n<｜DSML｜parameter name="z" string="true">2</｜DSML｜parameter>\n</｜DSML｜invoke>'
            f'\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{block}>',
            ["Hm.", ("add", {"a": 1, "z": "2"}), ("now", {})],
        )
        for name, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    *(
        (
            name,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1, "b": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            [("add", {"a": 1, "b": "```"}), ("now", {})],
        )
        for name in ("deepseek_v3", "deepseek_v31")
    ),
    (
        "kimi_k2",
        "Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        ["Yes.", ("add", {"a": 1}, "functions.add:0"), ("now", {}, "functions.now:1")],
    ),
    *(
        (
            name,
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            '<arg_value>1 "2"</arg_value>\n</tool_call>\n<tool_call>now</tool_call>\n',
            [("add", {"a": 1, "b": '1 "2"'}), ("now", {})],
        )
        for name in ("glm45", "glm47")
    ),
    (
        "glm47",
        "<tool_call>add<arg_key>d</arg_key><arg_value>[false]</arg_value></tool_call>",
        [("add", {"d": [False]})],
    ),
    (
        "pythonic",
        "[add(a=-1, b='it\\'s \\x41\\n\\d', c=None, d=[True, (0x1F, 1_000, .5)], e={'k': \"v\", 1: {}},), now()]",
        [
            (
                "add",
                {
                    "a": -1,
                    "b": "it's A\n\\d",
                    "c": None,
                    "d": [True, [31, 1000, 0.5]],
                    "e": {"k": "v", "1": {}},
                },
            ),
            ("now", {}),
        ],
    ),
    ("pythonic", "[1, 2] and [print(1)]", ["[1, 2] and [print(1)]"]),
    ("llama4_pythonic", "<|python_start|>[now()]<|python_end|>", [("now", {})]),
    ("lfm2", "<|tool_call_start|>[add(a=1), now()]<|tool_call_end|>ok", [("add", {"a": 1}), ("now", {}), "ok"]),
    ("olmo3", "<function_calls>add(a=1)\nnow()</function_calls>", [("add", {"a": 1}), ("now", {})]),
    (  # llama.cpp's tests of tencent-Hy3.jinja; vllm's of Hy3-preview have no suffix
        "hy_v3",
        "Checking.<tool_calls:opensource>\n<tool_call:opensource>add<tool_sep:opensource>\n"
        "<arg_key:opensource>a</arg_key:opensource>\n<arg_value:opensource>1</arg_value:opensource>\n"
        "</tool_call:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        ["Checking.", ("add", {"a": 1}), ("now", {})],
    ),
    (
        "hy_v3",
        "<tool_calls><tool_call>add<tool_sep><arg_key>b</arg_key><arg_value>2026-03-30</arg_value></tool_call>"
        "</tool_calls>",
        [("add", {"b": "2026-03-30"})],
    ),
    ("hy_v3", "<tool_call>now</tool_call> So.", [("now", {}), "So."]),
    (
        "minicpm5",
        'Intro.\n<function name="add"><param name="a">1</param><param name="b"><![CDATA[x < </param>\n&]]></param>'
        '</function>\n<function name="now"></function>\nOutro.',
        ["Intro.", ("add", {"a": 1, "b": "x < </param>\n&"}), ("now", {}), "\nOutro."],
    ),
    (  # omlx#3429: with a tag around it, as other families have it
        "minicpm5",
        'So.<tool_call>\n<function name="add"><param name="a">1</param></function>\n</tool_call>',
        ["So.", ("add", {"a": 1})],
    ),
    (  # values as Python writes them; arguments in one parameter (vllm's test_arguments_wrapped_arguments)
        "minicpm5",
        '<function name="add"><param name="c">None</param><param name="d">[\'x\', True]</param></function>'
        '<function name="add"><param name="arguments">{"a": 2}</param></function>',
        [("add", {"c": None, "d": ["x", True]}), ("add", {"a": 2})],
    ),
    (
        "functionary_v31",
        'So.<function=add>{"a": 1, "b": "</function>"}</function><function=now>{}</function>',
        ["So.", ("add", {"a": 1, "b": "</function>"}), ("now", {})],
    ),
    ("functionary_v31", "<|python_tag|>print(1)\nx", [("python", {"code": "print(1)\nx"})]),
    (
        "functionary_v32",
        'all\nTry `>>> 1 + 1`.>>>add\n{"a": 1}>>>now\n{}',
        ["Try `>>> 1 + 1`.", ("add", {"a": 1}), ("now", {})],
    ),
    ("functionary_v32", '>>>add\n{"a": 1}\n>>>all\nDone.', [("add", {"a": 1}), "Done."]),
    ("functionary_v32", ">>> import os\n>>> all of it", [">>> import os\n>>> all of it"]),
    (
        "solar_open",
        '<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>add<|tool_call:args|>{"a": 1}<|tool_call:end|>'
        "<|tool_call:begin|>f6<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        [("add", {"a": 1}, "a1b2c3d4e5"), ("now", {}, "f6")],
    ),
    (
        "solar_open",
        "I look.<|begin|>assistant<|tool_calls|><|tool_call:begin|>f6<|tool_call:name|>now<|tool_call:args|>{}"
        "<|tool_call:end|>",
        ["I look.", ("now", {}, "f6")],
    ),
    (
        "kimi_k3",
        'Hm.<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
        '<|close|>argument<|sep|><|open|>argument key="b" type="string"<|sep|> 2\n<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
        ["Hm.", ("add", {"a": 1, "b": " 2\n"}), ("now", {})],
    ),
    (
        "kimi_k3",
        '<|open|>call tool="add" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="a&quot;b&amp;" index="2"<|sep|><|close|>call<|sep|>',
        [("add", {"a": 1}), ('a"b&', {})],
    ),
    (
        "muse_glimmer",
        'Yes.<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n'
        '<atem:parameter name="b"> x\n</atem:parameter>\n</atem:invoke>\n<atem:invoke name="now.now">\n</atem:invoke>\n'
        "</atem:function_calls>",
        ["Yes.", ("add", {"a": 1, "b": " x\n"}), ("now", {})],
    ),
    (  # vllm's test_minimax_m3_tool_parser: nested elements, one name twice
        "minimax_m3",
        'I do.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="add">]<]minimax[>[<a>1]<]minimax[>[</a>'
        "]<]minimax[>[<b>x < <b>y</b>]<]minimax[>[</b>]<]minimax[>[<d>]<]minimax[>[<item>true]<]minimax[>[</item>"
        "]<]minimax[>[<item>]<]minimax[>[<k>v]<]minimax[>[</k>]<]minimax[>[<k>2]<]minimax[>[</k>]<]minimax[>[</item>"
        ']<]minimax[>[</d>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n'
        "]<]minimax[>[</tool_call>",
        ["I do.", ("add", {"a": 1, "b": "x < <b>y</b>", "d": [True, {"k": ["v", 2]}]}), ("now", {})],
    ),
    (  # vllm-gaudi PR 1724: the first bracket of a tag is missing
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[invoke name="add">]<]minimax[>[<a>1]<]minimax[>[</a>'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        [("add", {"a": 1})],
    ),
    (  # vllm#51073: the first parameter has no start tag
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="add">C:\\x\\main.rs]<]minimax[>[</b>]<]minimax[>[<a>130'
        "]<]minimax[>[</a>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        [("add", {"b": "C:\\x\\main.rs", "a": 130})],
    ),
    *(
        (name, *rest)
        for name, block in (("deepseek_v32", "tool_calls"), ("deepseek_v4", "function_calls"))
        for rest in (  # V4's outer tag with V3.2's parser, and vice versa
            (
                f'<｜DSML｜{block}>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{block}>',
                [("now", {})],
            ),
            (f"No tool is needed. <｜DSML｜{block}> is a tag.", [f"No tool is needed. <｜DSML｜{block}> is a tag."]),
        )
    ),
    (
        "openai",
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant '
        "to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        [("add", {"a": 1}), ("now", {})],
    ),
    (  # openai/harmony#38: dashes before the channel
        "openai",
        '<|start|>assistant<|channel|>––commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        [("add", {"a": 1})],
    ),
    ("openai", "<|channel|>final<|message|>Hi", ["Hi"]),
    (
        "gemma4",
        '<|tool_call>call:add{a:1,b:<|"|>{two}, "2"<|"|>,d:[true,{<|"|>k<|"|>:<|"|>v<|"|>}],e:word}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        [("add", {"a": 1, "b": '{two}, "2"', "d": [True, {"k": "v"}], "e": "word"}), ("now", {})],
    ),
    (
        "functiongemma",
        "<start_function_call>call:add{a:1,b:<escape>two<escape>}<end_function_call>",
        [("add", {"a": 1, "b": "two"})],
    ),
)

# parser, a text in which a call is cut off or malformed, the expected result
BROKEN: tuple[tuple[str, str, list[Expected]], ...] = (
    ("hermes", '<tool_call>\n{"name": "ad', []),
    ("hermes", 'Hm.\n<tool_call>{"name": "add", "arguments": {"a": 1', ["Hm."]),  # it may have been 12
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x', [("add", {"a": 1, "b": "x"})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "d": [tr', [("add", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', [("add", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>!', [("add", {"a": 1}), "!"]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>', [("add", {"a": 1})]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": <b>}}</tool_call> no',
        ['{"name": "add", "arguments": {"a": <b>}} no'],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": <b>}}</tool_call> no',
        [("add", {"a": 1}), "<b>}} no"],
    ),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}', ['{"name": "", "arguments": {}}']),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}', ['{"name": "now", "arguments": [1]}']),
    ("hermes", '<tool_call>{"name": "now", "arguments": "now"}', ['{"name": "now", "arguments": "now"}']),
    ("hermes", '<tool_call>what?\n<tool_call>{"name": "now"}', ["<tool_call>what?", ("now", {})]),
    ("hermes", "a < b <tool_call", ["a < b <tool_call"]),
    ("hermes", "the tag <tool_call>", ["the tag <tool_call>"]),
    ("hermes", "a\n", ["a\n"]),
    ("hermes", "a" + "\n" * 100 + '<tool_call>{"name": "now"}', ["a" + "\n" * 36, ("now", {})]),
    ("mistral", "[TOOL_CALLS]add and more", ["add and more"]),
    ("qwen3_coder", "<tool_call>\n<function=add", []),
    ("qwen3_coder", "<function=add><parameter=b>half", [("add", {"b": "half"})]),
    ("qwen3_coder", "<function=add><parameter=b>", []),
    ("qwen3_coder", "<function=add><parameter=b>\nx\n</parameter>\n", [("add", {"b": "x"})]),
    ("qwen3_coder", "<function=add>hello</function>", ["hello"]),
    ("qwen3_coder", "<tool_call>\n<function=add>hello</function>\n</tool_call>\nyes", ["\nhello\nyes"]),
    ("glm45", "<tool_call>add <b> </tool_call>", ["add <b>"]),
    ("glm45", "<tool_call>add\n<arg_key>b</arg_key> 5", [("add", {"b": "5"})]),
    ("kimi_k2", "<|tool_calls_section_begin|>none", ["<|tool_calls_section_begin|>none"]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>none", ["<｜tool▁calls▁begin｜>none"]),
    (
        "deepseek_v31",
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{no}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ["add{no}"],
    ),
    ("deepseek_v31", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1} so<｜tool▁call▁end｜>', [("add", {"a": 1}), "so"]),
    (
        "hy_v3",
        "<tool_calls>\n<tool_call>add<tool_sep>\n<arg_key>b</arg_key>\n<arg_value>half",
        [("add", {"b": "half"})],
    ),
    ("hy_v3", "The tags <tool_calls> and <tool_call>", ["The tags <tool_calls> and <tool_call>"]),
    ("minicpm5", '<function name="add"><param name="b">half', [("add", {"b": "half"})]),
    (
        "minicpm5",
        '<function name="add"><param name="b"><![CDATA[a]]>b</param></function>',
        [("add", {"b": "a]]>b</param></function>"})],
    ),
    ("functionary_v31", '<function=add>{"a": 1, "b": "half', [("add", {"a": 1, "b": "half"})]),
    ("functionary_v32", 'add\n{"a": 1, "b": "half', [("add", {"a": 1, "b": "half"})]),
    ("functionary_v32", "add\nnone", ["add\nnone"]),
    ("solar_open", "<|tool_call:begin|>f6<|tool_call:name|>add", []),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="b" type="string"<|sep|>half',
        [("add", {"b": "half"})],
    ),
    ("kimi_k3", "<|open|>tools<|sep|>none", ["none"]),
    ("minimax_m3", ']<]minimax[>[<invoke name="add">]<]minimax[>[<b>half', [("add", {"b": "half"})]),
    (  # an end tag is missing
        "minimax_m3",
        ']<]minimax[>[<invoke name="add">]<]minimax[>[<b>x]<]minimax[>[<a>1]<]minimax[>[</a>]<]minimax[>[</invoke>',
        [("add", {"b": "x", "a": 1})],
    ),
    ("pythonic", "[add(a=b)]", ["[add(a=b)]"]),
    ("pythonic", "[add(a=1, b=b)]", [("add", {"a": 1}), "b)]"]),
    ("pythonic", "[add(1, c=None)]", [("add", {"a": 1, "c": None})]),
    ("pythonic", "[now(1)]", ["[now(1)]"]),
    ("pythonic", "[add(b='x", [("add", {"b": "x"})]),
    ("pythonic", "[" * 500, ["[" * 500]),
    ("pythonic", "[add(a=" + "[" * 500 + ")]", ["[add(a=" + "[" * 500 + ")]"]),
    ("gemma4", "<|tool_call>call:add{a:", []),
    ("gemma4", '<|tool_call>call:add{a:1,b:<|"|>x', [("add", {"a": 1, "b": "x"})]),
    ("openai", "<|channel|>commentary to=functions.add", []),
    ("openai", "<|channel|>" + "word " * 200 + "<|message|>x", ["word " * 199 + "wordx"]),
    # opencode#1680: a list that is cut off after a call
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments":',
        [("add", {"a": 1})],
    ),
    ("xlam", '[{"name": "now", "arguments": {}}, {"name": "add", "argum', [("now", {})]),
    ("jamba", '<tool_calls>[{"name": "now", "arguments": {}}, {"name"', [("now", {})]),
    ("lfm2", "<|tool_call_start|>[now(), add(", [("now", {})]),
    ("apertus", '<|tools_prefix|>[{"now": {}}, {"add": {"a"', [("now", {})]),
)


def as_expected(name: str, arguments: str, call_id: str) -> Expected:
    value = json.loads(arguments)
    return (name, value, call_id) if call_id else (name, value)
