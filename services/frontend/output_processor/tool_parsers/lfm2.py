"""LFM2: <|tool_call_start|>[add(a=1), now()]<|tool_call_end|>"""

from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import any_name
from services.frontend.output_processor.parsing.python_calls import listed
from services.frontend.output_processor.parsing.scanner import Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.writer import EventWriter

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
MARKERS = Markers(START)


def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
    while (yield from scan.until(MARKERS, writer.content)):
        yield from listed(scan, writer, any_name, END)


FORMAT = ToolFormat(read, (START, END), starts=(START,))
