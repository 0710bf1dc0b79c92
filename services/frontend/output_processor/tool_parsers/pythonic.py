"""Llama 3.2, ToolACE and others: [add(a=1, b="two"), now()] as the whole answer. Llama 4 puts <|python_start|> and
<|python_end|> around it."""

from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.json_calls import any_name
from quire.services.frontend.output_processor.parsing.markup.python_calls import listed, listed_first
from quire.services.frontend.output_processor.parsing.scanner import Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter

START, END = "<|python_start|>", "<|python_end|>"
MARKUP = CallMarkup((START,), (END,))


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """Without the markers it could be any list: only names of tools on offer count."""
    yield from scan.skip_space()
    if not (yield from scan.next_is(START)):
        yield from listed_first(scan, writer, schemas, schemas.__contains__, END)
    yield from call_blocks(scan, writer, MARKUP, lambda _start: listed(scan, writer, schemas, any_name))


FORMAT = ToolFormat(read, (START, END), starts=(START,))
