"""Phi-4-mini: functools[{"name": "add", "arguments": {"a": 1}}]"""

from dataclasses import replace

from services.frontend.output_processor.parsing.formats import json_blocks

FORMAT = replace(json_blocks("functools"), tokens=("<|tool_call|>", "<|/tool_call|>"))
