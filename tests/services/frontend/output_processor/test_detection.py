"""Tests of the detection of parsers by the markup in a chat template.

The lines are the significant ones of the families' templates.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import bundled
from quire.services.frontend.output_processor.parsing import detection, registry

TEMPLATES = [
    ("hermes", "none", '{{- \'<tool_call>\\n{"name": "\' }}'),
    ("hermes", "deepseek_r1", "{{- '<think>\\n' + reasoning_content }} {{- '\\n<tool_call>\\n{\"name\": \"' }}"),
    ("qwen3_coder", "none", "{{- '<tool_call>\\n<function=' + name + '>\\n' }}{{- '<parameter=' + key }}"),
    ("glm45", "deepseek_r1", "<think></think> <tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>"),
    ("deepseek_v3", "deepseek_r1", "<｜tool▁calls▁begin｜>{{ tool.type }}<｜tool▁sep｜>\\n```json '<think>\\n'"),
    ("deepseek_v31", "deepseek_r1", "<｜tool▁calls▁begin｜>{{ function.name }}<｜tool▁sep｜> '<think>'"),
    ("kimi_k2", "kimi_k2", "<|tool_calls_section_begin|> <think></think>"),
    ("mistral", "none", "{{- '[TOOL_CALLS]' }}"),
    ("mistral", "mistral", "{{- '[TOOL_CALLS]' }}[THINK]"),
    ("llama3_json", "none", '{{- "<|python_tag|>" + tool_call.name + ".call(" }}'),
    (
        "llama3_json",  # Llama 3.2 writes no marker before calls
        "none",
        '\'Respond in the format {"name": name, "parameters": arguments}\' \'{"name": "\' + name + \'", \' + '
        '\'"parameters": \' + arguments | tojson "<|start_header_id|>ipython<|end_header_id|>"',
    ),
    (
        "functionary_v31",
        "none",
        "'<|python_tag|>' + code '<function=' + name + '>' + arguments | tojson + '</function>' "
        "'<|start_header_id|>ipython<|end_header_id|>'",
    ),
    (
        "minimax_m3",
        "minimax_m3",
        "{% set mark = ']<]minimax[>[' %}{% set begin = mark ~ '<tool_call>' %}<mm:think> "
        "mark + '<invoke name=\"' + name + '\">'",
    ),
    (
        "muse_glimmer",
        "muse_glimmer",
        "'<|start|>assistant to=' + name + '<|message|>' '<atem:function_calls>\n<atem:invoke name=\"' + name",
    ),
    (
        "kimi_k3",
        "kimi_k3",
        "'<|open|>' + tag + '<|sep|>' '<|close|>' + tag open_tag('call', [('tool', name)]) open_tag('think')",
    ),
    ("functionary_v32", "none", "'>>>all\\n' + content '>>>' + name + '\\n' + arguments"),
    (
        "solar_open",
        "solar_open",
        "'<|think|>' + thought '<|tool_call:begin|>' + id + '<|tool_call:name|>' '<|tool_call:args|>'",
    ),
    (
        "hy_v3",
        "hy_v3",
        "{% set mark = ':opensource' %}'<think{}>'.format(mark) '<tool_sep{}>'.format(mark) '<arg_key{}>'.format(mark)",
    ),
    ("hy_v3", "hy_v3", "'<tool_call>' + name + '<tool_sep>' '<arg_key>' '<think>'"),
    (
        "minicpm5",
        "deepseek_r1",
        "content.split('<tool_sep>') '<function name=\"' + name '<param name=\"' + key + '\">' '<think>\\n'",
    ),
    ("none", "deepseek_r1", "'<|im_start|>assistant\\n' + '<think>\\n\\n</think>\\n' xml_tools"),  # SmolLM3
    ("nemotron_json", "deepseek_r1", "'<TOOLCALL>[' + calls + ']</TOOLCALL>' '<think>\\n'"),
    ("gigachat3", "none", "role_sep='<|role_sep|>\\n', message_sep='<|message_sep|>\\n\\n' 'function call'"),
    ("lfm2", "none", "'List of tools: <|tool_list_start|>[' + tool | tojson + ']<|tool_list_end|>'"),
    ("openai", "openai_gptoss", '"<|start|>assistant<|channel|>analysis<|message|>"'),
    ("minimax_m2", "deepseek_r1", "<minimax:tool_call> <think>"),
    ("minimax_m2", "deepseek_r1", "<minimax:tool_call> <think> <response>{{ result }}</response>"),
    ("deepseek_v32", "deepseek_r1", "{% set mark = '｜DSML｜' %}'<' + mark + 'function_calls>' <think>"),
    ("deepseek_v4", "deepseek_r1", "{% set mark = '｜DSML｜' %}'<' + mark + 'tool_calls>' <think>"),
    ("seed_oss", "seed_oss", "<seed:tool_call>\n<function=example> <parameter=x> <seed:think>"),
    ("granite", "granite", "start with <|tool_call|> ... after 'Here is my thought process:' and"),
    (
        "jamba",
        "apriel",
        "'After explaining your thought process, provide the final solution: [BEGIN FINAL RESPONSE]' <tool_calls>",
    ),
    ("none", "none", "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"),
]


@pytest.mark.parametrize(("tools", "reasoning", "template"), TEMPLATES)
def test_parsers_are_found_by_markup(tools: str, reasoning: str, template: str) -> None:
    assert detection.detect(detection.TOOLS, template) == tools
    assert detection.detect(detection.REASONING, template) == reasoning


def test_detected_parsers_exist() -> None:
    assert {name for _, name in detection.TOOLS} <= {*registry.TOOL_PARSERS, detection.NONE}
    assert {name for _, name in detection.REASONING} <= set(registry.REASONING_PARSERS)


def test_the_bundled_model_writes_calls_as_hermes_does() -> None:
    template = Path(bundled.FOLDER / "chat_template.jinja").read_text()
    assert detection.detect(detection.TOOLS, template) == "hermes"
    assert detection.detect(detection.REASONING, template) == "none"
