"""Tool calls of Granite 20B function calling: <function_call> {"name": "add", "arguments": {"a": 1}}, several in a
row."""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import json_blocks

GRAMMAR = CallGrammar(json_arguments('<function_call> {"name": NAME, "arguments": ', "}"))
FORMAT = json_blocks("<function_call>", grammar=GRAMMAR)
