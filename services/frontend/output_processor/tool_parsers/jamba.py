"""Tool calls of Jamba and Hunyuan A13B: <tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>"""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import json_blocks

GRAMMAR = CallGrammar(
    json_arguments('{"name": NAME, "arguments": ', "}"), before="<tool_calls>[", between=", ", after="]</tool_calls>"
)
FORMAT = json_blocks("<tool_calls>", "</tool_calls>", grammar=GRAMMAR)
