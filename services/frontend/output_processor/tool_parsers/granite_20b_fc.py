"""Granite 20B function calling: <function_call> {"name": "add", "arguments": {"a": 1}}, several in a row."""

from services.frontend.output_processor.parsing.formats import json_blocks

FORMAT = json_blocks("<function_call>")
