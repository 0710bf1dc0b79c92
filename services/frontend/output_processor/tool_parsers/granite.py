"""Tool calls of Granite 3: <|tool_call|>[{"name": "add", "arguments": {"a": 1}}], without an end marker; 3.0 wrote
<tool_call>."""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import json_blocks

GRAMMAR = CallGrammar(
    json_arguments('{"name": NAME, "arguments": ', "}"), before="<|tool_call|>[", between=", ", after="]"
)
FORMAT = json_blocks(("<|tool_call|>", "<tool_call>"), grammar=GRAMMAR)
