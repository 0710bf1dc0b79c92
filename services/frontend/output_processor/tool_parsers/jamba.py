"""Jamba and Hunyuan A13B: <tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>"""

from quire.services.frontend.output_processor.parsing.formats import json_blocks
from quire.services.frontend.output_processor.parsing.wording import Wording, json_arguments

WORDING = Wording(
    json_arguments('{"name": NAME, "arguments": ', "}"), before="<tool_calls>[", between=", ", after="]</tool_calls>"
)
FORMAT = json_blocks("<tool_calls>", "</tool_calls>", wording=WORDING)
