"""LFM2: <|tool_call_start|>[add(a=1), now()]<|tool_call_end|>"""

from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import any_name, close
from services.frontend.output_processor.parsing.python_calls import calls
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.writer import Writer

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
MARKERS = Markers(START)


def read(scan: Scanner, writer: Writer, _schemas: ToolSchemas) -> Steps[None]:
    while (yield from scan.until(MARKERS, writer.content)):
        before = writer.num_calls
        try:
            yield from scan.skip_space()
            yield from scan.expect("[")
            yield from calls(scan, writer, any_name)
            yield from scan.expect("]")
            scan.settle()
        except Malformed:
            writer.no_markup()
        yield from close(scan, writer, (END,), called=writer.num_calls > before)


FORMAT = ToolFormat(read, (START, END))
