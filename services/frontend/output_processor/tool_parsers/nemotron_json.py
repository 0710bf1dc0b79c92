"""Tool calls of Nemotron Nano v2: <TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>"""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import json_blocks

GRAMMAR = CallGrammar(
    json_arguments('{"name": NAME, "arguments": ', "}"), before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"
)
FORMAT = json_blocks("<TOOLCALL>", "</TOOLCALL>", grammar=GRAMMAR)
