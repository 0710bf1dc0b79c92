"""Tool calls of GigaChat 3.1: <|function_call|>{"name": "add", "arguments": {"a": 1}}, one per answer; 3.0 begins a
message instead:

<|message_sep|>

function call<|role_sep|>
{"name": "add", "arguments": {"a": 1}}
"""

from dataclasses import replace

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import json_blocks

CALL, ROLE, ROLE_END, MESSAGE_END = "<|function_call|>", "function call", "<|role_sep|>", "<|message_sep|>"
NEW = CallGrammar(json_arguments(f'{CALL}{{"name": NAME, "arguments": ', "}"), between="", needs=CALL)
OLD = CallGrammar(json_arguments(f'{ROLE}{ROLE_END}\n{{"name": NAME, "arguments": ', "}"), between=f"{MESSAGE_END}\n\n")
FORMAT = replace(
    json_blocks((CALL, f"{ROLE}{ROLE_END}"), MESSAGE_END),
    tokens=(CALL, ROLE_END, MESSAGE_END),
    grammars=(NEW, OLD),
)
