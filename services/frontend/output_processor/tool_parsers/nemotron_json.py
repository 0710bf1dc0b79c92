"""Nemotron Nano v2: <TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>"""

from quire.services.frontend.output_processor.parsing.formats import json_blocks
from quire.services.frontend.output_processor.parsing.wording import Wording, json_arguments

WORDING = Wording(
    json_arguments('{"name": NAME, "arguments": ', "}"), before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"
)
FORMAT = json_blocks("<TOOLCALL>", "</TOOLCALL>", wording=WORDING)
