"""Tool calls of InternLM 2: <|action_start|><|plugin|>{"name": "add", "parameters": {"a": 1}}<|action_end|>"""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import json_blocks

GRAMMAR = CallGrammar(json_arguments('<|action_start|><|plugin|>\n{"name": NAME, "parameters": ', "}<|action_end|>"))
FORMAT = json_blocks("<|action_start|><|plugin|>", "<|action_end|>", grammar=GRAMMAR)
