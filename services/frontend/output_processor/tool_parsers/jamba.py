"""Jamba and Hunyuan A13B: <tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>"""

from services.frontend.output_processor.parsing.formats import json_blocks

FORMAT = json_blocks("<tool_calls>", "</tool_calls>")
