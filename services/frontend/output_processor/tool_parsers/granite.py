"""Granite 3: <|tool_call|>[{"name": "add", "arguments": {"a": 1}}], with nothing behind it; 3.0 wrote <tool_call>."""

from quire.services.frontend.output_processor.parsing.formats import json_blocks
from quire.services.frontend.output_processor.parsing.wording import Wording, json_arguments

WORDING = Wording(json_arguments('{"name": NAME, "arguments": ', "}"), before="<|tool_call|>[", between=", ", after="]")
FORMAT = json_blocks(("<|tool_call|>", "<tool_call>"), wording=WORDING)
