"""OLMo 3: <function_calls>, one add(a=1, b="two") a line, </function_calls>"""

from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import any_name, close
from services.frontend.output_processor.parsing.python_calls import call
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.writer import EventWriter

START, END = "<function_calls>", "</function_calls>"
MARKERS = Markers(START)


def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
    while (yield from scan.until(MARKERS, writer.content)):
        before = writer.num_calls
        try:
            more = True
            while more:
                yield from scan.skip_space()
                yield from call(scan, writer, any_name)
                yield from scan.skip_space()
                more = bool((yield from scan.peek())) and not (yield from scan.comes(END))
        except Malformed:
            writer.no_markup()
        yield from close(scan, writer, (END,), called=writer.num_calls > before)


FORMAT = ToolFormat(read, (START, END), starts=(START,))
