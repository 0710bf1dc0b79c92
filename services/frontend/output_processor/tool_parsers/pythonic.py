"""Tool calls of Llama 3.2, ToolACE and others: [add(a=1, b="two"), now()] as the whole answer. Llama 4 puts
<|python_start|> and <|python_end|> around it."""

from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.json_calls import any_name
from quire.services.frontend.output_processor.parsing.markup.python_calls import call_list, leading_call_list
from quire.services.frontend.output_processor.parsing.scanner import Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter

START, END = "<|python_start|>", "<|python_end|>"
MARKUP = CallMarkup((START,), (END,))


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """Reads an answer. Without the markers it may be any list: only names of offered tools count."""
    yield from scan.skip_space()
    if not (yield from scan.next_is(START)):
        yield from leading_call_list(scan, writer, schemas, schemas.__contains__, END)
    yield from call_blocks(scan, writer, MARKUP, lambda _start: call_list(scan, writer, schemas, any_name))


FORMAT = ToolFormat(read, (START, END), starts=(START,))
