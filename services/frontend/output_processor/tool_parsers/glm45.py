"""GLM 4.5 to 4.7:

<tool_call>add
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>

4.7 leaves the line breaks out.
"""

import re

from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import LONGEST_NAME, close
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tagged_calls import no_padding
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.typed_arguments import TypedArguments
from services.frontend.output_processor.parsing.wording import ParameterTexts, Wording, text_parameters
from services.frontend.output_processor.parsing.writer import EventWriter

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
NAME = re.compile(r"[^<>{}\n]+")
STARTS = Markers(START)
VALUE_ENDS = Markers(VALUE_END, padding=no_padding)


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    while (yield from scan.until(STARTS, writer.content)):
        before = writer.num_calls
        try:
            yield from _call(scan, writer, schemas)
        except Malformed:
            writer.no_markup()
        yield from close(scan, writer, (END,), called=writer.num_calls > before)


def _call(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """A call from where its first parameter or its end follows the name."""
    yield from scan.skip_space()
    name = (yield from scan.whole(NAME, LONGEST_NAME)).strip()
    yield from scan.skip_space()
    if not name or not (yield from scan.comes(KEY, END)):
        raise Malformed
    writer.start(name)
    arguments = TypedArguments(scan, writer)
    while (yield from scan.try_text(KEY)):
        try:
            key = (yield from scan.whole(NAME, LONGEST_NAME)).strip()
            yield from scan.expect(KEY_END)
            yield from scan.skip_space()
            yield from scan.expect(VALUE)
        except Malformed:
            arguments.close()
            raise
        arguments.key(key)
        if not (yield from arguments.value(schemas.types(name, key), VALUE_ENDS)):
            return
        yield from scan.skip_space()
    arguments.close()


TEXTS = ParameterTexts(
    function=f"{START}NAME\n",
    function_end=END,
    parameter=f"{KEY}KEY{KEY_END}\n{VALUE}",
    parameter_end=f"{VALUE_END}\n",
)
WORDING = Wording(text_parameters(TEXTS))
FORMAT = ToolFormat(read, (START, END, KEY, KEY_END, VALUE, VALUE_END), wordings=(WORDING,), starts=(START,))
