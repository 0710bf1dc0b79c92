"""Granite 20B function calling: <function_call> {"name": "add", "arguments": {"a": 1}}, several in a row."""

from quire.services.frontend.output_processor.parsing.formats import json_blocks
from quire.services.frontend.output_processor.parsing.wording import Wording, json_arguments

WORDING = Wording(json_arguments('<function_call> {"name": NAME, "arguments": ', "}"))
FORMAT = json_blocks("<function_call>", wording=WORDING)
