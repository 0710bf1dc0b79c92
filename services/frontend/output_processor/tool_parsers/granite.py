"""Granite 3: <|tool_call|>[{"name": "add", "arguments": {"a": 1}}], with nothing behind it; 3.0 wrote <tool_call>."""

from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import Keys, blocks
from services.frontend.output_processor.parsing.scanner import Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.wording import Wording, json_arguments
from services.frontend.output_processor.parsing.writer import EventWriter

STARTS = ("<|tool_call|>", "<tool_call>")
MARKERS = Markers(*STARTS)


def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
    yield from blocks(scan, writer, MARKERS, (), Keys())


WORDING = Wording(json_arguments('{"name": NAME, "arguments": ', "}"), before="<|tool_call|>[", between=", ", after="]")
FORMAT = ToolFormat(read, STARTS, wordings=(WORDING,), starts=STARTS)
