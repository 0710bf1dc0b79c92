"""Formats in which each family writes an answer: its reasoning, its text and its calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.services.frontend.output_processor.fuzz.conversations import Answer, Call

WriteCalls = Callable[[tuple[Call, ...]], str]


@dataclass(frozen=True, slots=True)
class Family:
    """Pair of parsers and the format of their models."""

    tools: str
    reasoning: str  # empty: none
    calls: WriteCalls
    markup: tuple[str, ...]  # markup that never belongs to content, besides the formats' own tokens
    begin_reasoning: str = ""
    end_reasoning: str = ""
    begin_text: str = ""
    end_text: str = ""
    is_open: bool = False  # the prompt contains the beginning of the reasoning
    calls_alone: bool = False  # an answer with calls has no text

    def write(self, answer: Answer) -> str:
        begin = "" if self.is_open else self.begin_reasoning
        thoughts = f"{begin}{answer.reasoning}{self.end_reasoning}" if self.reasoning and answer.reasoning else ""
        text = (
            f"{self.begin_text}{answer.text}{self.end_text}"
            if answer.text and not (answer.calls and self.calls_alone)
            else ""
        )
        return thoughts + text + (self.calls(answer.calls) if answer.calls else "")


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def typed(value: Any) -> str:
    """Returns strings unchanged, everything else as JSON."""
    return value if isinstance(value, str) else dump(value)


def objects(
    *, before: str = "", between: str = "\n", after: str = "", name: str = "name", arguments: str = "arguments"
):
    def calls(found: tuple[Call, ...]) -> str:
        return before + between.join(dump({name: call.name, arguments: call.arguments}) for call in found) + after

    return calls


def each(begin: str, end: str, arguments: str = "arguments") -> WriteCalls:
    def calls(found: tuple[Call, ...]) -> str:
        return "\n".join(begin + dump({"name": call.name, arguments: call.arguments}) + end for call in found)

    return calls


def tagged(
    block: str, function: str, parameter: str, end: str, *, line: str = "", each_block: bool = False
) -> WriteCalls:
    """Returns a writer of tagged calls.

    `block`, `function`, `parameter`: tags with NAME or KEY; `end`: their end tags in this order, separated by spaces.
    """
    block_end, function_end, parameter_end = end.split(" ")

    def begin(key: str, value: Any) -> str:
        return parameter.replace("KEY", key).replace("IS", str(isinstance(value, str)).lower())

    def one(call: Call) -> str:
        parameters = "".join(
            f"{begin(key, value)}{line}{typed(value)}{line}{parameter_end}\n" for key, value in call.arguments.items()
        )
        return f"{function.replace('NAME', call.name)}\n{parameters}{function_end}"

    def calls(found: tuple[Call, ...]) -> str:
        if each_block:
            return "\n".join(f"{block}\n{one(call)}\n{block_end}" for call in found)
        return f"{block}\n" + "\n".join(map(one, found)) + f"\n{block_end}"

    return calls


def glm(found: tuple[Call, ...]) -> str:
    def pairs(call: Call) -> str:
        return "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{typed(v)}</arg_value>\n" for k, v in call.arguments.items()
        )

    return "\n".join(f"<tool_call>{call.name}\n{pairs(call)}</tool_call>" for call in found)


def python(before: str, between: str, after: str) -> WriteCalls:
    def calls(found: tuple[Call, ...]) -> str:
        written = (f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})" for c in found)
        return before + between.join(written) + after

    return calls


def marked(start: str, end: str, quote: str) -> WriteCalls:
    def value(item: Any) -> str:
        if isinstance(item, str):
            return quote + item + quote
        if isinstance(item, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ",".join(map(value, item)) + "]"
        return dump(item)

    return lambda found: "".join(f"{start}call:{call.name}{value(call.arguments)}{end}" for call in found)


def deepseek(begin: str, end: str) -> WriteCalls:
    def calls(found: tuple[Call, ...]) -> str:
        written = "\n".join(
            f"<｜tool▁call▁begin｜>{begin.replace('NAME', c.name)}{dump(c.arguments)}{end}<｜tool▁call▁end｜>"
            for c in found
        )
        return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"

    return calls


def kimi(found: tuple[Call, ...]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{c.name}:{i}<|tool_call_argument_begin|>{dump(c.arguments)}<|tool_call_end|>"
        for i, c in enumerate(found)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def mistral(found: tuple[Call, ...]) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{dump(call.arguments)}" for call in found)


def apertus(found: tuple[Call, ...]) -> str:
    return f"<|tools_prefix|>{dump([{call.name: call.arguments} for call in found])}<|tools_suffix|>"


def harmony(found: tuple[Call, ...]) -> str:
    begin = "<|start|>assistant<|channel|>commentary to=functions."
    return "".join(f"{begin}{c.name} <|constrain|>json<|message|>{dump(c.arguments)}<|call|>" for c in found)


def step3(found: tuple[Call, ...]) -> str:
    one = tagged(
        "", '<steptml:invoke name="NAME">', '<steptml:parameter name="KEY">', " </steptml:invoke> </steptml:parameter>"
    )
    written = "".join(
        f"<｜tool_call_begin｜>function<｜tool_sep｜>{one((c,)).strip()}<｜tool_call_end｜>" for c in found
    )
    return f"<｜tool_calls_begin｜>{written}<｜tool_calls_end｜>"


def hunyuan(suffix: str) -> WriteCalls:
    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

    def one(call: Call) -> str:
        pairs = "".join(
            f"{tag('arg_key')}{k}{tag('/arg_key')}\n{tag('arg_value')}{typed(v)}{tag('/arg_value')}\n"
            for k, v in call.arguments.items()
        )
        return f"{tag('tool_call')}{call.name}{tag('tool_sep')}\n{pairs}{tag('/tool_call')}\n"

    return lambda found: f"{tag('tool_calls')}\n{''.join(map(one, found))}{tag('/tool_calls')}"


def minicpm(found: tuple[Call, ...]) -> str:
    def value(item: Any) -> str:
        return f"<![CDATA[{item}]]>" if isinstance(item, str) and set(item) & set("<&\n") else str(item)

    def one(call: Call) -> str:
        parameters = (f'<param name="{key}">{value(item)}</param>' for key, item in call.arguments.items())
        return f'<function name="{call.name}">{"".join(parameters)}</function>'

    return "\n".join(map(one, found))


def solar(found: tuple[Call, ...]) -> str:
    written = "".join(
        f"<|tool_call:begin|>a1b2c3d4e{i}<|tool_call:name|>{c.name}<|tool_call:args|>{dump(c.arguments)}<|tool_call:end|>"
        for i, c in enumerate(found)
    )
    return f"<|begin|>assistant<|tool_calls|>{written}<|calls|>"


def functionary(found: tuple[Call, ...]) -> str:
    return "".join(f"<function={call.name}>{dump(call.arguments)}</function>" for call in found)


def recipients(found: tuple[Call, ...]) -> str:
    return "".join(f">>>{call.name}\n{dump(call.arguments)}" for call in found)


def xtml(found: tuple[Call, ...]) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", type(None): "null", dict: "object"}

    def one(number: int, call: Call) -> str:
        arguments = "".join(
            f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>{typed(value)}<|close|>argument<|sep|>'
            for key, value in call.arguments.items()
        )
        return f'<|open|>call tool="{call.name}" index="{number}"<|sep|>{arguments}<|close|>call<|sep|>'

    calls = "".join(one(number, call) for number, call in enumerate(found, 1))
    return f"<|open|>tools<|sep|>{calls}<|close|>tools<|sep|><|close|>message<|sep|>"


def elements(found: tuple[Call, ...]) -> str:
    mark = "]<]minimax[>["

    def element(name: str, value: Any) -> str:
        if isinstance(value, dict):
            inner = "".join(element(key, item) for key, item in value.items())
        elif isinstance(value, list):
            inner = "".join(element("item", item) for item in value)
        else:
            inner = typed(value)
        return f"{mark}<{name}>{inner}{mark}</{name}>"

    def one(call: Call) -> str:
        inner = "".join(element(key, value) for key, value in call.arguments.items())
        return f'{mark}<invoke name="{call.name}">{inner}{mark}</invoke>\n'

    return f"{mark}<tool_call>\n{''.join(map(one, found))}{mark}</tool_call>"


THINK = {"begin_reasoning": "<think>", "end_reasoning": "</think>\n\n"}
LINES = {"begin_reasoning": "<think>\n", "end_reasoning": "\n</think>\n\n"}
OPEN = {**LINES, "is_open": True}
FUNCTION_TAGS = ("<function=", "</function>", "<parameter=", "</parameter>")
QWEN = tagged(
    "<tool_call>",
    "<function=NAME>",
    "<parameter=KEY>",
    "</tool_call> </function> </parameter>",
    line="\n",
    each_block=True,
)
SEED = tagged("<seed:tool_call>", "<function=NAME>", "<parameter=KEY>", "</seed:tool_call> </function> </parameter>")
MINIMAX = tagged(
    "<minimax:tool_call>",
    '<invoke name="NAME">',
    '<parameter name="KEY">',
    "</minimax:tool_call> </invoke> </parameter>",
)
STEP_TAGS = ('<steptml:invoke name="', "</steptml:invoke>", '<steptml:parameter name="', "</steptml:parameter>")
ATEM_TAGS = ('<atem:parameter name="', "</atem:parameter>", "</atem:invoke>")
INVOKE_TAGS = ('<invoke name="', "</invoke>", '<parameter name="', "</parameter>")


def atem(found: tuple[Call, ...]) -> str:
    """Returns one message to the tool for each call."""

    def one(call: Call) -> str:
        values = "".join(
            f'<atem:parameter name="{key}">{typed(value)}</atem:parameter>\n' for key, value in call.arguments.items()
        )
        invoke = f'<atem:invoke name="{call.name}">\n{values}</atem:invoke>'
        return f" to={call.name}<|message|><atem:function_calls>\n{invoke}\n</atem:function_calls>"

    return "<|eom|><|start|>assistant".join(map(one, found))


def dsml(block: str) -> WriteCalls:
    mark = "｜DSML｜"
    return tagged(
        f"<{mark}{block}>",
        f'<{mark}invoke name="NAME">',
        f'<{mark}parameter name="KEY" string="IS">',
        f"</{mark}{block}> </{mark}invoke> </{mark}parameter>",
    )


COHERE = objects(
    before="<|START_ACTION|>[\n", between=",\n", after="\n]<|END_ACTION|>", name="tool_name", arguments="parameters"
)
NEMOTRON_V2 = objects(before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>")
GEMMA = marked("<|tool_call>", "<tool_call|>", '<|"|>')
MINIMAX_M1 = objects(before="<tool_calls>\n", after="\n</tool_calls>")
HERMES = each("<tool_call>\n", "\n</tool_call>")
FAMILIES = (
    Family("apertus", "", apertus, ()),
    Family("cohere_command3", "cohere_command3",
           COHERE, (), "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    Family("deepseek_v3", "deepseek_r1", deepseek("function<｜tool▁sep｜>NAME\n```json\n", "\n```"), (), **THINK),
    Family("deepseek_v31", "deepseek_v3", deepseek("NAME<｜tool▁sep｜>", ""), (), **THINK),
    Family("deepseek_v32", "deepseek_v3", dsml("function_calls"), ("｜DSML｜",), **THINK),
    Family("deepseek_v32", "deepseek_v4", dsml("tool_calls"), ("｜DSML｜",), **THINK),
    Family("deepseek_v4", "deepseek_v4", dsml("tool_calls"), ("｜DSML｜",), **THINK),
    Family("ernie45", "ernie45", HERMES, (), "<think>\n", "\n</think>\n\n", "<response>\n", "\n</response>\n"),
    Family("functionary_v31", "", functionary, ()),
    Family("functionary_v32", "", recipients, (), begin_text="all\n"),
    Family("functiongemma", "", marked("<start_function_call>", "<end_function_call>", "<escape>"), ()),
    Family("gemma4", "gemma4", GEMMA, (), "<|channel>thought\n", "<channel|>"),
    Family("gigachat3", "", each("<|function_call|>", ""), ()),
    Family("glm45", "glm45", glm, (), **THINK),
    Family("glm47", "glm47", glm, (), **OPEN),
    Family("granite", "granite", objects(before="<|tool_call|>[", between=", ", after="]"), (),
           "Here is my thought process: ", " Here is my response: "),
    Family("granite-20b-fc", "", each("<function_call> ", ""), ()),
    Family("granite4", "", HERMES, ()),
    Family("hermes", "qwen3", HERMES, (), **LINES),
    Family("hunyuan_a13b", "hunyuan_a13b", objects(before="<tool_calls>[", between=", ", after="]</tool_calls>"), (),
           "<think>\n", "\n</think>\n", "<answer>\n", "\n</answer>"),
    Family("hy_v3", "hy_v3", hunyuan(":opensource"), (), "<think:opensource>", "</think:opensource>", is_open=True),
    Family("hy_v3", "hy_v3", hunyuan(""), (), **THINK),
    Family("internlm", "", each("<|action_start|><|plugin|>\n", "<|action_end|>", "parameters"), ()),
    Family("jamba", "", objects(before="<tool_calls>[", between=", ", after="]</tool_calls>"), ()),
    Family("jamba", "apriel", objects(before="<tool_calls>[", between=", ", after="]</tool_calls>"), (),
           "Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n", "", "\n[END FINAL RESPONSE]\n"),
    Family("kimi_k2", "kimi_k2", kimi, (), **THINK),
    Family("kimi_k3", "kimi_k3", xtml, (), "<|open|>think<|sep|>", "<|close|>think<|sep|>",
           "<|open|>response<|sep|>", "<|close|>response<|sep|>", is_open=True),
    Family("kimi_k3", "kimi_k3", xtml, (), "<|open|>think<|sep|>", "<|close|>think<|sep|>",
           "<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    Family("lfm2", "deepseek_r1", python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"), (), **THINK),
    Family("llama3_json", "", objects(between="; ", arguments="parameters"), ()),
    Family("llama4_json", "", objects(before="<|python_tag|>", between="; ", arguments="parameters"), ()),
    Family("llama4_pythonic", "", python("<|python_start|>[", ", ", "]<|python_end|>"), ()),
    Family("longcat", "deepseek_r1", each("<longcat_tool_call>\n", "\n</longcat_tool_call>"), (), **LINES),
    Family("mimo", "mimo", QWEN, FUNCTION_TAGS, **LINES),
    Family("minimax", "deepseek_r1", MINIMAX_M1, (), **LINES),
    Family("minimax_m2", "minimax_m2", MINIMAX, INVOKE_TAGS, **OPEN),
    Family("minicpm5", "deepseek_r1", minicpm, (), **LINES),
    Family("minimax_m3", "minimax_m3", elements, (), "<mm:think>", "</mm:think>"),
    Family("mistral", "mistral", mistral, (), "[THINK]", "[/THINK]"),
    Family("mistral", "", objects(before="[TOOL_CALLS][", between=", ", after="]"), ()),
    Family("muse_glimmer", "muse_glimmer", atem, ATEM_TAGS, " to=self<|message|>",
           "<|eom|><|start|>assistant", " to=user<|message|>", "<|eom|><|start|>assistant"),
    Family("nemotron_json", "deepseek_r1", NEMOTRON_V2, (), **OPEN),
    Family("nemotron_v3", "nemotron_v3", QWEN, FUNCTION_TAGS, **OPEN),
    Family("olmo3", "olmo3", python("<function_calls>", "\n", "</function_calls>"), (), **THINK),
    Family("openai", "openai_gptoss", harmony, (), "<|channel|>analysis<|message|>", "<|end|><|start|>assistant",
           "<|channel|>final<|message|>", "<|end|>"),
    Family("phi4_mini_json", "", objects(before="functools[", between=", ", after="]"), ("functools[",)),
    Family("pythonic", "", python("[", ", ", "]"), (), calls_alone=True),
    Family("qwen3_coder", "", QWEN, FUNCTION_TAGS),
    Family("qwen3_json", "holo2", HERMES, (), **OPEN),
    Family("qwen3_xml", "qwen3", QWEN, FUNCTION_TAGS, **OPEN),
    Family("seed_oss", "seed_oss", SEED, FUNCTION_TAGS, "<seed:think>", "</seed:think>"),
    Family("solar_open", "solar_open", solar, (), "<|think|>", "<|end|>", "<|begin|>assistant<|content|>", "<|end|>"),
    Family("step3", "step3", step3, STEP_TAGS, **THINK),
    Family("step3p5", "step3p5", QWEN, FUNCTION_TAGS, **OPEN),
    Family("xlam", "", objects(before="[", between=", ", after="]"), (), calls_alone=True),
)  # fmt: skip
