"""Tool calls of LongCat Flash: <longcat_tool_call>{"name": "add", "arguments": {"a": 1}}</longcat_tool_call>"""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import json_blocks

GRAMMAR = CallGrammar(json_arguments('<longcat_tool_call>\n{"name": NAME, "arguments": ', "}\n</longcat_tool_call>"))
FORMAT = json_blocks("<longcat_tool_call>", "</longcat_tool_call>", grammar=GRAMMAR)
