"""Tool calls of Phi-4-mini: functools[{"name": "add", "arguments": {"a": 1}}]"""

from dataclasses import replace

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import json_blocks

GRAMMAR = CallGrammar(json_arguments('{"name": NAME, "arguments": ', "}"), before="functools[", between=", ", after="]")
FORMAT = replace(json_blocks("functools", grammar=GRAMMAR), tokens=("<|tool_call|>", "<|/tool_call|>"))
