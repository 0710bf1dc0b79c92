"""Reasoning of DeepSeek R1 and V3.1, Qwen3, QwQ, GLM 4.5, MiniMax M2, Step 3, OLMo 3, Nemotron 3 and most others:
<think>…</think>, the first of which is often part of the prompt."""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format

FORMAT = delimited_format("<think>", "</think>")
