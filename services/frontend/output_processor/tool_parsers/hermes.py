"""Tool calls of Hermes, Qwen 2.5 and 3, Granite 4, quire-tiny:

<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
"""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import json_blocks

GRAMMAR = CallGrammar(json_arguments('<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"))
FORMAT = json_blocks("<tool_call>", "</tool_call>", grammar=GRAMMAR)
