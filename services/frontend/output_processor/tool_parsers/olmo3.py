"""Tool calls of OLMo 3: <function_calls>, one add(a=1, b="two") per line, </function_calls>"""

from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.json_calls import any_name
from quire.services.frontend.output_processor.parsing.markup.python_calls import call
from quire.services.frontend.output_processor.parsing.scanner import Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter

START, END = "<function_calls>", "</function_calls>"
MARKUP = CallMarkup((START,), (END,))


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    return call_blocks(scan, writer, MARKUP, lambda _start: _calls(scan, writer, schemas))


def _calls(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """Reads Python calls up to the end marker or the end of the text; any name is accepted."""
    more = True
    while more:
        yield from scan.skip_space()
        yield from call(scan, writer, schemas, any_name)
        yield from scan.skip_space()
        more = bool((yield from scan.peek())) and not (yield from scan.next_is(END))


FORMAT = ToolFormat(read, (START, END), starts=(START,))
