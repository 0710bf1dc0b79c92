"""Selection of parsers by the markup that a chat template writes for conversations with calls or reasoning.

The first row whose texts all occur in the template wins.
"""

from __future__ import annotations

NONE = "none"

Rows = tuple[tuple[tuple[str, ...], str], ...]

TOOLS: Rows = (
    (("<|channel|>", "<|start|>"), "openai"),
    (("<atem:invoke", "<|message|>"), "muse_glimmer"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<|tool_call:begin|>", "<|tool_call:args|>"), "solar_open"),
    (("｜DSML｜tool_calls",), "deepseek_v4"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("steptml:",), "step3"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),  # the calls of earlier turns are part of their content
    (("<|action_start|>",), "internlm"),
    (("<|/tool|>",), "phi4_mini_json"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<function_calls>",), "olmo3"),
    (("<tool_sep", "<arg_key"), "hy_v3"),
    (("<arg_key>",), "glm45"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|role_sep|>", "<|message_sep|>"), "gigachat3"),
    (("<tool_calls>",), "jamba"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "llama4_pythonic"),
    ((">>>all",), "functionary_v32"),
    (("<function=", "<|python_tag|>"), "functionary_v31"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>ipython", '"parameters": '), "llama3_json"),
)
REASONING: Rows = (
    (("<|channel|>", "<|start|>"), "openai_gptoss"),
    (("<atem:invoke", "<|message|>"), "muse_glimmer"),
    (("[THINK]",), "mistral"),
    (("<mm:think>",), "minimax_m3"),
    (("<|open|>", "<|close|>", "think"), "kimi_k3"),
    (("<|think|>", "<|tool_call:begin|>"), "solar_open"),
    (("<tool_sep", "<arg_key", "<think"), "hy_v3"),
    (("[BEGIN FINAL RESPONSE]",), "apriel"),
    (("<seed:think>",), "seed_oss"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<|channel>thought",), "gemma4"),
    (("<|tool_calls_section_begin|>", "<think>"), "kimi_k2"),
    (("<think>", "<answer>"), "hunyuan_a13b"),
    (("<minimax:tool_call>", "<think>"), "deepseek_r1"),  # its <response> belongs to tools
    (("<think>", "<response>"), "ernie45"),
    (("Here is my thought process",), "granite"),
    (("<think>",), "deepseek_r1"),
)


def detect(rows: Rows, template: str) -> str:
    """Returns the name of the first parser that fits the template, or NONE."""
    return next((name for texts, name in rows if all(text in template for text in texts)), NONE)
