"""Kimi K2: <think>…</think>; it may also go over to calls without an end."""

from services.frontend.output_processor.parsing.delimited_reasoning import delimited

FORMAT = delimited("<think>", "</think>", or_before="<|tool_calls_section_begin|>")
