"""Command A and R7B:

<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>
"""

from services.frontend.output_processor.parsing.formats import json_blocks
from services.frontend.output_processor.parsing.json_calls import Keys

KEYS = Keys(name="tool_name", id="")  # its ids count from 0 in every answer: not unique in a conversation
FORMAT = json_blocks("<|START_ACTION|>", "<|END_ACTION|>", keys=KEYS)
