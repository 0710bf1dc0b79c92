"""Phi-4-mini: functools[{"name": "add", "arguments": {"a": 1}}]"""

from dataclasses import replace

from quire.services.frontend.output_processor.parsing.formats import json_blocks
from quire.services.frontend.output_processor.parsing.wording import Wording, json_arguments

WORDING = Wording(json_arguments('{"name": NAME, "arguments": ', "}"), before="functools[", between=", ", after="]")
FORMAT = replace(json_blocks("functools", wording=WORDING), tokens=("<|tool_call|>", "<|/tool_call|>"))
