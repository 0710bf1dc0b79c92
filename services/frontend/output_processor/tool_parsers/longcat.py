"""LongCat Flash: <longcat_tool_call>{"name": "add", "arguments": {"a": 1}}</longcat_tool_call>"""

from services.frontend.output_processor.parsing.formats import json_blocks

FORMAT = json_blocks("<longcat_tool_call>", "</longcat_tool_call>")
