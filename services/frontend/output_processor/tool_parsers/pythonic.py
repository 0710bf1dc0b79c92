"""Llama 3.2, ToolACE and others: [add(a=1, b="two"), now()] as the whole answer. Llama 4 puts <|python_start|> and
<|python_end|> around it."""

from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import any_name
from services.frontend.output_processor.parsing.python_calls import listed
from services.frontend.output_processor.parsing.scanner import Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.writer import EventWriter

START, END = "<|python_start|>", "<|python_end|>"
MARKERS = Markers(START)


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """Without the markers it could be any list: only names of tools on offer count."""
    yield from scan.skip_space()
    is_name = any_name if (yield from scan.try_text(START)) else schemas.__contains__
    while True:
        yield from listed(scan, writer, is_name, END)
        if not (yield from scan.until(MARKERS, writer.content)):
            return
        is_name = any_name


FORMAT = ToolFormat(read, (START, END), starts=(START,))
