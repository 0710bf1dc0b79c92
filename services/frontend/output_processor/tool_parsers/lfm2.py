"""Tool calls of LFM2: <|tool_call_start|>[add(a=1), now()]<|tool_call_end|>"""

from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.json_calls import any_name
from quire.services.frontend.output_processor.parsing.markup.python_calls import call_list
from quire.services.frontend.output_processor.parsing.scanner import Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
MARKUP = CallMarkup((START,), (END,))


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    return call_blocks(scan, writer, MARKUP, lambda _start: call_list(scan, writer, schemas, any_name))


FORMAT = ToolFormat(read, (START, END), starts=(START,))
