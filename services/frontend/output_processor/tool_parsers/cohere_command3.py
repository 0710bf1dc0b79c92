"""Tool calls of Command A and R7B:

<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>
"""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import json_blocks
from quire.services.frontend.output_processor.parsing.markup.json_calls import Keys

KEYS = Keys(name="tool_name", id="")  # its ids count from 0 in every answer: not unique in a conversation
GRAMMAR = CallGrammar(
    json_arguments('    {"tool_call_id": "0", "tool_name": NAME, "parameters": ', "}"),
    before="<|START_ACTION|>[\n",
    between=",\n",
    after="\n]<|END_ACTION|>",
)
FORMAT = json_blocks("<|START_ACTION|>", "<|END_ACTION|>", keys=KEYS, grammar=GRAMMAR)
